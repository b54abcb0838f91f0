"""Triton kernels that exchange rows between the GPUs of one NVLink domain, through a table of the ranks' addresses.

Each rank has one buffer that all ranks can address:

    flags [ranks]       arrivals of each rank, as many as there were exchanges
    2 halves            an exchange uses one half, and the next exchange the other. In a half:
      [2, ranks, L]     what each rank sends to this one: rows for each expert, and the first row of each expert
      rows              of several tensors, one after the other

An exchange is: rows are written into a half, all ranks meet, rows are read from the same half. Rows are sent by
reading ("pull"): a rank copies its own rows to its own buffer, and after the meeting others fetch them to their final
place. They are sent back by writing ("push"): each rank writes to the senders' buffers, and after the meeting each
sender reads its own buffer. So rows cross NVLink once, and received tensors are no part of a buffer.

One meeting for each exchange is enough. Who writes to a half again, two exchanges later, has passed the meeting in
between, and every rank came there after its last read of the half. The number of exchanges is counted on the device,
for a replay of a CUDA graph runs no Python: a graph with an odd number of exchanges begins in turn with either half.

Legend: E experts of all ranks, L = E / ranks of each rank; R rows that a rank sends, sorted by expert; N rows that it
receives at most, sorted by expert, then by sender. A segment holds the received rows of one expert from one sender.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import device_of
from ..triton_support import Launches, is_interpreted, kinds_of, num_multiprocessors

__all__ = ["Exchange", "Place", "copy_half", "flags_nbytes", "meet", "move_rows"]

_TILE = 4096
"""Words of one copy by a program: 16 KB with words of 4 bytes, 64 bytes in flight for each thread."""
_MOST_ROWS = 256
_NUM_WARPS = 8
_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Of copies between ranks."""
_SPINS_PER_SECOND = 1_000_000
"""About: a look at a flag takes about a microsecond."""


class Exchange(NamedTuple):
    """The buffers of all ranks, as one rank sees them."""

    buffers: Tensor
    """[ranks] int64: addresses of the ranks' buffers."""
    own: Tensor
    """[nbytes] uint8: this rank's buffer."""
    num_exchanges: Tensor
    """[1] int32, on this rank: exchanges so far."""
    num_dropped: Tensor
    """[1] int64, on this rank: received rows that were behind row N, so far."""
    rank: int
    num_ranks: int
    half_nbytes: int


class Place(NamedTuple):
    """Where the rows of a tensor lie in either half: from byte ``offset`` on."""

    exchange: Exchange
    offset: int

    @property
    def numbers(self) -> tuple[int, int]:
        """Bytes from the buffer's start to the place in the first half, and to the other half from there."""
        return flags_nbytes(self.exchange.num_ranks) + self.offset, self.exchange.half_nbytes


def flags_nbytes(num_ranks: int) -> int:
    """Bytes in front of the halves."""
    return (num_ranks * 4 + 127) // 128 * 128


@triton.jit
def _meet_kernel(
    buffers: tl.tensor, own: tl.tensor, num_exchanges: tl.tensor, num_dropped: tl.tensor, counts: tl.tensor,
    plan: tl.tensor, splits: tl.tensor, N: tl.tensor, spins: tl.tensor, start: tl.tensor, half_nbytes: tl.tensor,
    RANK: tl.constexpr, RANKS: tl.constexpr, L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_RANKS: tl.constexpr, COUNTS: tl.constexpr, ARRIVE: tl.constexpr, WAIT: tl.constexpr, TRAP: tl.constexpr,
) -> None:  # fmt: skip
    """Tell all ranks the counts, and that this rank has come; wait for the others; compute who has which rows.

    counts [E] -> plan [2 S + 1]: the last row + 1 of each of S segments; what leads from a received row to the
    sender's; the number of rows that this rank sends. splits [L]: rows of each expert, of the first N rows.
    COUNTS: False where nothing is told and computed. ARRIVE, WAIT: both, except in tests.
    """
    E: tl.constexpr = RANKS * L
    number = tl.load(num_exchanges)
    start += (number & 1).to(tl.int64) * half_nbytes
    if ARRIVE:
        if COUNTS:
            expert = tl.arange(0, BLOCK_E)
            rows = tl.load(counts + expert, mask=expert < E, other=0).to(tl.int32)  # [BLOCK_E]
            first = tl.cumsum(rows, 0) - rows
            address = tl.load(buffers + expert // L, mask=expert < E, other=0) + start
            theirs = address.to(tl.pointer_type(tl.int32)) + RANK * L + expert % L
            tl.store(theirs, rows, mask=expert < E)
            tl.store(theirs + E, first, mask=expert < E)
            tl.store(plan + 2 * E, tl.sum(rows, 0))
        tl.debug_barrier()  # the arrival is one thread's, and tells what all threads have written
        for peer in tl.static_range(RANKS):
            flags = tl.load(buffers + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_add(flags + RANK, 1, sem="release", scope="sys")
    if WAIT:
        for peer in tl.static_range(RANKS):
            flag = own.to(tl.pointer_type(tl.int32), bitcast=True) + peer
            looks = 0
            # The difference, since numbers wrap. A rank that is one exchange ahead has come as well.
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number <= 0) & (looks < spins):
                looks += 1
            if TRAP:  # noqa: SIM102
                if looks >= spins:
                    tl.inline_asm_elementwise(
                        "trap; mov.u32 $0, $1;", "=r,r", [looks], dtype=tl.int32, is_pure=False, pack=1
                    )
        tl.debug_barrier()
        if COUNTS:
            expert, sender = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_RANKS)
            inside = (expert < L)[:, None] & (sender < RANKS)[None, :]
            table = (own + start).to(tl.pointer_type(tl.int32), bitcast=True)
            place = sender[None, :] * L + expert[:, None]
            rows = tl.load(table + place, mask=inside, other=0)  # [BLOCK_L, BLOCK_RANKS]
            first = tl.load(table + E + place, mask=inside, other=0)
            of_expert = tl.sum(rows, 1)
            begin = tl.cumsum(of_expert, 0) - of_expert  # [BLOCK_L]
            segment_begin = begin[:, None] + tl.cumsum(rows, 1) - rows
            segment = expert[:, None] * RANKS + sender[None, :]
            tl.store(plan + segment, segment_begin + rows, mask=inside)
            tl.store(plan + E + segment, first - segment_begin, mask=inside)
            kept = tl.minimum(begin + of_expert, N) - tl.minimum(begin, N)
            tl.store(splits + expert, kept.to(tl.int64), mask=expert < L)
            tl.store(num_dropped, tl.load(num_dropped) + tl.sum(of_expert - kept, 0))
        tl.store(num_exchanges, number + 1)


