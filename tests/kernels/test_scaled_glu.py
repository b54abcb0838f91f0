"""Gated activations scaled by row: the reference implementation and the Triton kernels against fp64 and autograd."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import PLAIN_ACTIVATIONS
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, LAUNCHER_DTYPES, nan_filled_memory, rounding

from maingrad.kernels import glu_named, scaled_glu, scaled_glu_backward
from maingrad.kernels.glu.reference import GLU_ACTIVATIONS

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels.glu.triton_kernels import scaled_glu_backward_triton, scaled_glu_triton

# The limit is small, so that both halves are often clamped, and neither bf16 nor fp16 can represent it.
NUMBERS = {"limit": 1.53, "alpha": 1.1}
SIZES = [(1, 1), (7, 33), (130, 96), (3, 1409), (40, 8)]


def launched(da: Tensor, h: Tensor, probs: Tensor | None, activation: str, **numbers: float) -> tuple[Tensor, ...]:
    glu = glu_named(activation, **numbers)
    with nan_filled_memory():
        return scaled_glu_triton(h, probs, glu), *scaled_glu_backward_triton(da, h, probs, glu)


def called(da: Tensor, h: Tensor, probs: Tensor | None, activation: str, **numbers: float) -> tuple[Tensor, ...]:
    glu = glu_named(activation, **numbers)
    return scaled_glu(h, probs, glu), *scaled_glu_backward(da, h, probs, glu)


def operands(rows: int, features: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    da = torch.randn(rows, features, generator=generator)
    h = 2 * torch.randn(rows, 2 * features, generator=generator)
    return da.to(device, dtype), h.to(device, dtype), torch.rand(rows, generator=generator).to(device)


def exact(da: Tensor, h: Tensor, probs: Tensor | None, activation: str, **numbers: float) -> tuple[Tensor, ...]:
    """Output and gradients in fp64, by autograd over the activation written out in plain PyTorch."""
    h = h.double().requires_grad_()
    probs = None if probs is None else probs.double().requires_grad_()
    offset = numbers.pop("linear_offset", 1.0)
    a = PLAIN_ACTIVATIONS[activation](h, **numbers)
    if offset != 1.0:  # linear in the offset, of which the plain activation has 1
        gate = h[:, : h.shape[1] // 2].clamp(max=numbers["limit"])
        a = a + (offset - 1) * gate * torch.sigmoid(numbers["alpha"] * gate)
    a = a if probs is None else a * probs[:, None]
    grads = torch.autograd.grad(a, [h] if probs is None else [h, probs], da.double())
    return a.detach(), *grads


def assert_near(actual: Tensor, expected: Tensor, stored: float, computed: Tensor | float) -> None:
    """Allow one rounding of the stored value, plus the absolute error ``computed`` of the fp32 arithmetic."""
    bound = stored * expected.abs() + computed
    worst = ((actual.double() - expected).abs() - bound).max() if actual.numel() else torch.zeros(())
    assert worst <= 0, f"{worst} above the bound"


def assert_same(run: Callable[..., Any], actual: Tensor, expected: Tensor) -> None:
    """Bitwise where the kernels run. PyTorch on a CPU computes the ends of its vectors by other instructions."""
    if run is called and not actual.is_cuda:
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize(("device", "dtype"), LAUNCHER_DTYPES)
@pytest.mark.parametrize("activation", GLU_ACTIVATIONS)
@pytest.mark.sampled(7)
def test_against_fp64(run: Callable[..., Any], device: str, dtype: torch.dtype, activation: str) -> None:
    numbers = NUMBERS if activation == "clamped_swiglu" else {}
    for rows, features in SIZES:
        da, h, probs = operands(rows, features, dtype, device)
        a, dh, dprobs = run(da, h, probs, activation, **numbers)
        assert a.dtype is dh.dtype is dtype and dprobs.dtype is torch.float32
        expected_a, expected_dh, expected_dprobs = exact(da, h, probs, activation, **numbers)
        # A dozen fp32 roundings of factors that are at most 8 * 8 * 8 here: gate, linear half, upstream gradient. The
        # interpreter is numpy's exp, the compiler's a faster one of two more bits of error.
        fp32 = 16 * torch.finfo(torch.float32).eps
        stored = rounding(device if run is launched else "cuda", dtype)
        size = h.double().abs().max() ** 2 * max(1.0, da.double().abs().max().item())
        # Near 0, fp16 values are off by up to half of fp16's smallest number.
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert_near(a, expected_a, stored, fp32 * size + tiny)
        assert_near(dh, expected_dh, stored, fp32 * size + tiny)
        # F products of such size, summed: errors of a sum of random signs grow with the root, at worst with F.
        assert_near(dprobs, expected_dprobs, fp32, fp32 * size * math.sqrt(features))


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_without_probabilities_and_with_an_offset(run: Callable[..., Any], device: str) -> None:
    da, h, probs = operands(9, 21, torch.float32, device)
    a, dh, dprobs = run(da, h, None, "swiglu")
    assert dprobs is None
    for actual, expected in zip((a, dh), exact(da, h, None, "swiglu"), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    numbers = {**NUMBERS, "linear_offset": 0.25}
    for actual, expected in zip(
        run(da, h, probs, "clamped_swiglu", **numbers), exact(da, h, probs, "clamped_swiglu", **numbers), strict=True
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "clamped_swiglu"])
def test_nan_stays_in_its_row(run: Callable[..., Any], device: str, activation: str) -> None:
    da, h, probs = operands(10, 24, torch.float32, device)
    expected = run(da[:6].contiguous(), h[:6].contiguous(), probs[:6].contiguous(), activation)
    for poisoned in (da, h, probs):
        poisoned[6:] = float("nan")
    for actual, clean in zip(run(da, h, probs, activation), expected, strict=True):
        assert_same(run, actual[:6], clean)
        assert actual[6:].isnan().all()


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("activation", GLU_ACTIVATIONS)
def test_nan_of_one_half_shows(run: Callable[..., Any], device: str, activation: str) -> None:
    """A comparison with 0 or with the limit takes it for no number beyond."""
    da, h, probs = operands(2, 6, torch.float32, device)
    for half in (0, 6):
        spoilt = h.clone()
        spoilt[1, half + 2] = float("nan")
        a, dh, dprobs = run(da, spoilt, probs, activation)
        assert a[1, 2].isnan() and a.isnan().sum() == 1
        assert dh[1, 8 - half].isnan() and not dh[0].isnan().any(), "the other half's gradient"
        assert dprobs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_rows_of_zeros_stay_zeros(run: Callable[..., Any], device: str) -> None:
    da, h, probs = operands(4, 12, torch.float32, device)
    h[2:], da[2:] = 0, 0
    for actual in run(da, h, probs, "swiglu"):
        assert not actual[2:].any() and actual[:2].any()


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("activation", ["reglu", "sreglu"])
def test_a_gate_of_zero_gets_no_gradient(run: Callable[..., Any], device: str, activation: str) -> None:
    """As torch's relu has it: the linear half beside the gate is not 0."""
    da, h, probs = operands(4, 12, torch.float32, device)
    h[:, :6] = 0
    a, dh, _ = run(da, h, probs, activation)
    assert not a[:, :6].any() and not dh[:, :6].any() and dh[:, 6:12].any()


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_halves_at_the_limit_are_not_clamped(run: Callable[..., Any], device: str) -> None:
    """Nor those at its negative: they get the gradients that a higher limit gives them."""
    da, h, probs = operands(4, 12, torch.float32, device)
    h[:, ::2] = torch.where(h[:, ::2] < 0, -1.5, 1.5)
    h.clamp_(-1.5, 1.5)
    higher = run(da, h, probs, "clamped_swiglu", limit=9.0)
    for actual, expected in zip(run(da, h, probs, "clamped_swiglu", limit=1.5), higher, strict=True):
        assert torch.equal(actual, expected) and actual.all()


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize(("rows", "features"), [(0, 8), (5, 0), (0, 0)])
def test_nothing_to_do(run: Callable[..., Any], device: str, rows: int, features: int) -> None:
    da, h, probs = operands(rows, features, torch.float32, device)
    a, dh, dprobs = run(da, h, probs, "swiglu")
    assert a.shape == (rows, features) and dh.shape == (rows, 2 * features)
    assert torch.equal(dprobs, torch.zeros_like(probs))


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_any_strides(run: Callable[..., Any], device: str) -> None:
    """Where loads of 16 bytes are impossible, threads take other features and sums have another order."""
    da, h, probs = operands(6, 10, torch.float32, device)
    expected = run(da, h, probs, "swiglu")
    wide = torch.full((6, 64), float("nan"), device=device)
    wide[:, 3:23], wide[:, 30:40] = h, da
    apart = torch.full((12,), float("nan"), device=device)
    apart[::2] = probs
    columns = torch.empty(20, 6, device=device).t().copy_(h)
    for strided in ((wide[:, 30:40], wide[:, 3:23], apart[::2]), (da.t().contiguous().t(), columns, probs)):
        for actual, clean in zip(run(*strided, "swiglu"), expected, strict=True):
            torch.testing.assert_close(actual, clean)
    spread = run(da[:1].expand(6, 10), h, probs, "swiglu")  # the strides of the gradient that sum().backward() passes
    for actual, clean in zip(spread, run(da[:1].repeat(6, 1), h, probs, "swiglu"), strict=True):
        torch.testing.assert_close(actual, clean)


