"""Newton-Schulz iterations: the Triton kernels, and the reference, beside singular values in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, nan_filled_memory

pytest.importorskip("triton", reason="the launches are Triton's")
from maingrad.kernels.optimizer.orthogonal import elements, product_triton
from maingrad.kernels.optimizer.orthogonal import orthogonalize as form
from maingrad.kernels.optimizer.orthogonal.flops import orthogonalize_flops
from maingrad.kernels.optimizer.orthogonal.product_triton import ProductConfig, full_product, symmetric_product
from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS, Step, newton_schulz_reference

SIMPLE = COEFFICIENTS["simple"]
SHAPES = [(1, 40, 72), (2, 24, 100), (3, 100, 24), (2, 33, 33), (1, 1, 40), (1, 40, 1)]
"""Both forms, tall and wide, columns that 8 does not divide, vectors."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(matrices: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """By the singular values, in fp64."""
    u, s, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ v


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm())


@pytest.fixture
def on_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device. In the interpreter tiles are small, and kernels run on CPU tensors."""
    device: str = request.param
    if device == "cpu":
        monkeypatch.setattr(form, "runs_on_triton", lambda *_: True)
        for name in ("_GRAM", "_POLYNOMIAL", "_FULL"):
            monkeypatch.setattr(product_triton, name, ProductConfig(32, 32, 32, 4, 2, group=2))
    with nan_filled_memory():
        yield device


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nearer_than_bf16(shape: tuple[int, ...], on_triton: str) -> None:
    """torch.optim.Muon rounds to bf16: its error against fp64 is 1 to 4 % here, that of fp16 a third of it at most."""
    matrices = drawn(*shape)
    wanted = exact(matrices, SIMPLE)
    found = form.orthogonalize(matrices.to(on_triton), SIMPLE)
    in_bf16 = error(newton_schulz_reference(matrices, SIMPLE, torch.bfloat16), wanted)
    assert found.shape == matrices.shape and found.dtype is torch.float16
    assert error(found, wanted) < max(in_bf16 / 3, 2e-3)


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize("name", ["polar_express", "deepseek"])
def test_sets_of_coefficients(name: str, on_triton: str) -> None:
    matrices = drawn(1, 24, 64)
    found = form.orthogonalize(matrices.to(on_triton), COEFFICIENTS[name])
    assert error(found, exact(matrices, COEFFICIENTS[name])) < 0.01


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_few_steps(num_steps: int, on_triton: str) -> None:
    """The Gram form ends before, at and behind its restart."""
    matrices = drawn(1, 24, 64)
    found = form.orthogonalize(matrices.to(on_triton), SIMPLE[:num_steps])
    assert error(found, exact(matrices, SIMPLE[:num_steps])) < 5e-3


@pytest.mark.in_turn
@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
def test_bits_depend_on_no_other_matrix_and_no_power_of_two(on_triton: str) -> None:
    for shape in ((3, 16, 40), (3, 24, 24)):
        matrices = drawn(*shape).to(on_triton)
        together = form.orthogonalize(matrices)
        assert torch.equal(form.orthogonalize(matrices[1]), together[1])
        assert torch.equal(form.orthogonalize(matrices * 2.0**60), together)
        assert torch.equal(form.orthogonalize(matrices * 2.0**-70), together)
        spoilt = matrices.clone()
        spoilt[0], spoilt[2] = float("nan"), 0.0
        others = form.orthogonalize(spoilt)
        assert torch.equal(others[1], together[1])
        assert others[0].isnan().all() and not others[2].any()


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_matrices_of_other_dtypes(dtype: torch.dtype, on_triton: str) -> None:
    """In ranges that fp16 lacks; one matrix by itself, and by steps that are not the default."""
    matrix, steps = drawn(24, 64).to(on_triton, dtype) * 1e-12, COEFFICIENTS["polar_express"][:2]
    found = form.orthogonalize(matrix, steps)
    on_gpu = matrix.is_cuda and dtype is torch.float64  # the reference runs there
    assert found.dtype is (torch.float32 if on_gpu else torch.float16)
    assert error(found, exact(matrix.cpu(), steps)) < 0.015


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape: tuple[int, ...]) -> None:
    matrices = drawn(*shape)
    for each in (matrices, matrices[0]):
        before = each.clone()
        assert error(form.orthogonalize(each, SIMPLE[:2]), exact(each, SIMPLE[:2])) < 1e-5
        assert torch.equal(each, before), "not changed"
    assert error(form.orthogonalize(matrices), exact(matrices, SIMPLE)) < 1e-5
    half = matrices.bfloat16()
    assert torch.equal(form.orthogonalize(half), form.orthogonalize(half.float())), "in fp32"
    assert error(newton_schulz_reference(matrices.double(), SIMPLE, torch.float64), exact(matrices, SIMPLE)) < 1e-12


