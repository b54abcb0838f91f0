"""Triton kernels of the permutation of tokens by expert. Each row is read once and written once.

Legend: T tokens, k copies of each, D features; BLOCK features of one token to a program.
"""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["permute_triton"]

_MAX_BLOCK = 2048
"""Features per program: 8 warps with 16 bytes of bf16 per thread."""


@triton.jit
def _permute_kernel(
    source: tl.tensor,
    row_id_map: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    stride_source: tl.tensor,
    stride_out: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
) -> None:
    """One token and BLOCK features: ``out[map[t, j]] = source[t]``, one load and TOP_K stores.

    INVERSE: ``out[t] = sum over j of source[map[t, j]]``, TOP_K loads, summed in fp32 in order of j, and one store.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    if INVERSE:
        values = tl.zeros((BLOCK,), dtype=tl.float32)
    else:
        values = tl.load(source + token * stride_source + column, mask=inside)  # [BLOCK]
    for j in tl.static_range(TOP_K):
        row = tl.load(row_id_map + token * TOP_K + j).to(tl.int64)
        if INVERSE:
            values += tl.load(source + row * stride_source + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        else:
            tl.store(out + row * stride_out + column, values, mask=inside)
    if INVERSE:
        tl.store(out + token * stride_out + column, values.to(out.dtype.element_ty), mask=inside)


def permute_triton(source: Tensor, row_id_map: Tensor, out: Tensor, *, inverse: bool) -> None:
    """See ``permute_rows``, and ``unpermute_rows`` (``inverse``); adjacent columns, ``row_id_map`` contiguous."""
    (tokens, top_k), features = row_id_map.shape, out.shape[1]
    if not out.numel():
        return
    block = min(_MAX_BLOCK, triton.next_power_of_2(features))
    _permute_kernel[(tokens, triton.cdiv(features, block))](
        source,
        row_id_map,
        out,
        features,
        source.stride(0),
        out.stride(0),
        TOP_K=top_k,
        BLOCK=block,
        INVERSE=inverse,
        num_warps=max(1, min(8, block // 256)),
    )
