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
from ..triton_support import Launches, kinds_of, num_multiprocessors

__all__ = ["FLAGS_NBYTES", "Exchange", "copy_rows", "meet"]

FLAGS_NBYTES = 1024
"""In front of the halves; for 256 ranks."""
_MOST_ROWS = 256
_WORDS = {1: torch.uint8, 2: torch.int16}
"""In which rows are copied, by the bytes that divide them; others as int32."""


_PROGRAMS_PER_MULTIPROCESSOR = 4
_TILE = 4096
"""Words of 4 bytes that a program copies at a time: what is in flight for it. Its four warps are Triton's default.

Two H200, 32 MB of rows, half of them for the other rank: pull 57 us, push 50. Fewer, larger programs were to leave
multiprocessors to products beside the copy: with 32 of them both took longer than one after the other.
"""
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


@triton.jit
def _meet_kernel(
    buffers: tl.tensor, own: tl.tensor, num_exchanges: tl.tensor, num_dropped: tl.tensor, counts: tl.tensor,
    plan: tl.tensor, splits: tl.tensor, N: tl.tensor, spins: tl.tensor, start: tl.tensor, half_nbytes: tl.tensor,
    RANK: tl.constexpr, RANKS: tl.constexpr, L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_RANKS: tl.constexpr, COUNTS: tl.constexpr, ARRIVE: tl.constexpr, WAIT: tl.constexpr,
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
def _copy_kernel(
    rows: tl.tensor, buffers: tl.tensor, num_exchanges: tl.tensor, plan: tl.tensor,
    N: tl.tensor, W: tl.tensor, start: tl.tensor, half_nbytes: tl.tensor,
    RANK: tl.constexpr, RANKS: tl.constexpr, S: tl.constexpr, ROUTED: tl.constexpr, WRITE: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """``rows`` [N, W] from this rank's half; ROUTED: from the senders' halves, as the plan says. WRITE: to halves.

    Rows that nobody sent are read as 0. Received rows behind row N, which are not here, are written as 0. W words of
    rows that ALIGN bytes divide.
    """
    # Rows are written to a half before the meeting of their exchange, which counts it, and read behind it.
    half = (tl.load(num_exchanges) - (0 if WRITE else 1)) & 1
    start += half.to(tl.int64) * half_nbytes
    limit = tl.load(plan + (S - 1 if ROUTED else 2 * S))  # rows received, or sent
    end = limit if ROUTED and WRITE else N
    nbytes: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    for at in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = at + tl.arange(0, ROWS)
        is_target = row < end
        is_source = is_target & (row < N)
        if ROUTED or not WRITE:
            is_source &= row < limit
        there = row
        rank = tl.full((ROWS,), RANK, tl.int32)
        if ROUTED:
            segment = tl.zeros((ROWS,), dtype=tl.int32)  # the number of segments that end at or before the row
            for bit in tl.static_range(S.bit_length()):
                step = (1 << (S.bit_length() - 1)) >> bit
                ends = tl.load(plan + segment + step - 1, mask=segment + step <= S, other=2147483647)
                segment = tl.where(ends <= row, segment + step, segment)
            there += tl.load(plan + S + segment, mask=row < limit, other=0)
            rank = segment % RANKS
        address = tl.load(buffers + rank) + start + there.to(tl.int64) * (W * nbytes)
        remote = tl.multiple_of(address.to(tl.pointer_type(rows.dtype.element_ty)), ALIGN)[:, None]  # [ROWS, 1]
        local = rows + (row.to(tl.int64) * W)[:, None]
        source, target = (local, remote) if WRITE else (remote, local)
        words = tl.load(source + column, mask=is_source[:, None] & (column < W), other=0)  # [ROWS, BLOCK]
        tl.store(target + column, words, mask=is_target[:, None] & (column < W))


_launch_meet = Launches(_meet_kernel, ("N",), num_warps=4)
_launch_copy = Launches(_copy_kernel, ("N", "W"))


def meet(
    exchange: Exchange, counts: Tensor | None, plan: Tensor, splits: Tensor, most_rows: int, timeout: float,
    *, arrive: bool = True, wait: bool = True,
) -> None:  # fmt: skip
    """Meet the other ranks. ``counts`` [E] of integers become ``plan`` [2 E + 1] int32 and ``splits`` [L] int64.

    counts   None: an exchange like an earlier one, whose plan it is
    timeout  seconds after which a rank that waits in vain ends its process's work on the device with an error
    """
    ranks, own = exchange.num_ranks, len(splits)
    blocks = _power_of_2(ranks * own), _power_of_2(own), _power_of_2(ranks)
    switches = (counts is not None, arrive, wait)
    pointers = (*exchange[:4], plan if counts is None else counts, plan, splits)
    spins = int(min(timeout * _SPINS_PER_SECOND, 2**31 - 1))
    numbers = (most_rows, spins, FLAGS_NBYTES, exchange.half_nbytes)
    _launch(_launch_meet, (1, 1), pointers, numbers, (exchange.rank, ranks, own, *blocks, *switches))


def copy_rows(exchange: Exchange, offset: int, rows: Tensor, plan: Tensor, *, routed: bool, write: bool) -> None:
    """Rows from this rank's half, where rows that were sent nowhere are 0; ``write``: to it.

    offset  bytes in front of them in either half
    rows    [R, ...] of the sender; ``routed``: received rows [N, ...], which are read from the senders' halves, or
            written to them
    plan    see ``meet``
    """
    words = rows.view(rows.shape[0], math.prod(rows.shape[1:]))
    nbytes = words.shape[1] * words.element_size()
    align = min(16, nbytes & -nbytes)
    words = words.view(_WORDS.get(align, torch.int32))
    block = min(_power_of_2(words.shape[1]), _TILE)
    tile = align, min(_TILE // block, _MOST_ROWS), block
    constants = (exchange.rank, exchange.num_ranks, plan.shape[0] // 2, routed, write, *tile)
    programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(rows.device)
    pointers = (words, exchange.buffers, exchange.num_exchanges, plan)
    numbers = (*words.shape, FLAGS_NBYTES + offset, exchange.half_nbytes)
    grid = (programs, -(-words.shape[1] // block))
    _launch(_launch_copy, grid, pointers, numbers, constants)


def _launch(
    kernel: Launches, grid: tuple[int, int], pointers: tuple[Tensor, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:  # fmt: skip
    key = pointers[0].device, kinds_of(*pointers), numbers, constants
    with device_of(pointers[0]):
        kernel(key, (*grid, 1), *pointers, *numbers, *constants)


def _power_of_2(number: int) -> int:
    """The next one; ``triton.next_power_of_2`` takes the host ten times as long."""
    return 1 << (number - 1).bit_length()
