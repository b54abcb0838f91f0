"""Triton kernels of an embedding's weight gradient: the rows of each token id are summed in order of their positions.

Tokens are sorted by id, so that the rows of one id are one segment. The sorted positions are cut into chunks of equal
length, and segments into parts at the chunks' ends:

    sorted ids    3 3 7 7 | 7 7 7 7 | 7 9 9 12        CHUNK = 4
    first pass    3 is whole: into main_grad. Parts of 7: "end of chunk 0", "start of chunk 1", "start of chunk 2".
                  9 and 12 are whole
    second pass   chunk 0, in which 7 begins, adds its three parts, and then to main_grad

So an id that comes 100,000 times takes no longer than as many ids. Each row of ``main_grad`` is written by one program,
in an order that the ids alone decide: there are no atomic additions, and the host reads nothing.

Legend: T tokens, V vocabulary, D features; BLOCK features to a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import adjacent_columns, device_of

__all__ = ["embedding_wgrad_triton"]

_SHORTEST_CHUNK, _LONGEST_CHUNK = 16, 128
_MOST_CHUNKS = 1024
"""Up to the longest chunk: parts of 1,024 chunks take 33.5 MB for 4,096 features."""
_BLOCK = 1024
_BLOCK_OF_PARTS, _PARTS_AT_ONCE = 256, 16


@triton.jit
def _sum_chunks_kernel(
    dy: tl.tensor, tokens: tl.tensor, order: tl.tensor, parts: tl.tensor, main_grad: tl.tensor,
    T: tl.tensor, D: tl.tensor, stride_dy: tl.tensor,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the segments of one chunk, for BLOCK features. Whole segments go to ``main_grad``, the others to ``parts``.

    Row 2 c of ``parts`` has the segment that chunk c continues, row 2 c + 1 the one that begins in c and goes on.
    ADD: ``main_grad`` is added to; else the row is written.
    """
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    start = chunk * CHUNK
    end = tl.minimum(start + CHUNK, T)
    before = tl.load(tokens + start - 1, mask=start > 0, other=-1)
    token = tl.load(tokens + start)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(start, end):
        row = tl.load(order + at).to(tl.int64)
        following = tl.load(tokens + at + 1, mask=at + 1 < T, other=-1)
        counts = token >= 0
        total += tl.load(dy + row * stride_dy + column, mask=inside & counts, other=0.0).to(tl.float32)  # [BLOCK]
        goes_on = following == token
        ends = ((not goes_on) or at + 1 == end) and counts
        is_part = (token == before) | goes_on
        # Two branches side by side: Triton 3.6 fails to compile one inside the other.
        if ends and is_part:
            part = 2 * chunk + tl.where(token == before, 0, 1)
            tl.store(parts + part * D + column, total, mask=inside)
        if ends and not is_part:
            place = main_grad + token.to(tl.int64) * D + column
            if ADD:
                summed = total + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            else:
                summed = total
            tl.store(place, summed.to(main_grad.dtype.element_ty), mask=inside)
        if not goes_on:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
        token = following


@triton.jit
def _add_parts_kernel(
    tokens: tl.tensor, parts: tl.tensor, main_grad: tl.tensor, T: tl.tensor, D: tl.tensor,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    """Add the parts of the segment that begins in this chunk and ends in a later one, PARTS at a time."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    start = chunk * CHUNK
    end = start + CHUNK  # below T: the last chunk has no program
    before = tl.load(tokens + start - 1, mask=start > 0, other=-1)
    token = tl.load(tokens + end - 1)
    if (token >= 0) & (token != before) & (token == tl.load(tokens + end)):
        low, high = end, end * 0 + T  # the first position behind the segment lies between
        while low < high:
            middle = (low + high) // 2
            is_behind = tl.load(tokens + middle) > token
            low, high = tl.where(is_behind, low, middle + 1), tl.where(is_behind, middle, high)
        last = (low - 1) // CHUNK
        sums = tl.zeros((PARTS, BLOCK), dtype=tl.float32)
        for first in range(chunk + 1, last + 1, PARTS):
            part = first + tl.arange(0, PARTS)
            mask = (part <= last)[:, None] & inside[None, :]
            sums += tl.load(parts + 2 * part[:, None] * D + column[None, :], mask=mask, other=0.0)  # [PARTS, BLOCK]
        total = tl.load(parts + (2 * chunk + 1) * D + column, mask=inside, other=0.0) + tl.sum(sums, axis=0)
        place = main_grad + token.to(tl.int64) * D + column
        if ADD:
            total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, total.to(main_grad.dtype.element_ty), mask=inside)


def embedding_wgrad_triton(
    dy: Tensor, tokens: Tensor, main_grad: Tensor, *, overwrite: bool, chunk: int | None = None, block: int = _BLOCK
) -> None:
    """See ``embedding_wgrad_accumulate``; ``tokens`` [T] are signed, and neither they nor ``dy`` are empty.

    chunk, block  of the first pass, for benchmarks
    """
    length, features = dy.shape
    if overwrite:
        main_grad.zero_()
    if chunk is None:
        chunk = triton.next_power_of_2(triton.cdiv(length, _MOST_CHUNKS))
        chunk = min(max(chunk, _SHORTEST_CHUNK), _LONGEST_CHUNK)
    dy = adjacent_columns(dy)
    ids, order = torch.sort(tokens, stable=True)
    num_chunks = triton.cdiv(length, chunk)
    parts = dy.new_empty(2 * num_chunks if num_chunks > 1 else 0, features, dtype=torch.float32)
    block, block_of_parts = (min(each, triton.next_power_of_2(features)) for each in (block, _BLOCK_OF_PARTS))
    with device_of(dy):
        _sum_chunks_kernel[(num_chunks, triton.cdiv(features, block))](
            dy, ids, order, parts, main_grad, length, features, dy.stride(0),
            CHUNK=chunk, BLOCK=block, ADD=not overwrite, num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
        if num_chunks > 1:
            _add_parts_kernel[(num_chunks - 1, triton.cdiv(features, block_of_parts))](
                ids, parts, main_grad, length, features,
                CHUNK=chunk, PARTS=_PARTS_AT_ONCE, BLOCK=block_of_parts, ADD=not overwrite, num_warps=4,
            )  # fmt: skip
