"""Experts' Triton kernels: the quantiser's bits are the reference's; products against fp64 of the same elements.

What Triton's interpreter does to elements of 8 bits is in ``test_quantize_triton.py``. It sums their products in fp32.
"""

import dataclasses
import itertools

import pytest
import torch
from quant_oracle import NAN, SPECS
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, nan_filled_memory

from maingrad.kernels.quantized import (
    GroupedQuantized,
    Quantized,
    QuantSpec,
    dequantize,
    dequantize_grouped,
    quantize_experts,
    quantize_grouped,
    quantize_grouped_both,
    scaled_grouped_product,
    scaled_grouped_wgrad_accumulate,
)

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels.quantized import products, quantize_triton
from maingrad.kernels.quantized.grouped import rows_of_experts
from maingrad.kernels.quantized.quantize_triton import quantize_experts_triton, quantize_grouped_triton

NAMES = ["current", "current, gradients", "block"]
_BOUND = 2.0**-10
"""Of the sum of the terms' sizes. A tensor core keeps about 13 bits behind the largest term and cuts the rest off, in
each of the four instructions of a promoted sum of 128 terms: errors of terms with one sign add up (7.7e-4 measured)."""
SPLITS = {
    "uneven": ([130, 0, 1, 33, 128], 0),
    "padded": ([5, 16, 0, 300], 70),
    "one": ([57], 0),
    "one row": ([1], 0),
    "padding alone": ([0, 0], 9),
    "many": ([2] * 14, 3),
    "large": ([4000, 97], 0),
}


