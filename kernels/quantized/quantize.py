"""``quantize`` and ``dequantize``: the formulas of all forms of scales, in plain PyTorch. Any device; no host reads.

Legend: amax the largest magnitude in a block (NaN if there is one), max the element's largest magnitude.

==================  ==========================================  =====================================================
form                scale (a multiplier of elements)            amax that gives no scale
==================  ==========================================  =====================================================
FP32                1 / (max / amax)                            0, Inf, NaN: 1. max / amax beyond fp32: fp32's largest
POWER_OF_TWO        1 / (max / amax, its mantissa cut off)      the same; beyond fp32: 2^127
E8M0                2^ceil(log2(amax / max))                    0: 2^-127; Inf: 2^127; NaN: NaN
E4M3                E4M3(amax / 6 * g) times 1 / g,             of the matrix 0, Inf, NaN: g = 1. A block whose scale
                    g = 2688 / amax of the matrix               is 0 has elements 0
==================  ==========================================  =====================================================

The formulas are those of Transformer Engine's recipes, and E8M0's that of cuBLAS ("round up"), so that bits can be
compared. Elements beyond max become max, Inf too. A NaN stays one in E4M3 and E5M2; in E2M1 its block's scale is NaN.
"""

import functools
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor

from .spec import Element, Quantized, QuantSpec, ScaleForm

__all__ = ["WHOLE", "Parts", "decode", "dequantize", "encode", "quantize", "record_amax", "rotate"]

_ROTATED = 16
"""Columns that a Hadamard transform mixes."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Random, drawn once: both operands of a product have the same transform."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1, by code."""
_TABLES: dict[str, tuple[Any, ...]] = {
    "magnitudes": _MAGNITUDES,
    # [16, 16]: diag(signs) times the Hadamard matrix over 4 (Sylvester's construction).
    "hadamard": tuple(
        tuple(sign * (-1) ** (row & column).bit_count() / 4 for column in range(_ROTATED))
        for row, sign in enumerate(_SIGNS)
    ),
}


def quantize(x: Tensor, spec: QuantSpec, *, scale: Tensor | None = None) -> Quantized:
    """Quantise a matrix.

    x      [R, C], bf16, fp16 or fp32, any strides
    scale  0-dim fp32: elements are ``x * scale``, whatever x holds, where one scale in fp32 is the tensor's. None: the
           formulas above

    Raises ``ValueError`` unless x is a matrix with elements, and for a ``scale`` with another form of scales.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"quantize takes a matrix that has elements, got {tuple(x.shape)}")
    if scale is None:
        return encode(x.float(), spec, WHOLE)
    if spec.block is not None or spec.scale is not ScaleForm.FP32 or spec.rotated:
        raise ValueError(f"quantize takes a scale where one scale in fp32 is the tensor's, not with {spec}")
    return Quantized(_cast(x.float() * scale, spec), 1.0 / scale, None, spec, x.shape[1])


def record_amax(x: Tensor, amax: Tensor) -> None:
    """Raise ``amax``, 0-dim fp32, to the largest magnitude in x [R, C]. NaN counts as 0."""
    torch.maximum(amax, x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax().float(), out=amax)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """[R, C]: the values that ``q`` stands for, computed in fp32 (or ``dtype`` fp64); rotated ones where it is."""
    return decode(q, dtype, WHOLE)


class Parts:
    """What has one scale where a spec has no blocks, and one factor of its own: here the whole matrix."""

    def amax(self, values: Tensor) -> Tensor:
        """The largest magnitude of each part: 0-dim. values [R, C]."""
        return values.abs().amax()

    def block_amax(self, values: Tensor, block: tuple[int, int]) -> Tensor:
        """[ceil(R / rows), ceil(C / columns)]: the largest magnitude of each block."""
        rows, columns = values.shape
        height, width = block
        padded = torch.nn.functional.pad(values.abs(), (0, -columns % width, 0, -rows % height))
        return reduce(padded, "(r height) (c width) -> r c", "max", height=height, width=width)

    def to_elements(self, per_part: Tensor) -> Tensor:
        """``per_part`` for elements: broadcasts to [R, C]."""
        return per_part

    def to_blocks(self, per_part: Tensor, block: tuple[int, int]) -> Tensor:
        """``per_part`` for blocks of one row: broadcasts to what ``block_amax`` returns."""
        return per_part

    def spread(self, per_block: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
        """[R, C], the ``shape``: each element's entry of ``per_block``."""
        height, width = block
        wide = per_block.repeat_interleave(height, 0) if height > 1 else per_block
        wide = wide.repeat_interleave(width, 1) if width > 1 else wide
        return wide[: shape[0], : shape[1]]


WHOLE = Parts()


def encode(values: Tensor, spec: QuantSpec, parts: Parts) -> Quantized:
    """Quantise ``values`` [R, C] fp32. Scale (without blocks) and factor are of the form that ``parts`` has."""
    if spec.rotated:
        values = rotate(values)
    factor = _global_factor(parts.amax(values), spec) if spec.scale is ScaleForm.E4M3 else None
    if spec.block is None:
        stored, per_element = _scales(parts.amax(values), spec, factor)
        per_element = parts.to_elements(per_element)
    else:
        per_block = None if factor is None else parts.to_blocks(factor, spec.block)
        stored, per_element = _scales(parts.block_amax(values, spec.block), spec, per_block)
        per_element = parts.spread(per_element, spec.block, values.shape)
    return Quantized(_cast(values * per_element, spec), stored, factor, spec, values.shape[1])


