"""Triton kernels around the grouped products: bias gradients, and gradients of the bias scales.

Legend: E experts, T rows, N features. Expert e has the rows offsets[e] to offsets[e + 1]; rows from offsets[E] on are
padding, of which nothing is read into a sum.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import adjacent_columns, device_of

__all__ = ["grouped_bias_grad_triton", "grouped_scale_grad_triton"]


@triton.jit
def _bias_grad_chunks_kernel(
    dy: tl.tensor, scale: tl.tensor, offsets: tl.tensor, partials: tl.tensor,
    T: tl.tensor, N: tl.tensor, E: tl.tensor, stride_dy: tl.tensor,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """Sum CHUNK rows, separately for each expert among them.

    The sum of chunk c and expert e goes to row c + e of ``partials``: along the rows either the chunk or the expert is
    the next one, so that no two sums share a place, and those of one expert are adjacent. A program has the same work
    however uneven the split is, and no more sums are written than chunks and experts together.
    """
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.load(offsets + E).to(tl.int64)
    start = chunk * CHUNK
    end = tl.minimum(tl.minimum(start + CHUNK, T), total)
    # The expert of a row is the number of experts that end before it: for the first and the last row.
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + 1 + index, mask=index < E, other=2**31 - 1).to(tl.int64)  # [BLOCK_E]
    first = tl.sum(((ends <= start) & (index < E)).to(tl.int32), axis=0)
    last = tl.sum(((ends < end) & (index < E)).to(tl.int32), axis=0)
    for expert in range(first, tl.minimum(last + 1, E)):
        low = tl.maximum(tl.load(offsets + expert).to(tl.int64), start)
        high = tl.minimum(tl.load(offsets + expert + 1).to(tl.int64), end)
        sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for at in range(low, high, BLOCK_T):
            row = (at + tl.arange(0, BLOCK_T)).to(tl.int64)
            mask = (row < high)[:, None] & (column < N)[None, :]
            part = tl.load(dy + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0).to(tl.float32)
            if scale is not None:
                part = part * tl.load(scale + row, mask=row < high, other=0.0).to(tl.float32)[:, None]
            sums += part
        tl.store(partials + (chunk + expert) * N + column, tl.sum(sums, axis=0), mask=(column < N) & (low < high))


@triton.jit
def _bias_grad_kernel(
    partials: tl.tensor, offsets: tl.tensor, out: tl.tensor, T: tl.tensor, N: tl.tensor,
    CHUNK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Add the chunk sums of one expert in order; 0 for an expert without rows."""
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    low = tl.load(offsets + expert).to(tl.int64)
    high = tl.minimum(tl.load(offsets + expert + 1).to(tl.int64), T)
    end = tl.where(low < high, expert + (high - 1) // CHUNK + 1, 0)
    sums = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for at in range(expert + low // CHUNK, end, BLOCK_S):
        place = at + tl.arange(0, BLOCK_S)
        mask = (place < end)[:, None] & (column < N)[None, :]
        sums += tl.load(partials + place[:, None] * N + column[None, :], mask=mask, other=0.0)  # [BLOCK_S, BLOCK_N]
    tl.store(out + expert * N + column, tl.sum(sums, axis=0).to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _scale_grad_kernel(
    dy: tl.tensor, bias: tl.tensor, offsets: tl.tensor, out: tl.tensor,
    T: tl.tensor, N: tl.tensor, E: tl.tensor, stride_dy: tl.tensor, stride_bias: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes BLOCK_T rows, each with the bias of its expert; biases stay in cache."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + 1 + index, mask=index < E, other=0).to(tl.int64)
    before = (ends[None, :] <= row[:, None]) & (index < E)[None, :]  # [BLOCK_T, BLOCK_E]
    expert = tl.sum(before.to(tl.int32), axis=1)
    filled = (row < T) & (expert < E)
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        mask = filled[:, None] & (column < N)[None, :]
        upstream = tl.load(dy + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(bias + expert.to(tl.int64)[:, None] * stride_bias + column[None, :], mask=mask, other=0.0)
        sums += upstream * b.to(tl.float32)
    tl.store(out + row, tl.sum(sums, axis=1), mask=row < T)


def grouped_bias_grad_triton(dy: Tensor, offsets: Tensor, out: Tensor, *, scale: Tensor | None = None) -> None:
    """See ``grouped_bias_grad``. Two passes without atomics: over chunks of rows, then over the chunk sums.

    The order of the sums depends on the shapes and on where the expert's rows lie.
    """
    (rows, features), num_experts = dy.shape, out.shape[0]
    if not out.numel():
        return
    dy = adjacent_columns(dy)
    scale = None if scale is None else scale.contiguous()
    chunk = _chunk(rows, num_experts)
    num_chunks = -(-rows // chunk)
    partials = dy.new_empty(num_chunks + num_experts, features, dtype=torch.float32)
    block_n = min(128, triton.next_power_of_2(features))
    columns = -(-features // block_n)
    with device_of(dy):
        if num_chunks:
            _bias_grad_chunks_kernel[(num_chunks, columns)](
                dy, scale, offsets, partials, rows, features, num_experts, dy.stride(0),
                CHUNK=chunk, BLOCK_T=32, BLOCK_N=block_n, BLOCK_E=triton.next_power_of_2(num_experts),
            )  # fmt: skip
        _bias_grad_kernel[(num_experts, columns)](
            partials, offsets, out, rows, features, CHUNK=chunk, BLOCK_S=16, BLOCK_N=block_n
        )


def grouped_scale_grad_triton(dy: Tensor, bias: Tensor | Sequence[Tensor], offsets: Tensor, out: Tensor) -> None:
    """See ``grouped_scale_grad``. Separate biases are packed first: E N numbers are few beside T N."""
    rows, features = dy.shape
    bias = bias if isinstance(bias, Tensor) else torch.stack(tuple(bias))
    if not rows:
        return
    dy, bias = adjacent_columns(dy), adjacent_columns(bias)
    block_t = 16
    with device_of(dy):
        _scale_grad_kernel[(-(-rows // block_t),)](
            dy, bias, offsets, out, rows, features, bias.shape[0], dy.stride(0), bias.stride(0),
            BLOCK_T=block_t, BLOCK_N=min(128, triton.next_power_of_2(max(1, features))),
            BLOCK_E=triton.next_power_of_2(bias.shape[0]),
        )  # fmt: skip


def _chunk(rows: int, num_experts: int) -> int:
    """Rows per chunk: few for small experts, so that a program does not pass many experts; many if there are enough
    programs, so that fewer chunk sums pass through memory."""
    most = 256 if rows >= 32768 else 128
    return max(32, min(most, int(triton.next_power_of_2(max(1, rows // num_experts)))))