def rows_of(splits: str, width: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows of many magnitudes, some of them not finite, with NaN and Inf in pad rows; and offsets."""
    sizes, padding = SPLITS[splits]
    draws = torch.Generator().manual_seed(0)
    total = sum(sizes) + padding
    x = torch.randn(total, width, generator=draws) * torch.exp2(torch.randn(total, 1, generator=draws) * 3)
    x[:3, -1] = torch.tensor([float("inf"), 1e-40, 0.0])[: min(total, 3)]
    x[sum(sizes) :] = NAN
    x[sum(sizes) + 1 :] = float("inf")
    return x.to(dtype).to(device), torch.tensor([0, *itertools.accumulate(sizes)], device=device)


def check_elements(found: Tensor, expected: Tensor, spec: QuantSpec) -> None:
    """Bit for bit on a GPU; in the interpreter near, where elements are normal."""
    if found.is_cuda:
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        return
    smallest = 2**-6 if expected.dtype is torch.float8_e4m3fn else 2**-14
    mine, other = found.float(), expected.float()
    normal = other.abs() > smallest
    assert ((mine - other).abs() <= 0.5 * other.abs())[normal].all()
    assert (mine.abs() <= 2 * smallest)[~normal & ~other.isnan()].all()


def check_rows(found: GroupedQuantized | None, expected: GroupedQuantized) -> None:
    assert found is not None and torch.equal(found.offsets, expected.offsets)
    mine, other = found.matrix, expected.matrix
    assert mine.shape == other.shape
    end = int(expected.offsets[-1]) if expected.transposed else other.columns
    check_elements(mine.data[:, :end], other.data[:, :end], other.spec)
    if expected.transposed:
        assert mine.data[:, end:].float().isnan().all(), "not written"
    else:
        assert not mine.data[:, other.columns :].view(torch.uint8).any()
        assert not mine.data[int(expected.offsets[-1]) :].view(torch.uint8).any(), "pad rows are zeros"
    of_experts = list(range(other.scale.shape[-1]))
    if expected.transposed and other.spec.block is not None:
        block, count = other.spec.block[1], len(expected.offsets) // 2
        of_experts = [
            start // block + max(part - count, 0) + number
            for part, (start, end) in enumerate(itertools.pairwise(expected.offsets.tolist()))
            for number in range(-(-(end - start) // block))
        ]
    assert mine.scale.shape == other.scale.shape
    assert torch.equal(mine.scale[..., of_experts], other.scale[..., of_experts])
    nothing = dequantize_grouped(found)
    assert not (nothing[:, end:] if expected.transposed else nothing[int(expected.offsets[-1]) :]).count_nonzero()


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize(
    "splits",
    [pytest.param(each, marks=[pytest.mark.slow] if each == "large" else []) for each in SPLITS],  # 12 s interpreted
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(1)
def test_rows_of_experts(device: str, name: str, splits: str) -> None:
    spec = SPECS[name]
    for number, (dtype, width) in enumerate(((torch.bfloat16, 170), (torch.float16, 150), (torch.float16, 1))):
        x, offsets = rows_of(splits, width, device, dtype)
        matrix = (x, x.t().contiguous().t(), x)[number]
        with nan_filled_memory():
            copies = [quantize_grouped_triton(matrix, spec, spec, offsets)]
            if number == 0:
                matrix = torch.cat([x, x], 1)[:, :width]  # rows further apart
                copies.append(quantize_grouped_triton(matrix, spec, None, offsets))
                copies.append(quantize_grouped_triton(matrix, None, spec, offsets))
        for rows, columns in copies:
            if rows is not None:
                check_rows(rows, quantize_grouped(matrix, spec, offsets))
            if columns is not None:
                check_rows(columns, quantize_grouped(matrix, spec, offsets, transposed=True))


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_few_rows_of_experts_in_blocks(device: str) -> None:
    spec, offsets = SPECS["block"], torch.tensor([0, 5, 5, 137, 140], device=device)
    x = torch.randn(275, 20, generator=torch.Generator().manual_seed(0)).half().to(device)
    x[140:] = NAN  # a whole tile of padding, which is no block of columns, and more
    with nan_filled_memory():
        rows, columns = quantize_grouped_triton(x, spec, spec, offsets)
    check_rows(rows, quantize_grouped(x, spec, offsets))
    check_rows(columns, quantize_grouped(x, spec, offsets, transposed=True))


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_few_rows_of_experts_with_a_scale_for_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number of one lies behind the first columns of a program, and that of another in the last program.

    The padding has a whole tile, which is no whole block of columns.
    """
    monkeypatch.setattr(quantize_triton, "_CHUNK", 512)
    spec, offsets = SPECS["current"], torch.tensor([0, 2, 3], device=device)
    x = torch.randn(131, 530, generator=torch.Generator().manual_seed(0)).half().to(device)
    x[1, 300], x[2, 520], x[3:] = 9.0, -20.0, NAN
    with nan_filled_memory():
        rows, columns = quantize_grouped_triton(x, spec, spec, offsets)
    check_rows(rows, quantize_grouped(x, spec, offsets))
    check_rows(columns, quantize_grouped(x, spec, offsets, transposed=True))


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("name", ["current", "block, weights"])
@pytest.mark.sampled(100)
def test_matrices_of_experts(device: str, name: str) -> None:
    """Packed, evenly spaced and scattered; with a matrix of zeros, one with Inf and one with NaN."""
    spec = dataclasses.replace(SPECS[name], emulated=True)
    large = (130, 170) if device == "cuda" else (20, 140)
    for number, shape in enumerate((large, (1, 33), (33, 1))):
        packed = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        packed[0], packed[1, 0, -1], packed[2, -1, 0] = 0.0, float("inf"), NAN
        packed = packed.to(device)
        scattered = [packed[e].clone() for e in (2, 0, 3, 1)]
        forms = (packed, list(packed.flip(0)), scattered)
        # All of all on a GPU; the interpreter takes a second for each.
        for matrices in forms if device == "cuda" else forms[number : number + 1]:
            with nan_filled_memory():
                both = quantize_experts_triton(matrices, SPECS[name], SPECS[name])
                rows, _ = quantize_experts_triton(matrices, SPECS[name], None)
                _, columns = quantize_experts_triton(matrices, None, SPECS[name])
            for found, expected in zip((*both, rows, columns), quantize_experts(matrices, spec, spec) * 2, strict=True):
                assert found is not None and expected is not None
                for mine, other in zip(found.unbind(), expected.unbind(), strict=True):
                    assert torch.equal(mine.scale, other.scale)
                    assert not mine.data[:, mine.columns :].view(torch.uint8).any()
                    check_elements(mine.data[:, : mine.columns], other.data, spec)


def experts(count: int, n: int, k: int, spec: QuantSpec, *, transposed: bool) -> Quantized:
    draws = torch.Generator().manual_seed(1)
    weights = torch.randn(count, n, k, generator=draws).bfloat16().cuda()
    rows, columns = quantize_experts(weights, None if transposed else spec, spec if transposed else None)
    found = columns if transposed else rows
    assert found is not None
    return found


def exact(q: Quantized) -> Tensor:
    return dequantize(q, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", ["current", "current, gradients", "block"])
@pytest.mark.sampled(100)
def test_products(name: str, splits: str) -> None:
    """Sums are promoted after 128 terms: see ``_BOUND``."""
    spec = SPECS[name]
    of_weights = SPECS["block, weights"] if name == "block" else SPECS["current"]
    count = len(SPLITS[splits][0])
    for n, k in ((200, 300), (16, 4096), (1, 130), (129, 1), (1, 1)):
        x, offsets = rows_of(splits, k, "cuda")
        x = x.nan_to_num(0.0, 1.0, 1.0) if int(offsets[-1]) == len(x) else x
        x[: int(offsets[-1])] = x[: int(offsets[-1])].nan_to_num(0.0, 1.0, 1.0)
        weights = experts(count, n, k, of_weights, transposed=False)
        bias, scale = torch.randn(count, n, device="cuda").bfloat16(), torch.rand(len(x), device="cuda")
        rows, _ = quantize_grouped_both(x, spec, None, offsets)
        assert rows is not None
        with nan_filled_memory():
            plain = scaled_grouped_product(rows, weights, torch.float32)
            y = scaled_grouped_product(rows, weights, torch.bfloat16, bias=bias, bias_scale=scale)
            discrete = scaled_grouped_product(rows, weights, torch.bfloat16, bias=list(bias.unbind()), bias_scale=scale)
            wide = torch.full((n, len(x)), NAN, device="cuda", dtype=torch.bfloat16).t()
            scaled_grouped_product(rows, weights, torch.bfloat16, bias=bias, bias_scale=scale, out=wide)
        assert torch.equal(y, discrete) and torch.equal(y, wide)
        terms = dequantize_grouped(rows, torch.float64)
        expected = torch.zeros(len(x), n, dtype=torch.float64, device="cuda")
        sizes = torch.zeros_like(expected)
        for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            weight = exact(weights.unbind()[e]).t()
            expected[start:end] = terms[start:end] @ weight
            sizes[start:end] = terms[start:end].abs() @ weight.abs()  # terms of one number cancel in it
        assert (plain - expected).norm() <= _BOUND * sizes.norm()
        owner = torch.searchsorted(offsets[1:], torch.arange(len(x), device="cuda"), right=True)
        inside = (owner < count)[:, None]
        biased = expected + torch.where(inside, scale[:, None].double() * bias.double()[owner.clamp(max=count - 1)], 0)
        assert (y - biased).norm() <= 4e-3 * biased.norm() + _BOUND * sizes.norm()
        assert not y[int(offsets[-1]) :].count_nonzero()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.sampled(100)
def test_weight_gradients(name: str, splits: str) -> None:
    """Overwritten, added to, of frozen experts, packed, and rounded to bf16."""
    spec = SPECS[name]
    grad_spec = SPECS["current, gradients"] if name == "current" else spec
    count = len(SPLITS[splits][0])
    for n, k in ((200, 300), (64, 1), (1, 136), (1, 1), (256, 128)):
        x, offsets = rows_of(splits, k, "cuda")
        dy, _ = rows_of(splits, n, "cuda")
        for each in (x, dy):
            each[: int(offsets[-1])] = each[: int(offsets[-1])].nan_to_num(0.0, 1.0, 1.0)
        with nan_filled_memory():
            _, left = quantize_grouped_both(dy, None, grad_spec, offsets)
            _, right = quantize_grouped_both(x, None, spec, offsets)
        assert left is not None and right is not None
        products = torch.zeros(count, n, k, dtype=torch.float64, device="cuda")
        sizes = torch.zeros_like(products)
        (a, borders), (b, _) = rows_of_experts(left, torch.float64), rows_of_experts(right, torch.float64)
        for e, (start, end) in enumerate(itertools.pairwise(borders.tolist())):
            products[e] = a[start:end].t() @ b[start:end]
            sizes[e] = a[start:end].abs().t() @ b[start:end].abs()  # terms of one number cancel in it
        packed = torch.ones(count, n, k, device="cuda")
        scaled_grouped_wgrad_accumulate(left, right, packed)
        assert (packed - 1 - products).norm() <= _BOUND * sizes.norm() + 1e-4
        overwrite = [e % 2 == 0 for e in range(count)]
        for dtype in (torch.float32, torch.bfloat16):
            grads: list[Tensor | None] = [
                torch.full((n, k), NAN if once else 0.0, device="cuda", dtype=dtype) for once in overwrite
            ]
            if count > 1:
                grads[1] = None
            scaled_grouped_wgrad_accumulate(left, right, grads, overwrite=overwrite)
            for grad, product, size in zip(grads, products, sizes, strict=True):
                if grad is not None:
                    bound = _BOUND if dtype is torch.float32 else 5e-3
                    assert (grad - product).norm() <= bound * size.norm()


@pytest.fixture
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU with kernels. Sums are in fp32 there, and not in tensor cores."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and not interpreted")
    monkeypatch.setattr(products, "has_kernels", lambda *_, **__: True)


WITH_ALL_RESTS = [130, 20, 0, 33, 1]
"""Rows behind whole blocks take columns in 32s, in 16s, or in both."""
NEAR = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.in_turn
@pytest.mark.usefixtures("in_the_interpreter")
@pytest.mark.parametrize("name", ["current", "block"])
def test_products_in_the_interpreter(name: str) -> None:
    spec, of_weights = SPECS[name], SPECS["block, weights" if name == "block" else name]
    draws = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *itertools.accumulate(WITH_ALL_RESTS)])
    filled = int(offsets[-1])
    x = torch.randn(filled + 5, 150, generator=draws).bfloat16()
    x[filled:] = NAN
    rows, _ = quantize_grouped_triton(x, spec, None, offsets)
    weights, _ = quantize_experts_triton(torch.randn(5, 140, 150, generator=draws).bfloat16(), of_weights, None)
    assert rows is not None and weights is not None
    expected = torch.zeros(len(x), 140)
    for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        expected[start:end] = dequantize_grouped(rows)[start:end] @ dequantize(weights.unbind()[expert]).t()
    with nan_filled_memory():
        torch.testing.assert_close(scaled_grouped_product(rows, weights, torch.float32), expected, **NEAR)
    owner = torch.searchsorted(offsets[1:], torch.arange(filled), right=True)
    bias, scale = torch.randn(5, 140, generator=draws), torch.rand(len(x), generator=draws)
    expected[:filled] += scale[:filled, None] * bias[owner]
    by_columns = torch.full((140, len(x)), NAN).t()
    found = scaled_grouped_product(rows, weights, torch.float32, bias=bias, bias_scale=scale, out=by_columns)
    assert found is by_columns
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.usefixtures("in_the_interpreter")
@pytest.mark.parametrize("shape", [(20, 140), (140, 20)])
def test_scales_of_blocks_of_experts_that_are_not_square(shape: tuple[int, int]) -> None:
    """An expert has one block of rows and two of columns, or two and one. Each block has a scale of its own."""
    draws, offsets = torch.Generator().manual_seed(0), torch.tensor([0, 1, 3])
    rows, _ = quantize_grouped_triton(torch.randn(3, shape[1], generator=draws), SPECS["block"], None, offsets)
    weights = torch.randn(2, *shape, generator=draws) * torch.tensor([1.0, 100.0])[:, None, None]
    weights[:, 128:], weights[:, :, 128:] = 10 * weights[:, 128:], 10 * weights[:, :, 128:]
    packed, _ = quantize_experts_triton(weights, SPECS["block, weights"], None)
    assert rows is not None and packed is not None
    first, second = (dequantize(each) for each in packed.unbind())
    terms = dequantize_grouped(rows)
    expected = torch.cat([terms[:1] @ first.t(), terms[1:] @ second.t()])
    torch.testing.assert_close(scaled_grouped_product(rows, packed, torch.float32), expected, **NEAR)


