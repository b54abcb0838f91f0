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
import struct

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "BORDERS",
    "CODE_SIZE",
    "DECADES",
    "LEAST",
    "LEAST_ONE",
    "LIFT",
    "LOW_SCALE",
    "SLOPES",
    "blocks_of",
    "code_table",
    "dequantize_moment",
    "quantize_blocks",
    "quantize_moment",
]

BLOCK = 256
"""Elements with one scale, counted from the start of the parameter."""
DECADES = 7
CODE_SIZE = 256
"""Numbers of one code in ``code_table``."""
LOW_SCALE, LIFT = 2.0**-64, 2.0**64
"""Blocks with a lower scale are multiplied by this first, so that the scale's reciprocal is finite."""


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _counts(signed: bool) -> list[int]:
    return [2 ** (decade + (not signed)) for decade in range(DECADES)]


def _positive_values(signed: bool) -> list[float]:
    return [
        10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (interval + 0.5) / count)
        for decade, count in enumerate(_counts(signed))
        for interval in range(count)
    ]


def _borders(signed: bool) -> list[float]:
    """The smallest magnitude that rounds into each decade; then the smallest that rounds to 1."""
    values = [0.0, *_positive_values(signed), 1.0]
    firsts = [1 + sum(_counts(signed)[:decade]) for decade in range(DECADES + 1)]
    return [_fp32((values[first - 1] + values[first]) / 2) for first in firsts]


BORDERS = {signed: tuple(_borders(signed)[:DECADES]) for signed in (True, False)}
"""By whether a code is signed: the smallest magnitude that rounds into each decade."""
SLOPES = tuple(_fp32(10.0 ** (DECADES - 1 - decade) / 0.9) for decade in range(DECADES))
"""``1 / (0.9 s)`` of each decade."""
LEAST = {signed: _borders(signed)[0] for signed in (True, False)}
"""By whether a code is signed: smaller magnitudes are nearer to 0 than to the first value."""
LEAST_ONE = {signed: _borders(signed)[-1] for signed in (True, False)}
"""Smaller magnitudes are nearer to the last value below 1."""


@functools.cache
def code_table(device: torch.device) -> Tensor:
    """[2, 256] fp32: the values of the signed and of the unsigned code, by code."""
    rows = []
    for signed in (True, False):
        positive = _positive_values(signed)
        rows.append([0.0, *positive, 1.0, *([-value for value in positive] if signed else [])])
    return torch.tensor(rows, dtype=torch.float32).to(device)


def blocks_of(numel: int) -> int:
    """Blocks of consecutive elements from a block's start on."""
    return -(-numel // BLOCK)


def quantize_moment(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment, from the start of a parameter, or of a multiple of 256 elements behind it.

    ======  ========  ====================================================================================
    values  [n]       fp32
    codes   [n]       uint8; of the value nearest to ``values / scale``, up to fp32's rounding of borders
    scales  [blocks]  fp32; of 256 consecutive elements, or of what is left of them, the one of largest magnitude
    ======  ========  ====================================================================================

    signed  whether values may be negative: True for the first moment, False for the second. A second moment above 0
            never becomes 0, so that no step divides by eps alone

    A scale has its element's sign (of two as large the positive one's), so that this element has the code of 1. Then
    what ``dequantize_moment`` gives has the same codes and scales again. A block with an infinity or NaN gets such a
    scale, and then ``dequantize_moment`` gives no number for it.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    codes, scales = quantize_blocks(blocks, signed=signed)
    return codes.view(-1)[: values.numel()].clone(), scales


def dequantize_moment(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """fp32 [n] from codes [n] and scales [blocks]: see ``quantize_moment``."""
    values = code_table(codes.device)[int(not signed)][codes.int()]
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]


def quantize_blocks(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [blocks, 256] -> uint8 [blocks, 256] and fp32 [blocks].

    A magnitude x in decade s, of N intervals, is in interval ``floor(N (x - 0.1 s) / 0.9 s)``. With
    ``y = x / (0.9 s) + 8/9``, from 1 to 2, this is ``floor(N y) - N``. So ``N + interval`` are the highest bits of y's
    significand, and nothing is searched.
    """
    scales = _largest(values)
    lift = torch.where(scales.abs() < LOW_SCALE, LIFT, 1.0)
    inverse = 1.0 / torch.where(scales == 0, 1.0, scales * lift)
    relative = values * lift[:, None] * inverse[:, None]
    magnitude = relative.abs()
    slope = torch.full_like(magnitude, SLOPES[0])
    for border, of_decade in zip(BORDERS[signed][1:], SLOPES[1:], strict=True):
        slope = torch.where(magnitude >= border, of_decade, slope)
    y = (magnitude * slope + 8 / 9).clamp(max=2 - 2.0**-23)
    # Bits below those of the interval: slopes of decades from the last one down have exponents 0, 3, 6, 10, 13, 16, 20.
    shift = ((slope.view(torch.int32) >> 23) * 77 - (5376 if signed else 5632)) >> 8
    codes = (y.view(torch.int32) - 0x3F000000) >> shift
    if signed:
        codes += relative >= LEAST_ONE[signed]
        codes = torch.where(magnitude >= LEAST[signed], torch.where(relative < 0, codes + 128, codes), 0)
    else:
        codes += (magnitude >= LEAST_ONE[signed]).int() - 1
        codes = torch.where(magnitude >= LEAST[signed], codes, (values > 0).int())
    return codes.to(torch.uint8), scales


def _largest(values: Tensor) -> Tensor:
    """[blocks] of [blocks, 256]: the element of largest magnitude."""
    bits = values.view(torch.int32)
    # As integers magnitudes have the order of the floats, with NaN above infinity. The lowest bit: not negative.
    most = ((bits.long() & 0x7FFFFFFF) * 2 + (bits >= 0)).amax(1)
    magnitude = (most >> 1).int()
    return torch.where(most & 1 == 1, magnitude, magnitude | -0x80000000).view(torch.float32)