def test_singular_values_end_near_one() -> None:
    """Those that begin at 0.01 of the Frobenius norm or more."""
    u, s, v = torch.linalg.svd(drawn(1, 64, 96).double(), full_matrices=False)
    s = torch.logspace(0, -3, 64, dtype=torch.float64)
    matrices = u @ torch.diag(s) @ v
    found = torch.linalg.svdvals(form.orthogonalize(matrices.float()).double())[0]
    kept = int((s / s.norm() >= 0.01).sum())
    assert kept > 20
    ends = torch.linalg.svdvals((u.mT @ form.orthogonalize(matrices.float()).double() @ v.mT)[:, :kept, :kept])
    assert float(ends.min()) > 0.68 and float(ends.max()) < 1.14 and float(found.max()) < 1.21


def padded(matrices: Tensor, device: str) -> Tensor:
    """In fp16, rows of whole 16 bytes."""
    count, rows, columns = matrices.shape
    memory = torch.zeros(count, rows, -(-columns // 8) * 8, dtype=torch.float16, device=device)
    return memory[:, :, :columns].copy_(matrices)


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize("rows", [32, 70])
def test_symmetric_products(rows: int, on_triton: str) -> None:
    """Half of a product, and its mirror image; rows of the next matrix are in no tile."""
    a = padded(drawn(2, rows, 48), on_triton)
    tall = padded(a.mT, on_triton)
    addend = drawn(2, rows, rows)
    like_out = padded(torch.zeros(2, rows, rows + 8), on_triton)[:, :, :rows]
    addend = like_out.copy_(addend + addend.mT)
    eye = 3.0 * torch.eye(rows, dtype=torch.float64, device=on_triton)
    for given, is_tall in ((a, False), (tall, True)):
        memory = padded(torch.full((3, rows, rows + 8), 7.0), on_triton)  # a matrix and columns that stay
        out = memory[:2, :, :rows]
        for number in (None, 3.0):
            symmetric_product(given, given, out, tall=is_tall, alpha=0.5, beta=2.0, addend=addend, diagonal=number)
            wanted = 0.5 * (a.double() @ a.double().mT) + 2.0 * addend.double() + (0.0 if number is None else eye)
            assert torch.equal(out, out.mT)
            torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-2)
        symmetric_product(given, given, out, tall=is_tall)
        torch.testing.assert_close(out.double(), a.double() @ a.double().mT, rtol=2e-3, atol=2e-2)
        assert (memory[2] == 7.0).all() and (memory[:2, :, rows : rows + 8] == 7.0).all()


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize(("rows", "contracted", "columns"), [(32, 32, 64), (70, 40, 100), (33, 70, 9)])
def test_full_products(rows: int, contracted: int, columns: int, on_triton: str) -> None:
    """A GPU's stores end with a row's last column, or with its 16 bytes; what lies behind these stays."""
    a, b = padded(drawn(2, rows, contracted), on_triton), padded(drawn(2, contracted, columns), on_triton)
    whole = columns + -columns % 8
    memory = torch.full((2, rows, whole + 8), 7.0, dtype=torch.float16, device=on_triton)
    out = full_product(a, b, memory[:, :, :columns], alpha=0.25)
    torch.testing.assert_close(out.double(), 0.25 * a.double() @ b.double(), rtol=2e-3, atol=2e-2)
    assert (memory[:, :, whole:] == 7.0).all()


@pytest.mark.parametrize("on_triton", LAUNCHER_DEVICES, indirect=True)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.95, True), (0.3, True), (0.95, False)])
def test_passes_over_elements(momentum: float, nesterov: bool, on_triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's operations, on each matrix of a stack; versions rise; what lies between matrices stays."""
    held = [drawn(2, 12, 900).add(number).to(on_triton) for number in range(3)]  # 4,500 elements: two programs
    expected = [each.clone() for each in held]
    orthogonal = drawn(2, 5, 900).half().to(on_triton)
    launched = []

    def step(memory: list[Tensor]) -> list[Tensor]:
        buffer, grad, param = (each[:, 3:8] for each in memory)
        update = buffer.new_empty(2, 5, 900)
        versions = [each._version for each in (buffer, update, param)]
        elements.update_momentum(buffer, grad, update, momentum, nesterov=nesterov)
        elements.apply_update(param, orthogonal, 0.25, 0.1, 1.5)
        assert all(each._version > before for each, before in zip((buffer, update, param), versions, strict=True))
        return [*memory, update]

    def watched(name: str) -> None:
        kernel = getattr(elements, name)
        monkeypatch.setattr(elements, name, lambda *given, **how: (launched.append(name), kernel(*given, **how)))

    watched("momentum_on_triton")
    watched("apply_on_triton")
    monkeypatch.setattr(elements, "runs_on_triton", lambda *_: False)
    wanted = step(expected)
    monkeypatch.setattr(elements, "runs_on_triton", lambda *_: True)
    found = step(held)
    assert launched == ["momentum_on_triton", "apply_on_triton"]
    bound = 1e-6 if on_triton == "cpu" else 0.0  # the interpreter's fma rounds twice
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_rate_in_a_tensor_is_the_rate(dtype: torch.dtype) -> None:
    param, orthogonal = drawn(5, 8).to(dtype), drawn(5, 8).flip(0)
    other, expected = param.clone(), 0.975 * param.double() - 0.375 * orthogonal.double()
    elements.apply_update(param, orthogonal, 0.25, 0.1, 1.5)
    elements.apply_update(other, orthogonal, torch.tensor(0.25), 0.1, 1.5)
    for found in (param, other):
        bound = 4 * torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-7
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=2 * bound)


