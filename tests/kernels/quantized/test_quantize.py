"""``quantize``: every formula against an oracle in fp64, element by element and block by block."""

import math
import sys

import pytest
import torch
from quant_oracle import NAN, SPECS, check_quantized
from torch._subclasses.fake_tensor import FakeTensorMode

from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm, dequantize, quantize, quantize_both, restored
from maingrad.kernels.quantized.operands import quantize_experts
from maingrad.kernels.quantized.quantize import record_amax

E2M1, E4M3 = Element.E2M1, Element.E4M3


@pytest.mark.in_turn
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(7)
def test_drawn_values(name: str) -> None:
    """Magnitudes over many binades; the shape has partial blocks at both borders."""
    draws = torch.Generator().manual_seed(0)
    for dtype, spread in ((torch.float32, 8.0), (torch.bfloat16, 1.0), (torch.float16, 2.0)):
        x = torch.randn(37, 151, generator=draws) * torch.exp2(torch.randn(37, 151, generator=draws) * spread)
        check_quantized(x.to(dtype), SPECS[name])


def test_numbers_in_fp64_are_products_that_are_not_rounded() -> None:
    q = quantize(torch.tensor([[1.0, 3.0, 0.7]]), SPECS["current"])
    exact = q.data.double() * q.scale.double()
    assert torch.equal(dequantize(q, torch.float64), exact[:, :3]) and (exact.float() != exact).any()
    assert torch.equal(dequantize(q, torch.bfloat16), dequantize(q).bfloat16())


def test_a_recorded_amax_is_the_largest_so_far_whatever_is_nan() -> None:
    """A NaN would stay in the history, and in each scale that follows from it."""
    amax = torch.zeros(())
    for values, expected in (((0.5, -2.0), 2.0), ((NAN, -3.0), 3.0), ((NAN, NAN), 3.0), ((1.0, 0.0), 3.0)):
        record_amax(torch.tensor([values], dtype=torch.bfloat16), amax)
        assert amax == expected
    record_amax(torch.tensor([[-math.inf, NAN]]), amax)
    assert amax == math.inf


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(7)
def test_special_values(name: str) -> None:
    """A block of zeros, Inf, NaN, subnormals, the largest number, and values on ties."""
    spec = SPECS[name]
    rows = torch.zeros(8, 40)
    rows[1, 3], rows[1, 4] = 1.0, float("inf")
    rows[2, 5], rows[2, 6] = 2.0, -NAN
    rows[3] = 1e-45
    rows[4, :2] = torch.tensor([1e-38, -3e-39])
    rows[5, 7], rows[5, 8] = torch.finfo(torch.float32).max, 1.0
    rows[6, :9] = torch.tensor([448.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    rows[7, :4] = torch.tensor([-6.0, 0.3, -0.25, 0.0])
    for wanted in (range(8), (0,), (0, 1), (2,), (3,), (4,), (5,), (6, 7), (0, 3, 4)):
        check_quantized(rows[list(wanted)], spec)


@pytest.mark.in_turn
def test_mxfp8_has_the_bits_of_torchao() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=draws) * torch.exp2(torch.randn(64, 256, generator=draws) * 30)
    x[0], x[1, 3], x[2, 5] = 0.0, float("inf"), NAN
    mode = mx.ScaleCalculationMode.RCEIL
    for dtype in (torch.float32, torch.bfloat16):
        scale, data = mx.to_mx(x.to(dtype), torch.float8_e4m3fn, 32, scaling_mode=mode)
        q = quantize(x.to(dtype), SPECS["MXFP8"])
        assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8).view(q.scale.shape))
        assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8).view(q.data.shape))


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    spec = QuantSpec(E2M1, (1, 16), ScaleForm.E4M3, stochastic=True)
    x = torch.linspace(-1, 1, 32).view(2, 16)
    torch.manual_seed(0)
    count = 4000
    found = dequantize(quantize(x.repeat(count, 1), spec)).view(count, *x.shape)
    nearest = dequantize(quantize(x, SPECS["NVFP4"]))
    assert (found.mean(0) - x).abs().max() < 5 * found.std(0).max() / math.sqrt(count)
    assert (nearest - x).abs().max() > 0.04
    for column in found.flatten(1).unbind(1):
        assert len(column.unique()) <= 2


def test_elements_of_8_bits_are_rounded_to_nearest() -> None:
    with pytest.raises(NotImplementedError, match="stochastic rounding is that of E2M1"):
        quantize(torch.ones(2, 2), QuantSpec(E4M3, None, ScaleForm.FP32, stochastic=True))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(7)
def test_each_experts_matrix_is_quantised_as_it_would_be_alone(name: str) -> None:
    draws = torch.Generator().manual_seed(3)
    matrices = torch.randn(3, 5, 40, generator=draws) * torch.tensor([0.01, 1.0, 100.0])[:, None, None]
    for given in (matrices, list(matrices)):
        as_they_are, transposes = quantize_experts(given, SPECS[name], SPECS[name])
        assert as_they_are is not None and transposes is not None
        for number, matrix in enumerate(matrices):
            for each, alone in ((as_they_are, matrix), (transposes, matrix.t())):
                mine, expected = each.unbind()[number], quantize(alone, SPECS[name])
                assert torch.equal(dequantize(mine), dequantize(expected)) and mine.shape == expected.shape