@triton.jit
def _move_kernel(
    rows: tl.tensor, buffers: tl.tensor, num_exchanges: tl.tensor, plan: tl.tensor,
    N: tl.tensor, W: tl.tensor, start: tl.tensor, half_nbytes: tl.tensor,
    RANKS: tl.constexpr, S: tl.constexpr, SEARCH: tl.constexpr, PUSH: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Received rows [N, W] from the senders' halves. PUSH: to them.

    Rows behind the last segment become 0. Rows that were received behind row N, and so are not here, are sent back
    as 0. W words of ALIGN-divisible rows; 2^SEARCH is above S.
    """
    # A pull comes behind the meeting of its exchange, which has counted it.
    half = (tl.load(num_exchanges) - (0 if PUSH else 1)) & 1
    total = tl.load(plan + S - 1)
    end = total if PUSH else N
    word_nbytes: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    for at in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = at + tl.arange(0, ROWS)
        segment = tl.zeros((ROWS,), dtype=tl.int32)  # the number of segments that end at or before the row
        for bit in tl.static_range(SEARCH):
            step = 1 << (SEARCH - 1 - bit)
            ends = tl.load(plan + segment + step - 1, mask=segment + step <= S, other=2147483647)
            segment = tl.where(ends <= row, segment + step, segment)
        sent = row < total
        theirs = (row + tl.load(plan + S + segment, mask=sent, other=0)).to(tl.int64)
        address = tl.load(buffers + segment % RANKS, mask=sent, other=0)
        address += start + half.to(tl.int64) * half_nbytes + theirs * W * word_nbytes
        remote = tl.multiple_of(address.to(tl.pointer_type(rows.dtype.element_ty)), ALIGN)[:, None]  # [ROWS, 1]
        local = rows + (row.to(tl.int64) * W)[:, None]
        for first in range(0, W, BLOCK):
            column = (first + tl.arange(0, BLOCK))[None, :]
            is_word = column < W
            if PUSH:
                words = tl.load(local + column, mask=is_word & (row < tl.minimum(N, total))[:, None], other=0)
                tl.store(remote + column, words, mask=is_word & sent[:, None])
            else:
                words = tl.load(remote + column, mask=is_word & sent[:, None], other=0)  # [ROWS, BLOCK]
                tl.store(local + column, words, mask=is_word & (row < N)[:, None])


@triton.jit
def _half_kernel(
    rows: tl.tensor, own: tl.tensor, num_exchanges: tl.tensor, index: tl.tensor, num_sent: tl.tensor,
    M: tl.tensor, W: tl.tensor, start: tl.tensor, half_nbytes: tl.tensor,
    WRITE: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Row m of ``rows`` [M, W] is row ``index[m]`` of this rank's half. WRITE: row m of the half is that of ``rows``.

    K = 0: ``index[m]`` is m. K > 1: rows[m] is the sum over j of the half's index[m, j], in fp32, in order of j.
    Rows of the half from ``num_sent`` on were sent nowhere, and read as 0.
    """
    half = (tl.load(num_exchanges) - (0 if WRITE else 1)) & 1
    place = (own + start + half.to(tl.int64) * half_nbytes).to(tl.pointer_type(rows.dtype.element_ty), bitcast=True)
    place = tl.multiple_of(place, ALIGN)
    source = rows if WRITE else place
    out = place if WRITE else rows
    limit = tl.load(num_sent)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < M)[:, None] & (column < W)
    if K > 1:
        values = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for j in tl.static_range(K if K > 1 else 1):
        if K:
            origin = tl.load(index + row.to(tl.int64) * K + j, mask=row < M, other=0).to(tl.int64)
        else:
            origin = row.to(tl.int64)
        mask = inside
        if not WRITE:
            mask &= (origin < limit)[:, None]
        words = tl.load(source + (origin * W)[:, None] + column, mask=mask, other=0)
        if K > 1:
            values += words.to(tl.float32)
        else:
            values = words
    tl.store(out + (row.to(tl.int64) * W)[:, None] + column, values.to(out.dtype.element_ty), mask=inside)