def test_matrices_of_tiny_norms_stay_finite() -> None:
    """As the momentum of a matrix whose gradient has become zero: below 2^-112 they count as they are."""
    matrices = drawn(2, 4, 6) * torch.tensor([2.0**-130, 1.0])[:, None, None]
    found = form.orthogonalize(matrices)
    assert found.isfinite().all() and found[0].abs().max() < 2.0**-110
    assert torch.equal(found[1], form.orthogonalize(matrices[1]))


def test_long_matrices_take_the_gram_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one and a half times as many columns as rows on, or rows as columns."""
    monkeypatch.setattr(form, "runs_on_triton", lambda *_: True)
    monkeypatch.setattr(form, "_plain_form", lambda *_: "plain")
    monkeypatch.setattr(form, "_gram_form", lambda *_: "gram")
    for rows, columns, expected in ((4, 5, "plain"), (4, 6, "gram"), (4, 16, "gram"), (4, 4, "plain")):
        assert form.orthogonalize(torch.ones(1, rows, columns)) == expected  # type: ignore[comparison-overlap]
        assert form.orthogonalize(torch.ones(1, columns, rows)) == expected  # type: ignore[comparison-overlap]


def test_refusals() -> None:
    for shape in ((4,), (2, 2, 4, 4)):
        with pytest.raises(ValueError, match="matrices"):
            form.orthogonalize(torch.zeros(shape))
    with pytest.raises(ValueError, match="step"):
        form.orthogonalize(torch.zeros(4, 4), ())
    empty = form.orthogonalize(torch.zeros(0, 4, 4, dtype=torch.bfloat16))
    assert empty.shape == (0, 4, 4) and empty.dtype is torch.float32
    assert form.orthogonalize(torch.zeros(2, 0, 4)).shape == (2, 0, 4)


def test_flops() -> None:
    """Of Llama-8B's gate, by the Gram form: 6 m^2 n + 14 m^3; of a square matrix: 20 m^3."""
    m, n = 4096, 14336
    assert orthogonalize_flops(n, m) == 6 * m * m * n + 14 * m**3
    assert orthogonalize_flops(m, m) == 20 * m**3


def test_flops_of_few_steps() -> None:
    """Two steps need one R and two products with Q; a square matrix takes three products a step, two halved."""
    m, n = 8, 32
    assert orthogonalize_flops(m, n, 1) == 3 * m * m * n + m**3
    assert orthogonalize_flops(m, n, 2) == 3 * m * m * n + 5 * m**3
    assert orthogonalize_flops(m, m, 3) == 12 * m**3


def test_matrices_begin_with_elements_of_about_one_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, scale in (((1, 4, 4), 4.0), ((2, 16, 64), 32.0), ((1, 3, 5), 4.0)):
        x, found = form._normalized(torch.full(shape, 0.01))
        assert found == scale and x.dtype is torch.float16
        assert ((x > 0.9) & (x < 1.1)).all()
    assert form._normalized(torch.empty(1, 2**17, 2**17, device="meta"))[1] == 2.0**15, "fp16 has no more"
    for on_triton, dtype in ((True, torch.float16), (False, torch.float32)):
        monkeypatch.setattr(form, "runs_on_triton", lambda *_, found=on_triton: found)
        assert form.dtype_of_results(torch.zeros(1)) is dtype
