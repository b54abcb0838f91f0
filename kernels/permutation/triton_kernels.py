"""Triton kernels of the permutation of tokens by expert. Each row is read once and written once.

Legend: T tokens, k copies of each, D features; BLOCK features of one token to a program.
"""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["permute_rows_triton", "unpermute_rows_triton"]

_MAX_BLOCK = 2048
"""Features per program: 8 warps with 16 bytes of bf16 per thread."""


@triton.jit
def _permute_rows_kernel(
    x: tl.tensor,
    row_id_map: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out[map[t, j]] = x[t]`` for one token and BLOCK features: one load, TOP_K stores."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    values = tl.load(x + token * stride_x + column, mask=inside)  # [BLOCK]
    for j in tl.static_range(TOP_K):
        row = tl.load(row_id_map + token * TOP_K + j).to(tl.int64)
        tl.store(out + row * stride_out + column, values, mask=inside)


@triton.jit
def _unpermute_rows_kernel(
    rows: tl.tensor,
    row_id_map: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    stride_rows: tl.tensor,
    stride_out: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``out[t] = sum over j of rows[map[t, j]]``, TOP_K loads, summed in fp32 in order of j, and one store."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(row_id_map + token * TOP_K + j).to(tl.int64)
        total += tl.load(rows + row * stride_rows + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + token * stride_out + column, total.to(out.dtype.element_ty), mask=inside)


def permute_rows_triton(x: Tensor, row_id_map: Tensor, out: Tensor) -> None:
    """See ``permute_rows``; adjacent columns, ``row_id_map`` contiguous."""
    _launch(_permute_rows_kernel, x, row_id_map, out, x.shape)


def unpermute_rows_triton(rows: Tensor, row_id_map: Tensor, out: Tensor) -> None:
    """See ``unpermute_rows``; adjacent columns, ``row_id_map`` contiguous."""
    _launch(_unpermute_rows_kernel, rows, row_id_map, out, out.shape)


def _launch(
    kernel: triton.JITFunction, source: Tensor, row_id_map: Tensor, out: Tensor, shape: tuple[int, ...]
) -> None:
    tokens, features = shape
    if not tokens or not features:
        return
    block = min(_MAX_BLOCK, triton.next_power_of_2(features))
    kernel[(tokens, triton.cdiv(features, block))](
        source,
        row_id_map,
        out,
        features,
        source.stride(0),
        out.stride(0),
        TOP_K=row_id_map.shape[1],
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
