"""Quantisation in fp64, element by element and block by block: what ``quantize`` must give."""

import bisect
import functools
import itertools
import math

import torch
from torch import Tensor

from maingrad.kernels.quantized import Element, Quantized, QuantSpec, ScaleForm, dequantize, quantize

__all__ = ["NAN", "SPECS", "check_copy", "check_quantized"]

E4M3, E5M2, E2M1 = Element.E4M3, Element.E5M2, Element.E2M1
SPECS = {
    "current": QuantSpec(E4M3, None, ScaleForm.FP32),
    "current, gradients": QuantSpec(E5M2, None, ScaleForm.FP32),
    "block": QuantSpec(E4M3, (1, 128), ScaleForm.POWER_OF_TWO),
    "block, weights": QuantSpec(E4M3, (128, 128), ScaleForm.POWER_OF_TWO),
    "MXFP8": QuantSpec(E4M3, (1, 32), ScaleForm.E8M0),
    "NVFP4": QuantSpec(E2M1, (1, 16), ScaleForm.E4M3),
    "NVFP4, weights": QuantSpec(E2M1, (16, 16), ScaleForm.E4M3),
}
NAN = float("nan")


@functools.cache
def values_of(element: Element) -> list[float]:
    """The magnitudes, in the order of their codes: the code's parity decides ties."""
    if element is E2M1:
        return [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(128, dtype=torch.uint8).view(element.dtype).double()
    return [value for value in codes.tolist() if math.isfinite(value)]


def rounded(value: float, element: Element) -> float:
    """To nearest, ties to even; beyond the largest magnitude: that."""
    if math.isnan(value):
        return element.max if element is E2M1 else NAN
    values = values_of(element)
    size = min(abs(value), element.max)
    above = bisect.bisect_left(values, size)
    code = min((max(above - 1, 0), above), key=lambda code: (abs(values[code] - size), code % 2))
    return math.copysign(values[code], value)


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().double().item()


def encode_of(amax: float, spec: QuantSpec, factor: float) -> tuple[float, float]:
    """What a block's elements are multiplied by, and its scale."""
    limit = spec.element.max
    if spec.scale is ScaleForm.E4M3:
        stored = NAN if math.isnan(amax) else rounded(min(fp32(fp32(amax / limit) / factor), 448.0), E4M3)
        effective = fp32(stored * factor)
        return (0.0 if effective == 0 else fp32(1 / effective)), stored
    if spec.scale is ScaleForm.E8M0:
        if amax == 0:
            return 1.0, 2.0**-127
        if math.isnan(amax):
            return NAN, NAN
        ratio = fp32(amax / limit)
        exponent = 127 if math.isinf(ratio) else max(math.ceil(math.log2(ratio)) if ratio else -127, -127)
        return (1.0 if exponent == -127 else 2.0**-exponent), 2.0**exponent
    if amax == 0 or not math.isfinite(amax):
        return 1.0, 1.0
    encode = min(fp32(limit / amax), torch.finfo(torch.float32).max)
    if spec.scale is ScaleForm.POWER_OF_TWO:
        encode = 2.0 ** math.floor(math.log2(encode)) if encode < 2.0**127 else 2.0**127
    return encode, fp32(1 / encode)


def _has_scale(amax: float) -> bool:
    return math.isfinite(amax) and amax != 0


def oracle(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, float]:
    """Elements [R, C] and scales [blocks] in fp64, and the factor."""
    rows, columns = x.shape
    height, width = spec.block or (rows, columns)
    whole = x.abs().max().item() if not x.isnan().any() else NAN
    factor = fp32(1 / min(fp32(448 * 6 / whole), torch.finfo(torch.float32).max)) if _has_scale(whole) else 1.0
    elements = torch.empty(rows, columns, dtype=torch.float64)
    scales = torch.empty(-(-rows // height), -(-columns // width), dtype=torch.float64)
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        block = x[place].double()
        amax = NAN if block.isnan().any() else block.abs().max().item()
        encode, scales[i, j] = encode_of(amax, spec, factor)
        elements[place] = torch.tensor(
            [[rounded(fp32(value * encode), spec.element) for value in row] for row in block.tolist()]
        )
    return elements, scales, factor


def check_quantized(x: Tensor, spec: QuantSpec) -> Quantized:
    q = quantize(x, spec)
    elements, scales, factor = oracle(x.float(), spec)
    ones = Quantized(q.data, torch.ones_like(q.scale, dtype=torch.float32), None, spec, q.columns)
    torch.testing.assert_close(dequantize(ones, torch.float64), elements, rtol=0, atol=0, equal_nan=True)
    found = q.scale.float().double()
    torch.testing.assert_close(
        found.reshape(scales.shape) if spec.block is None else found, scales, rtol=0, atol=0, equal_nan=True
    )
    if q.factor is not None:
        assert q.factor.item() == factor
    return q


def check_copy(found: Quantized | None, expected: Quantized) -> tuple[Tensor, Tensor]:
    """A copy by kernels has the scales of the reference, and zeros behind its columns. Returns the elements of both."""
    assert found is not None
    scale = found.scale
    if expected.spec.block is not None:
        scale = scale[: expected.scale.shape[0], : expected.scale.shape[1]]
    assert torch.equal(scale, expected.scale)
    assert not found.data[:, found.columns :].view(torch.uint8).any()
    return found.data[:, : found.columns].float(), expected.data.float()