def decode(q: Quantized, dtype: torch.dtype, parts: Parts) -> Tensor:
    """``dequantize`` what ``encode`` returned."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    elements = _elements(q).to(wide)
    block = q.spec.block
    scale = q.scale.to(torch.float32).to(wide)  # from E8M0 and E4M3 too, exactly
    if block is None:
        scale = parts.to_elements(scale)
    else:
        if q.factor is not None:
            scale = scale * parts.to_blocks(q.factor.to(wide), block)
        scale = parts.spread(scale, block, q.shape)
    return (elements * scale).to(dtype)


def rotate(x: Tensor) -> Tensor:
    """``x H`` [R, C rounded up to 16]: fp32. Orthogonal; zeros fill the last columns."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -columns % _ROTATED))
    with torch.autocast(x.device.type, enabled=False):
        blocks = rearrange(padded, "r (c width) -> r c width", width=_ROTATED)
        return rearrange(blocks @ _table("hadamard", x), "r c width -> r (c width)")


def _table(name: str, beside: Tensor) -> Tensor:
    """fp32, on the device of ``beside``. Kept, since a CUDA graph's capture can copy nothing from the host."""
    if type(beside) is Tensor:
        return _kept_table(name, beside.device)
    return _new_table(name, beside.device)  # a fake tensor's table is one of its mode, and would stay


def _new_table(name: str, device: torch.device) -> Tensor:
    # dtype and device are named: neither depends on the caller's defaults.
    return torch.tensor(_TABLES[name], dtype=torch.float32, device=device)


_kept_table = functools.lru_cache(maxsize=128)(_new_table)


# ---- Scales. ----


def _scales(amax: Tensor, spec: QuantSpec, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales as stored, and what elements are multiplied by before the cast; both in the shape of ``amax``."""
    if spec.scale is ScaleForm.E8M0:
        return _e8m0_scales(amax, spec.element)
    if spec.scale is ScaleForm.E4M3:
        assert factor is not None, "of this form"
        stored = (_divided(amax, spec.element.max) / factor).clamp(max=Element.E4M3.max).to(torch.float8_e4m3fn)
        effective = stored.float() * factor
        return stored, torch.where(effective == 0, 0.0, 1.0 / effective)
    encode = _encode(amax, spec.element.max)
    if spec.scale is ScaleForm.POWER_OF_TWO:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    return 1.0 / encode, encode


def _e8m0_scales(amax: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    ratio = _divided(amax, element.max)
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    ceiling = torch.where(mantissa == 0.5, exponent - 1, exponent)
    biased = ceiling.clamp(-127, 127) + 127
    biased = torch.where(ratio == 0, 0, torch.where(ratio.isinf(), 254, torch.where(ratio.isnan(), 255, biased)))
    encode = torch.exp2(127.0 - biased.float())
    encode = torch.where(biased == 0, 1.0, encode)  # so cuBLAS's and torchao's: elements are all but zero
    encode = torch.where(ratio.isnan(), ratio, encode)
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu), encode


def _global_factor(amax: Tensor, spec: QuantSpec) -> Tensor:
    """1 / g: with it no block's scale is beyond E4M3."""
    return 1.0 / _encode(amax, Element.E4M3.max * spec.element.max)


def _encode(amax: Tensor, largest: float) -> Tensor:
    """``largest / amax``, at most fp32's largest number; 1 where amax is 0, Inf or NaN."""
    encode = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, encode)


def _divided(amax: Tensor, by: float) -> Tensor:
    """Rounded once: torch multiplies by the inverse of a number, in some kernels."""
    return amax / torch.full_like(amax, by)


# ---- Elements. ----


def _cast(scaled: Tensor, spec: QuantSpec) -> Tensor:
    """[R, C] fp32 -> elements."""
    if spec.element is Element.E2M1:
        return _packed_e2m1(scaled, stochastic=spec.stochastic)
    if spec.stochastic:
        raise NotImplementedError("stochastic rounding is that of E2M1")
    bound = spec.element.max
    return scaled.clamp(-bound, bound).to(spec.element.dtype)


def _packed_e2m1(scaled: Tensor, *, stochastic: bool) -> Tensor:
    magnitudes = _table("magnitudes", scaled)
    size = torch.where(scaled.isnan(), Element.E2M1.max, scaled.abs().clamp(max=Element.E2M1.max))
    below = torch.bucketize(size.contiguous(), magnitudes, right=True).sub_(1).clamp_(max=len(_MAGNITUDES) - 2)
    low, high = magnitudes[below], magnitudes[below + 1]
    share = (size - low) / (high - low)
    if stochastic:
        up = torch.rand_like(share) < share
    else:
        up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))  # a tie goes to the even code
    codes = (below + up + 8 * (scaled < 0)).to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _elements(q: Quantized) -> Tensor:
    """[R, C] fp32: the elements' values."""
    if q.spec.element is not Element.E2M1:
        return q.data[:, : q.columns].float()
    codes = rearrange([q.data & 15, q.data >> 4], "half r c -> r (c half)")
    values = _table("magnitudes", q.data)[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    return values[:, : q.columns]
