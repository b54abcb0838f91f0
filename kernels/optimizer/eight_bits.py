"""Optimizer moments in 8 bits: blocks of 256 elements, a scale for each block, and a code of 256 values.

The code is the dynamic one of Dettmers et al. (8-bit Optimizers via Block-wise Quantization, 2021): seven decades from
1e-6 to 1. Decade i, from ``0.1 s`` to ``s`` with ``s = 10^(i - 6)``, is cut into N equal intervals, whose midpoints are
values: ``N = 2^i`` for each sign of a signed code, ``N = 2^(i + 1)`` for an unsigned one. 0 and 1 are values too. So
small values keep one digit or less, and those near the largest magnitude of the block two.

========  =============================  ============================
code      signed                         unsigned
========  =============================  ============================
0         0                              0
positive  ``2^i + j``: interval j of i   ``2^(i + 1) + j - 1``
negative  128 more                       none
one       128                            255
========  =============================  ============================
"""

import functools

import torch
from torch import Tensor

__all__ = ["BLOCK", "CODE_SIZE", "code_table", "dequantize_moment", "quantize_blocks", "quantize_moment"]

BLOCK = 256
"""Elements with one scale, counted from the start of the parameter."""
DECADES = 7
CODE_SIZE = 256 + 2 * (DECADES + 1)
"""Numbers of one code in ``code_table``."""


@functools.cache
def code_table(device: torch.device) -> Tensor:
    """[2, CODE_SIZE] fp32, of the signed and the unsigned code.

    256 values by code; then, for each decade and for the value 1, the smallest magnitude that rounds into it; then
    N / (0.9 s) of each decade, and 0.
    """
    return torch.tensor([_code(signed=True), _code(signed=False)], dtype=torch.float32).to(device)


def _code(*, signed: bool) -> list[float]:
    counts = [2 ** (decade + (not signed)) for decade in range(DECADES)]
    scales = [10.0 ** (decade - DECADES + 1) for decade in range(DECADES)]
    positive = [
        scale * (0.1 + 0.9 * (interval + 0.5) / count)
        for scale, count in zip(scales, counts, strict=True)
        for interval in range(count)
    ]
    values = [0.0, *positive, 1.0]
    # The first value of each decade, and 1: the border lies halfway to the value before it.
    firsts = [1 + sum(counts[:decade]) for decade in range(DECADES + 1)]
    borders = [(values[first - 1] + values[first]) / 2 for first in firsts]
    slopes = [count / (0.9 * scale) for count, scale in zip(counts, scales, strict=True)]
    if signed:
        values += [-value for value in positive]
    return [*values, *borders, *slopes, 0.0]


def quantize_moment(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment, from the start of a parameter, or of a multiple of 256 elements behind it.

    ======  ========  ====================================================================================
    values  [n]       fp32
    codes   [n]       uint8; of the value nearest to ``values / scale``, up to fp32's rounding of borders
    scales  [blocks]  fp32; the largest magnitude of 256 consecutive elements, or of what is left of them
    ======  ========  ====================================================================================

    signed  whether values may be negative: True for the first moment, False for the second. A second moment above 0
            never becomes 0, so that no step divides by eps alone

    A block with an infinity or NaN gets such a scale, and then ``dequantize_moment`` gives NaN for it.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    codes, scales = quantize_blocks(blocks, signed=signed)
    return codes.view(-1)[: values.numel()].clone(), scales


def dequantize_moment(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """fp32 [n] from codes [n] and scales [blocks]: see ``quantize_moment``."""
    values = code_table(codes.device)[int(not signed), :256][codes.int()]
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]


def quantize_blocks(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [blocks, 256] -> uint8 [blocks, 256] and fp32 [blocks]."""
    table = code_table(values.device)[int(not signed)]
    borders, slopes = table[256 : 256 + DECADES + 1], table[256 + DECADES + 1 :]
    # As integers magnitudes have the order of the floats, with NaN above infinity.
    scales = values.abs().view(torch.int32).amax(1).view(torch.float32)
    magnitude = values.abs() / torch.where(scales == 0, 1.0, scales)[:, None]
    above = (magnitude[..., None] >= borders).sum(-1, dtype=torch.int32)
    if signed:
        above = torch.where(values < 0, above.clamp(max=DECADES), above)
    else:
        above = torch.where(values > 0, above.clamp(min=1), above)
    decade = (above - 1).clamp(min=0, max=DECADES - 1)
    counts = (1 if signed else 2) << decade
    interval = (magnitude * slopes[decade] - counts.float() * table.new_tensor(1 / 9)).floor().int()
    interval = torch.minimum(interval.clamp(min=0), counts - 1)
    codes = counts + interval - int(not signed)
    codes = torch.where(above == 0, 0, torch.where(above > DECADES, 128 if signed else 255, codes))
    if signed:
        codes = torch.where((values < 0) & (codes > 0), codes + 128, codes)
    return codes.to(torch.uint8), scales
