"""``quantize_grouped``: each expert's bits are those of ``quantize`` on its rows alone; products against fp64."""

import dataclasses
import itertools

import pytest
import torch
from quant_oracle import NAN, SPECS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from maingrad.kernels.quantized import (
    Element,
    GroupedQuantized,
    Quantized,
    QuantSpec,
    ScaleForm,
    dequantize,
    dequantize_grouped,
    quantize,
    quantize_both,
    quantize_experts,
    quantize_grouped,
    quantize_grouped_both,
    scaled_grouped_product,
    scaled_grouped_wgrad_accumulate,
)
from maingrad.kernels.quantized.grouped import rows_of_experts

GROUPED = {name: spec for name, spec in SPECS.items() if "weights" not in name} | {
    "NVFP4, rotated": dataclasses.replace(SPECS["NVFP4"], rotated=True)
}
FEATURES = 41
SPLITS = {
    "uneven": ([130, 0, 1, 33, 128], 0),
    "padded": ([5, 16, 0, 300], 70),
    "one": ([57], 0),
    "padding alone": ([0, 0], 9),
    "many": ([2] * 40, 3),
    "large": ([4000, 97], 0),
}


def rows_of(splits: list[int], padding: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows of many magnitudes, with NaN and Inf in pad rows, and offsets."""
    draws = torch.Generator().manual_seed(0)
    total = sum(splits) + padding
    x = torch.randn(total, FEATURES, generator=draws) * torch.exp2(torch.randn(total, 1, generator=draws) * 3)
    x[sum(splits) :] = NAN
    x[sum(splits) + 1 :] = float("inf")
    return x.to(dtype), torch.tensor([0, *itertools.accumulate(splits)])


def expert_of(q: GroupedQuantized, expert: int, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Elements, scales and factor of one expert, in what a matrix of its own would have."""
    data, scale, factor, _, _ = q.matrix
    factor = None if factor is None else factor[expert]
    if not q.transposed:
        start, end = (int(offset) for offset in q.offsets[expert : expert + 2])
        return data[start:end], scale[expert] if spec.block is None else scale[start:end], factor
    count, in_byte = len(q.offsets) // 2, 2 if spec.element is Element.E2M1 else 1
    elements, scales = [], []
    for more, part in enumerate((expert, count + expert)):  # whole blocks, and the rest
        start, end = (int(offset) for offset in q.offsets[part : part + 2])
        elements.append(data[:, start // in_byte : end // in_byte].view(torch.uint8))
        if spec.block is not None:
            first = start // spec.block[1] + more * expert
            scales.append(scale[:, first : first - (start - end) // spec.block[1]].float())
    return torch.cat(elements, 1).view(data.dtype), torch.cat(scales, 1) if scales else scale[expert], factor


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.sampled(12)
def test_each_expert_has_the_bits_of_its_rows_alone(name: str, splits: str, transposed: bool) -> None:
    spec = GROUPED[name]
    for dtype in (torch.bfloat16, torch.float16):
        x, offsets = rows_of(*SPLITS[splits], dtype)
        q = quantize_grouped(x, spec, offsets, transposed=transposed)
        for expert, part in enumerate(x[: offsets[-1]].split(SPLITS[splits][0])):
            if not part.numel():
                continue
            alone = quantize(part.t() if transposed else part, spec)
            data, scale, factor = expert_of(q, expert, spec)
            filled = alone.data.shape[1]
            assert torch.equal(data[:, :filled].float(), alone.data.float())
            assert data[:, filled:].float().count_nonzero() == 0
            assert torch.equal(scale.float(), alone.scale.float())
            assert (factor is None) is (alone.factor is None)
            assert factor is None or torch.equal(factor, alone.factor)
        if transposed:
            together, borders = rows_of_experts(q)
            wide, _ = rows_of_experts(q, torch.float64)
            for expert, rows in enumerate(together[: borders[-1]].split(borders.diff().tolist())):
                data, scale, factor = expert_of(q, expert, spec)
                alone = Quantized(data, scale, factor, spec, len(rows))
                assert not len(rows) or torch.equal(rows.t(), dequantize(alone))
                exactly = wide[borders[expert] : borders[expert + 1]].t()
                assert not len(rows) or torch.equal(exactly, dequantize(alone, torch.float64))
        outside = dequantize_grouped(q)
        outside = outside[:, q.offsets[-1] :] if transposed else outside[q.offsets[-1] :]
        assert outside.count_nonzero() == 0  # NaN would count
        assert transposed or q.matrix.data[q.offsets[-1] :].float().count_nonzero() == 0


@pytest.mark.parametrize("name", GROUPED)
def test_what_is_not_finite_stays_with_its_expert(name: str) -> None:
    spec = GROUPED[name]
    x, offsets = rows_of(*SPLITS["uneven"])
    clean = [dequantize_grouped(quantize_grouped(x, spec, offsets))]
    clean.append(rows_of_experts(quantize_grouped(x, spec, offsets, transposed=True))[0])
    x[131, 3] = NAN  # of the fourth expert
    for transposed in (False, True):
        q = quantize_grouped(x, spec, offsets, transposed=transposed)
        found, borders = rows_of_experts(q) if transposed else (dequantize_grouped(q), q.offsets)
        expected = clean[transposed]
        start, end = (int(each) for each in borders[3:5])
        assert found[start:end].isnan().any()
        assert torch.equal(found[:start], expected[:start])
        assert torch.equal(found[end:], expected[end:])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.sampled(4)
def test_the_host_reads_no_split_sizes(name: str, transposed: bool) -> None:
    """A fake tensor has none to read, and knows each size nevertheless."""
    with FakeTensorMode():
        x, offsets = torch.empty(1000, 64, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int64)
        q = quantize_grouped(x, GROUPED[name], offsets, transposed=transposed)
        found = dequantize_grouped(q)
    columns = {"MXFP8": 1280}.get(name, 1152)  # a cache line has 128
    assert found.shape == ((64, columns) if transposed else (1000, 64))


@pytest.mark.parametrize(("name", "rows"), [("current", 300), ("block", 300), ("MXFP8", 512)])
@pytest.mark.sampled(3)
def test_small_experts_take_half_the_bytes(name: str, rows: int) -> None:
    """docs/reference/recipes.md says from which number of tokens on; scales and offsets count."""
    with FakeTensorMode():
        x, offsets = torch.empty(64 * rows, 2048, dtype=torch.bfloat16), torch.empty(65, dtype=torch.int64)
        q = quantize_grouped(x, GROUPED[name], offsets, transposed=True)
        assert sum(tensor.nbytes for tensor in q.tensors) <= 0.55 * x.nbytes


def test_copies_of_few_rows_of_many_experts_by_offsets_of_32_bits() -> None:
    """Rows without tokens take no columns, and offsets keep their dtype."""
    x, offsets = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(41, dtype=torch.int64)
    offsets[7:], offsets[30:] = 1, 2
    for name in ("current", "block", "MXFP8"):
        long, short = (quantize_grouped(x, SPECS[name], each, transposed=True) for each in (offsets, offsets.int()))
        assert short.matrix.columns == 128
        (rows, ends), (expected, others) = rows_of_experts(short), rows_of_experts(long)
        assert short.offsets.dtype is ends.dtype is torch.int32 and torch.equal(ends.long(), others)
        assert torch.equal(short.offsets.long(), long.offsets) and torch.equal(rows, expected)


def test_what_cannot_be_quantised() -> None:
    offsets = torch.tensor([0, 2])
    for shape in ((4,), (0, 3), (3, 0)):
        with pytest.raises(ValueError, match="a matrix that has elements"):
            quantize_grouped(torch.ones(shape), SPECS["current"], offsets)
    for transposed in (False, True):
        with pytest.raises(ValueError, match="blocks of 128 rows are for weights"):
            quantize_grouped(torch.ones(4, 4), SPECS["block, weights"], offsets, transposed=transposed)


def test_each_copy_is_by_its_own_spec() -> None:
    rows, columns = SPECS["current"], SPECS["current, gradients"]
    draws = torch.Generator().manual_seed(0)
    weights, offsets = torch.randn(3, 5, 7, generator=draws), torch.tensor([0, 2, 5])
    for found, one, other in (
        (quantize_both(weights[0], rows, columns), quantize(weights[0], rows), quantize(weights[0].t(), columns)),
        (
            [each and each.matrix for each in quantize_grouped_both(weights[0], rows, columns, offsets)],
            quantize_grouped(weights[0], rows, offsets).matrix,
            quantize_grouped(weights[0], columns, offsets, transposed=True).matrix,
        ),
        (
            [each and each.unbind()[2] for each in quantize_experts(weights, rows, columns)],
            quantize(weights[2], rows),
            quantize(weights[2].t(), columns),
        ),
    ):
        for copy, expected in zip(found, (one, other), strict=True):
            assert copy is not None and copy.spec is expected.spec and copy.columns == expected.columns
            assert torch.equal(copy.data.float(), expected.data.float()) and torch.equal(copy.scale, expected.scale)


def exact(x: Tensor, spec: QuantSpec) -> Tensor:
    return dequantize(quantize(x, spec), torch.float64)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", [name for name in GROUPED if "rotated" not in name])
def test_products(name: str, scaled: bool) -> None:
    spec, weight_spec = GROUPED[name], SPECS.get(f"{name}, weights", SPECS[name])
    splits, padding = SPLITS["padded"]
    x, offsets = rows_of(splits, padding)
    draws = torch.Generator().manual_seed(1)
    weights, biases = torch.randn(4, 17, FEATURES, generator=draws), torch.randn(4, 17, generator=draws)
    scale = torch.rand(len(x), generator=draws) if scaled else None
    quantized, _ = quantize_experts(list(weights), weight_spec, None)
    assert quantized is not None
    rows = quantize_grouped(x, spec, offsets)
    y = scaled_grouped_product(rows, quantized, torch.float32, bias=list(biases), bias_scale=scale)
    for expert, part in enumerate(x[: offsets[-1]].split(splits)):
        start, end = (int(each) for each in offsets[expert : expert + 2])
        if start < end:
            s = 1.0 if scale is None else scale[start:end, None].double()
            expected = exact(part, spec) @ dequantize(quantized.unbind()[expert], torch.float64).t()
            expected += s * biases[expert].double()
            assert (y[start:end].double() - expected).norm() < 1e-5 * expected.norm()
    assert y[offsets[-1] :].count_nonzero() == 0
    out = torch.full((len(x), 17), NAN, dtype=torch.bfloat16)
    given = scaled_grouped_product(rows, quantized, torch.bfloat16, bias=biases, bias_scale=scale, out=out)
    assert given is out
    assert torch.equal(out, y.bfloat16())
    half = biases.bfloat16()
    y = scaled_grouped_product(rows, quantized, torch.float32, bias=half, bias_scale=scale)
    with torch.autocast("cpu", torch.bfloat16):
        again, _ = quantize_experts(list(weights), weight_spec, None)
        found = scaled_grouped_product(rows, again, torch.float32, bias=half, bias_scale=scale)
    assert torch.equal(found, y), "autocast rounds no operand"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", GROUPED)
def test_weight_gradients(name: str, dtype: torch.dtype) -> None:
    spec = GROUPED[name]
    splits, padding = SPLITS["padded"]
    x, offsets = rows_of(splits, padding)
    dy = x[:, :9].flip(1).contiguous()
    operands = [quantize_grouped(each, spec, offsets, transposed=True) for each in (dy, x)]
    overwrite = [True, False, True, False]
    grads: list[Tensor | None] = [torch.full((9, FEATURES), NAN if once else 1.0, dtype=dtype) for once in overwrite]
    grads[1] = None
    scaled_grouped_wgrad_accumulate(*operands, grads, overwrite=overwrite)
    packed = torch.zeros(4, 9, FEATURES, dtype=dtype)
    scaled_grouped_wgrad_accumulate(*operands, packed)
    if dtype is torch.bfloat16:
        products, sums = torch.zeros(4, 9, FEATURES), torch.ones(4, 9, FEATURES, dtype=dtype)
        for each in (products, sums):
            scaled_grouped_wgrad_accumulate(*operands, each)
        assert torch.equal(sums, (1.0 + products).to(dtype)), "a sum is rounded once"
    tolerance = 2**-6 if dtype is torch.bfloat16 else 1e-5
    for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        product = torch.zeros(9, FEATURES, dtype=torch.float64)
        if start < end:
            product = exact(dy[start:end].t(), spec) @ exact(x[start:end].t(), spec).t()
        for found, before in ((grads[expert], 1.0 - overwrite[expert]), (packed[expert], 0.0)):
            if found is not None:
                close = tolerance * float(product.abs().max() + 1)
                torch.testing.assert_close(found.double(), product + before, rtol=tolerance, atol=close)
    assert [each.matrix.shape[0] for each in operands] == [9, FEATURES]
    assert len(operands[0].tensors) == (4 if "NVFP4" in name else 3)


def test_a_programs_default_dtype_rounds_no_sum() -> None:
    draws = torch.Generator().manual_seed(0)
    x, offsets = torch.randn(20, 9, generator=draws), torch.tensor([0, 12, 20])
    copy = quantize_grouped(x, SPECS["current"], offsets, transposed=True)
    found, expected = (torch.zeros(2, 9, 9, dtype=torch.float16) for _ in range(2))
    scaled_grouped_wgrad_accumulate(copy, copy, expected)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        scaled_grouped_wgrad_accumulate(copy, copy, found)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(found, expected) and expected.any()


def test_products_that_do_not_match() -> None:
    offsets = torch.tensor([0, 4])
    rows = quantize_grouped(torch.ones(4, 8), SPECS["current"], offsets)
    weights, _ = quantize_experts(torch.ones(1, 4, 16), SPECS["current"], None)
    assert weights is not None and weights.shape == (4, 16)
    with pytest.raises(ValueError, match="contracts the last dims"):
        scaled_grouped_product(rows, weights, torch.float32)
    rotated = QuantSpec(Element.E4M3, (1, 16), ScaleForm.POWER_OF_TWO, rotated=True)
    plain = dataclasses.replace(rotated, rotated=False)
    x = torch.ones(32, 8)
    with pytest.raises(ValueError, match="both rotated or none"):
        scaled_grouped_wgrad_accumulate(
            quantize_grouped(x, rotated, offsets * 8, transposed=True),
            quantize_grouped(x, plain, offsets * 8, transposed=True),
            torch.zeros(1, 8, 8),
        )