_launch_meet = Launches(_meet_kernel, ("N",), num_warps=4)
_launch_move = Launches(_move_kernel, ("N", "W"), num_warps=_NUM_WARPS)
_launch_half = Launches(_half_kernel, ("M", "W"), num_warps=_NUM_WARPS)


def meet(
    exchange: Exchange, counts: Tensor | None, plan: Tensor, splits: Tensor, most_rows: int, timeout: float,
    *, arrive: bool = True, wait: bool = True,
) -> None:  # fmt: skip
    """Meet the other ranks. ``counts`` [E] of integers become ``plan`` [2 E + 1] int32 and ``splits`` [L] int64.

    counts   None: an exchange like an earlier one, whose plan it is
    timeout  seconds after which a rank that waits in vain ends its process's work on the device with an error
    """
    sizes = exchange.num_ranks, len(splits)
    blocks = [triton.next_power_of_2(each) for each in (sizes[0] * sizes[1], sizes[1], sizes[0])]
    switches = (counts is not None, arrive, wait, not is_interpreted())
    pointers = (*exchange[:4], plan if counts is None else counts, plan, splits)
    spins = int(min(timeout * _SPINS_PER_SECOND, 2**31 - 1))
    numbers = (most_rows, spins, *Place(exchange, 0).numbers)
    _launch(_launch_meet, (1, 1), pointers, numbers, (exchange.rank, *sizes, *blocks, *switches))


def move_rows(rows: Tensor, place: Place, plan: Tensor, *, push: bool) -> None:
    """Received rows [N, ...] from the senders' halves; ``push``: to them. ``plan``: see ``meet``."""
    words, exchange, segments = _words(rows), place.exchange, len(plan) // 2
    programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(rows.device)
    pointers = (words, exchange.buffers, exchange.num_exchanges, plan)
    constants = (exchange.num_ranks, segments, segments.bit_length(), push, *_tile(words))
    _launch(_launch_move, (programs, 1), pointers, (*words.shape, *place.numbers), constants)


def copy_half(rows: Tensor, place: Place, plan: Tensor, index: Tensor | None = None, *, write: bool) -> None:
    """Rows [R, ...] from this rank's half, where rows that were sent nowhere are 0; ``write``: to it.

    index  write: [R], the half gets ``rows[index]``. Else [T, k]: ``rows`` [T, ...] become the sum over j of the
           half's ``index[t, j]``, in fp32, in order of j, rounded once
    """
    top_k = 0 if index is None else 1 if index.dim() == 1 else index.shape[1]
    columns = rows.view(len(rows), -1) if top_k > 1 and len(rows) else _words(rows)
    length = len(rows) if index is None else len(index)
    if not length:
        return
    exchange, (align, height, block) = place.exchange, _tile(columns)
    index = exchange.num_exchanges if index is None else index
    grid = (triton.cdiv(length, height), triton.cdiv(columns.shape[1], block))
    pointers = (columns, exchange.own, exchange.num_exchanges, index, plan[-1:])
    numbers = (length, columns.shape[1], *place.numbers)
    _launch(_launch_half, grid, pointers, numbers, (write, top_k, align, height, block))


def _launch(
    kernel: Launches, grid: tuple[int, int], pointers: tuple[Tensor, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:  # fmt: skip
    key = (pointers[0].device, kinds_of(*pointers), numbers, constants)
    with device_of(pointers[0]):
        kernel(key, (*grid, 1), *pointers, *numbers, *constants)


def _words(rows: Tensor) -> Tensor:
    """Contiguous rows as words [rows, words of a row], 4 bytes each where rows are whole words."""
    flat = rows.view(len(rows), math.prod(rows.shape[1:]))
    nbytes = flat.shape[1] * flat.element_size()
    return flat.view(torch.int32 if nbytes % 4 == 0 else torch.int16 if nbytes % 2 == 0 else torch.uint8)


def _tile(words: Tensor) -> tuple[int, int, int]:
    """The bytes that divide a row, and rows and columns of a tile."""
    nbytes = words.shape[1] * words.element_size()
    block = min(triton.next_power_of_2(words.shape[1]), _TILE)
    return min(16, nbytes & -nbytes), min(_TILE // block, _MOST_ROWS), block