@pytest.mark.parametrize("run", [called, launched])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.sampled(1)
def test_the_same_again(run: Callable[..., Any], device: str) -> None:
    da, h, probs = operands(33, 300, torch.float16, device)
    first = run(da, h, probs, "geglu")
    # Neither the other rows nor their number change a row's result.
    again = run(da[8:], h[8:], probs[8:], "geglu")
    for one, other in zip(first, again, strict=True):
        assert_same(run, one[8:], other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
@given(
    st.integers(0, 40), st.integers(0, 70), st.sampled_from(sorted(GLU_ACTIVATIONS)), st.booleans(), st.integers(0, 99)
)
def test_the_kernel_is_the_reference(rows: int, features: int, activation: str, scaled: bool, seed: int) -> None:
    da, h, probs = operands(rows, features, torch.float32, "cpu", seed)
    given_probs = probs if scaled else None
    for actual, expected in zip(
        launched(da, h, given_probs, activation, **NUMBERS),
        called(da, h, given_probs, activation, **NUMBERS),
        strict=True,
    ):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.in_turn
def test_second_derivatives_of_the_reference() -> None:
    da, h, probs = operands(3, 4, torch.float64, "cpu")
    da, h, probs = da.requires_grad_(), h.requires_grad_(), probs.double().requires_grad_()
    for activation in GLU_ACTIVATIONS:

        def backward(da: Tensor, h: Tensor, probs: Tensor, activation: str = activation) -> tuple[Tensor, ...]:
            return scaled_glu_backward(da, h, probs, glu_named(activation, limit=1.5))

        assert torch.autograd.gradcheck(backward, (da, h, probs))


@pytest.mark.gpu
def test_rows_beyond_32_bits_of_address() -> None:
    """2^31 elements of h lie in front of the last rows."""
    features, rows = 4096, 2**18 + 8
    h = torch.empty(rows, 2 * features, dtype=torch.float16, device="cuda")
    h[-8:] = torch.randn(8, 2 * features, device="cuda").half()
    probs = torch.rand(rows, device="cuda")
    da = torch.ones(1, features, dtype=torch.float16, device="cuda").expand(rows, features)
    expected = called(da[-8:], h[-8:].clone(), probs[-8:].clone(), "swiglu")
    for actual, clean in zip(called(da, h, probs, "swiglu"), expected, strict=True):
        assert torch.equal(actual[-8:], clean)


@pytest.mark.gpu
def test_fp64_on_a_gpu_is_the_reference() -> None:
    da, h, probs = operands(6, 10, torch.float64, "cuda")
    for actual, expected in zip(called(da, h, probs, "swiglu"), exact(da, h, probs, "swiglu"), strict=True):
        torch.testing.assert_close(actual, expected)


def test_what_does_not_fit_is_named() -> None:
    da, h, probs = operands(4, 6, torch.float32, "cpu")
    with pytest.raises(ValueError, match="no gated activation 'gelu': it is one of swiglu"):
        glu_named("gelu")
    with pytest.raises(ValueError, match=r"h \[rows, 2 features\], got \(4, 11\)"):
        scaled_glu(h[:, 1:], probs)
    with pytest.raises(ValueError, match=r"probs \(4,\) on cpu, got \(3,\)"):
        scaled_glu(h, probs[:3])
    with pytest.raises(ValueError, match=r"probs \(4,\) on cpu, got \(4, 1\)"):
        scaled_glu(h, probs[:, None])
    with pytest.raises(TypeError, match=r"floating dtypes, got torch\.float32 and torch\.int64"):
        scaled_glu(h, probs.long())
    for wrong in (h[:, 1:], h[None]):
        with pytest.raises(ValueError, match=r"scaled_glu_backward needs h \[rows, 2 features\]"):
            scaled_glu_backward(da, wrong, probs)
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu; got \(4, 6\), torch\.float16"):
        scaled_glu_backward(da.half(), h, probs)
    with pytest.raises(ValueError, match=r"da \(4, 6\), torch\.float32 on cpu; got \(3, 6\)"):
        scaled_glu_backward(da[:3], h, probs)
    with pytest.raises(TypeError, match=r"floating dtypes, got torch\.int64 and None"):
        scaled_glu(h.long())
    with pytest.raises(ValueError, match=r"probs \(4,\) on cpu, got \(4,\) on meta"):
        scaled_glu(h, probs.to("meta"))
    with pytest.raises(ValueError, match=r"on cpu; got \(4, 6\), torch\.float32 on meta"):
        scaled_glu_backward(da.to("meta"), h, probs)
    for limit in (0.0, math.nan):
        with pytest.raises(ValueError, match=f"limit above 0, got {limit}"):
            glu_named("clamped_swiglu", limit=limit)
