"""Triton kernels of gated activations scaled by row, and of their gradients. Each operand is read or written once.

Legend: T rows, F features. A step of a program handles BLOCK_T x BLOCK_F elements of each half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import adjacent_columns, device_of
from .reference import GELU_CUBE, GELU_SLOPE, Glu

__all__ = [
    "scaled_glu_backward_triton",
    "scaled_glu_triton",
]

_TILE = 2048
"""Elements of each half per step: 16 per thread with 4 warps, which are two loads of 16 bytes in bf16."""
_NUM_WARPS = 4

_GELU_SLOPE = tl.constexpr(GELU_SLOPE)
_GELU_CUBE = tl.constexpr(GELU_CUBE)


@triton.jit
def _value_and_slope(gate: tl.tensor, alpha: tl.tensor, FUNCTION: tl.constexpr) -> tl.tensor:
    """``act(g)`` and ``act'(g)``; the compiler removes an unused result."""
    if FUNCTION == "relu":
        slope = tl.where(gate > 0, 1.0, 0.0)
        value = tl.where(gate <= 0, 0.0, gate)  # NaN stays NaN
    elif FUNCTION == "squared_relu":
        positive = tl.where(gate <= 0, 0.0, gate)
        slope = 2 * positive
        value = positive * positive
    elif FUNCTION == "sigmoid":
        value = tl.sigmoid(gate)
        slope = value * (1 - value)
    elif FUNCTION == "gelu":
        square = gate * gate
        sigmoid = tl.sigmoid(gate * _GELU_SLOPE * (square * _GELU_CUBE + 1))
        value = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid) * _GELU_SLOPE * (square * _GELU_CUBE * 3 + 1))
    else:
        sigmoid = tl.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid * (1 + alpha * gate * (1 - sigmoid))
    return value, slope


@triton.jit
def _clamped(gate: tl.tensor, linear: tl.tensor, limit: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """g and l after clamping, where there is a limit. The comparisons keep NaN."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        linear = tl.where(linear > limit, limit, tl.where(linear < -limit, -limit, linear)) + offset
    return gate, linear


@triton.jit
def _scaled_glu_kernel(
    h: tl.tensor, probs: tl.tensor, out: tl.tensor, T: tl.tensor, F: tl.tensor, stride_h: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, offset: tl.tensor,
    FUNCTION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes BLOCK_T rows and BLOCK_F features. probs and limit may be None."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (row < T)[:, None] & (column < F)[None, :]
    at = h + row[:, None] * stride_h + column[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_F]
    linear = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_F]
    gate, linear = _clamped(gate, linear, limit, offset)
    value, _ = _value_and_slope(gate, alpha, FUNCTION)
    value = value * linear
    if probs is not None:
        value = value * tl.load(probs + row, mask=row < T, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[:, None] * F + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scaled_glu_backward_kernel(
    da: tl.tensor, h: tl.tensor, probs: tl.tensor, dh: tl.tensor, dprobs: tl.tensor, T: tl.tensor, F: tl.tensor,
    stride_da: tl.tensor, stride_h: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, offset: tl.tensor,
    FUNCTION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes BLOCK_T whole rows, so that the sum over features stays in registers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if probs is not None:
        p = tl.load(probs + row, mask=row < T, other=0.0).to(tl.float32)[:, None]  # [BLOCK_T, 1]
        sums = tl.zeros((BLOCK_T, BLOCK_F), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        column = start + tl.arange(0, BLOCK_F)
        mask = (row < T)[:, None] & (column < F)[None, :]
        upstream = tl.load(da + row[:, None] * stride_da + column[None, :], mask=mask, other=0.0).to(tl.float32)
        at = h + row[:, None] * stride_h + column[None, :]
        raw_gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_F]
        raw_linear = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_F]
        gate, linear = _clamped(raw_gate, raw_linear, limit, offset)
        value, slope = _value_and_slope(gate, alpha, FUNCTION)
        if probs is not None:
            sums += upstream * value * linear
            upstream = upstream * p
        dgate = upstream * linear * slope
        dlinear = upstream * value
        if limit is not None:  # NaN was not clamped
            dgate = tl.where(raw_gate > limit, 0.0, dgate)
            dlinear = tl.where(tl.abs(raw_linear) > limit, 0.0, dlinear)
        to = dh + row[:, None] * (2 * F) + column[None, :]
        tl.store(to, dgate.to(dh.dtype.element_ty), mask=mask)
        tl.store(to + F, dlinear.to(dh.dtype.element_ty), mask=mask)
    if probs is not None:
        tl.store(dprobs + row, tl.sum(sums, axis=1), mask=row < T)


def scaled_glu_triton(h: Tensor, probs: Tensor | None, glu: Glu) -> Tensor:
    """See ``scaled_glu``."""
    rows, features = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, features)
    if not out.numel():
        return out
    h, probs = adjacent_columns(h), None if probs is None else probs.contiguous()
    block_t, block_f = _tile(features)
    with device_of(h):
        _scaled_glu_kernel[(triton.cdiv(rows, block_t), triton.cdiv(features, block_f))](
            h, probs, out, rows, features, h.stride(0), glu.alpha, glu.limit, glu.offset,
            FUNCTION=glu.function, BLOCK_T=block_t, BLOCK_F=block_f, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def scaled_glu_backward_triton(da: Tensor, h: Tensor, probs: Tensor | None, glu: Glu) -> tuple[Tensor, Tensor | None]:
    """See ``scaled_glu_backward``."""
    rows, features = da.shape
    dh = h.new_empty(rows, 2 * features)
    dprobs = None if probs is None else h.new_empty(rows, dtype=torch.float32)
    if not dh.numel():
        return dh, None if dprobs is None else dprobs.zero_()
    da, h, probs = adjacent_columns(da), adjacent_columns(h), None if probs is None else probs.contiguous()
    block_t, block_f = _tile(features)
    with device_of(h):
        _scaled_glu_backward_kernel[(triton.cdiv(rows, block_t),)](
            da, h, probs, dh, dprobs, rows, features, da.stride(0), h.stride(0), glu.alpha, glu.limit, glu.offset,
            FUNCTION=glu.function, BLOCK_T=block_t, BLOCK_F=block_f, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return dh, dprobs


def _tile(features: int) -> tuple[int, int]:
    """BLOCK_T and BLOCK_F. BLOCK_F is the widest block with at most a tenth of idle lanes, else the narrowest."""
    widest = min(1024, triton.next_power_of_2(features))
    blocks = [widest >> shift for shift in range(4) if widest >> shift >= 64] or [widest]
    fitting = [block for block in blocks if triton.cdiv(features, block) * block <= 1.1 * features]
    block_f = fitting[0] if fitting else blocks[-1]
    return max(1, _TILE // max(block_f, 64)), block_f