@pytest.mark.in_turn
@pytest.mark.usefixtures("in_the_interpreter")
@pytest.mark.parametrize("name", ["current", "block"])
def test_weight_gradients_in_the_interpreter(name: str) -> None:
    spec, draws = SPECS[name], torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *itertools.accumulate([*WITH_ALL_RESTS, 128])])  # the last has a whole block alone
    dy, x = (torch.randn(int(offsets[-1]), size, generator=draws).bfloat16() for size in (70, 40))
    with nan_filled_memory():
        (_, left), (_, right) = (quantize_grouped_triton(each, None, spec, offsets) for each in (dy, x))
    assert left is not None and right is not None
    (a, borders), (b, _) = rows_of_experts(left), rows_of_experts(right)
    expected = torch.stack([a[start:end].t() @ b[start:end] for start, end in itertools.pairwise(borders.tolist())])
    overwrite = [True, False, False, True, True, False]
    grads = [torch.full((70, 40), NAN if once else 1.0) for once in overwrite]
    scaled_grouped_wgrad_accumulate(left, right, [*grads[:4], None, grads[5]], overwrite=overwrite)
    for expert in (0, 1, 2, 3, 5):
        torch.testing.assert_close(grads[expert], expected[expert] + (not overwrite[expert]), **NEAR)
    assert grads[4].isnan().all(), "a frozen expert is left alone"