@pytest.mark.parametrize("tokens", [16, 37])
def test_a_rotated_product_is_the_product(tokens: int) -> None:
    """The transform is orthogonal, mixes 16 columns, and spreads an outlier."""
    spec = QuantSpec(E4M3, (1, 16), ScaleForm.POWER_OF_TWO, rotated=True)
    draws = torch.Generator().manual_seed(2)
    a, b = torch.randn(5, tokens, generator=draws), torch.randn(7, tokens, generator=draws)
    q = quantize(a, spec), quantize(b, spec)
    assert q[0].columns == -(-tokens // 16) * 16
    product = dequantize(q[0]) @ dequantize(q[1]).t()
    assert (product - a @ b.t()).norm() < 0.06 * (a @ b.t()).norm()
    one = torch.zeros(1, 32)
    one[0, 3] = 96.0
    spread = dequantize(quantize(one, spec))
    assert torch.equal(spread.abs(), torch.tensor([[24.0] * 16 + [0.0] * 16]))
    assert len(spread.unique()) == 3


def test_what_is_no_matrix() -> None:
    for shape in ((4,), (0, 3), (2, 3, 4)):
        with pytest.raises(ValueError, match="a matrix that has elements"):
            quantize(torch.ones(shape), SPECS["current"])


def test_scales_are_given_where_one_is_the_tensors() -> None:
    x, scale = torch.ones(4, 32), torch.tensor(2.0)
    found = quantize(x, QuantSpec(Element.E4M3, None, ScaleForm.FP32), scale=scale)
    assert (found.data.float() == 2).all() and found.scale == 0.5
    half = quantize(x.bfloat16(), QuantSpec(Element.E4M3, None, ScaleForm.FP32), scale=torch.tensor(1.0626))
    assert (half.data.float() == 1.125).all(), "bf16 would round the product to 1.0625, a tie"
    for spec in (
        QuantSpec(Element.E4M3, (1, 128), ScaleForm.FP32),
        QuantSpec(Element.E4M3, None, ScaleForm.POWER_OF_TWO),
        QuantSpec(Element.E4M3, None, ScaleForm.FP32, rotated=True),
    ):
        with pytest.raises(ValueError, match="takes a scale where one scale in fp32 is the tensor's"):
            quantize(x, spec, scale=scale)
    whole = QuantSpec(Element.E4M3, None, ScaleForm.FP32)
    with pytest.raises(ValueError, match="records an amax where a scale is given"):
        quantize_both(x, whole, None, amax=torch.zeros(()))
    amax = torch.tensor(0.5)
    rows, columns = quantize_both(-3 * x, whole, whole, scale=scale, amax=amax)
    assert amax == 3 and rows is not None and columns is not None
    assert (rows.shape, columns.shape) == ((4, 32), (32, 4)) and (columns.data.float() == -6).all()
    quantize_both(5 * x, None, whole, scale=scale, amax=amax)
    assert amax == 5, "of one copy alone"
    assert quantize_both(x, None, whole)[0] is None and quantize_both(x, whole, None)[1] is None


def test_rows() -> None:
    x = torch.randn(256, 40)
    q = quantize(x, SPECS["block, weights"])
    assert torch.equal(dequantize(q.rows(128, 256)), dequantize(q)[128:])
    for start, end in ((64, 128), (0, 64)):
        with pytest.raises(ValueError, match="cut blocks of 128 rows"):
            q.rows(start, end)
    q = quantize(x[:200], SPECS["block, weights"])  # whose last block is smaller
    assert torch.equal(dequantize(q.rows(128, 200)), dequantize(q)[128:])
    for name in ("NVFP4", "current"):
        q = quantize(x, SPECS[name])
        assert torch.equal(dequantize(q.rows(3, 7)), dequantize(q)[3:7])
        assert torch.equal(dequantize(restored(q.tensors, q.spec, q.columns)), dequantize(q))


@pytest.mark.parametrize("around", ["torch.autocast", "default fp64", "default device"])
def test_what_is_around_changes_no_bit(around: str) -> None:
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(2))
    spec = QuantSpec(E2M1, (1, 16), ScaleForm.E4M3, rotated=True)
    expected = quantize(x, spec)
    sys.modules["maingrad.kernels.quantized.quantize"]._kept_table.cache_clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if around == "default fp64" else default)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "torch.autocast"):
            with torch.device("meta" if around == "default device" else "cpu"):
                found = quantize(x, spec)
                assert torch.equal(dequantize(found), dequantize(expected))
    finally:
        torch.set_default_dtype(default)
    assert all(map(torch.equal, found.tensors, expected.tensors))


def test_fake_tensors_leave_nothing() -> None:
    spec = QuantSpec(E2M1, (1, 16), ScaleForm.E4M3, rotated=True)
    sys.modules["maingrad.kernels.quantized.quantize"]._kept_table.cache_clear()
    for _ in range(2):
        with FakeTensorMode():
            assert dequantize(quantize(torch.ones(4, 16), spec)).shape == (4, 16)
    assert torch.equal(dequantize(quantize(torch.zeros(4, 16), spec)), torch.zeros(4, 16))
