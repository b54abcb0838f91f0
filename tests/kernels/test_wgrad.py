"""``wgrad_accumulate`` against fp64, on every device of the machine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.kernels import wgrad_accumulate

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# (operands, accumulator)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


def operands(
    rows: int, out: int, inner: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dy = torch.randn(rows, out, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, inner, generator=generator, dtype=torch.float64)
    return dy.to(device, dtype), x.to(device, dtype)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "accumulator"), DTYPES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 1, 1), (7, 15, 17), (64, 16, 17), (300, 40, 24)])
def test_against_fp64(
    device: str, dtype: torch.dtype, accumulator: torch.dtype, overwrite: bool, rows: int, out: int, inner: int
) -> None:
    dy, x = operands(rows, out, inner, dtype, device)
    before = torch.randn(out, inner, dtype=torch.float64).to(device, accumulator)
    exact = dy.double().t() @ x.double() + (0 if overwrite else before.double())

    main_grad = before.clone()
    if overwrite:
        main_grad.fill_(float("nan"))  # beta = 0 must not read it
    wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)

    # A sum of `rows` products in the accumulator's precision, one rounding each at worst; CUDA's fp32 operands may run
    # as tf32 only where the user asks for it.
    unit = torch.finfo(accumulator).eps
    assert relative_error(main_grad, exact) <= unit * (2 + rows**0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_rows(device: str, overwrite: bool) -> None:
    dy, x = operands(0, 4, 3, torch.bfloat16, device)
    main_grad = torch.ones(4, 3, device=device)
    wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)
    assert torch.equal(main_grad, torch.zeros_like(main_grad) if overwrite else torch.ones_like(main_grad))


@pytest.mark.parametrize("device", DEVICES)
def test_operands_with_any_strides(device: str) -> None:
    dy, x = operands(24, 10, 6, torch.float32, device)
    expected = dy.t() @ x
    strided_dy = torch.empty(10, 24, device=device).t().copy_(dy)
    strided_x = torch.empty(24, 12, device=device)[:, ::2].copy_(x)
    main_grad = torch.zeros(10, 6, device=device)
    wgrad_accumulate(strided_dy, strided_x, main_grad)
    torch.testing.assert_close(main_grad, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bf16_trap(device: str) -> None:
    """Microbatch gradients 256, 1, -256 leave exactly 1 in fp32; summed in bf16, 256 + 1 is 256 and the 1 is lost."""
    main_grad = torch.zeros(1, 1, device=device)
    for gradient in (256.0, 1.0, -256.0):
        dy = torch.full((1, 1), gradient, dtype=torch.bfloat16, device=device)
        wgrad_accumulate(dy, torch.ones(1, 1, dtype=torch.bfloat16, device=device), main_grad)
    assert main_grad.item() == 1.0


@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(),
)
def test_any_sequence_of_writes_is_the_sum_since_the_last_overwrite(
    rows: int, out: int, inner: int, writes: list[bool], seed: int
) -> None:
    main_grad = torch.randn(out, inner, dtype=torch.float64)
    expected = main_grad.clone()
    for index, overwrite in enumerate(writes):
        dy, x = operands(rows, out, inner, torch.float64, "cpu", seed=(seed + index) % 2**31)
        wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)
        expected = dy.t() @ x + (0 if overwrite else expected)
    torch.testing.assert_close(main_grad, expected, rtol=1e-12, atol=1e-12)


def test_mismatched_operands_are_named() -> None:
    dy, x = operands(4, 3, 2, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"main_grad \[N, K\]; got \(4, 3\), \(4, 2\) and \(2, 3\)"):
        wgrad_accumulate(dy, x, torch.zeros(2, 3))
    for wrong in ((dy[:2], x), (dy, x[..., None]), (dy[..., None], x), (dy[None], x[None]), (dy[:, 0], x)):
        with pytest.raises(ValueError, match=r"dy \[T, N\]"):
            wgrad_accumulate(*wrong, torch.zeros(3, 2))
    with pytest.raises(TypeError, match="one dtype"):
        wgrad_accumulate(dy.half(), x, torch.zeros(3, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_around_a_backward_rounds_no_product(device: str) -> None:
    dy, x = operands(24, 10, 6, torch.float32, device)
    main_grad = torch.zeros(10, 6, device=device)
    with torch.autocast(device, torch.bfloat16):
        wgrad_accumulate(dy, x, main_grad)
    torch.testing.assert_close(main_grad, dy.t() @ x)
