"""``SymmetricExchange``: rows travel within one NVLink domain by kernels that copy to and from other GPUs' memory.

Split sizes stay on the device: the host waits for nothing, and a captured CUDA graph replays with another routing. So
received tensors have a static number of rows. ``kernels/permutation/exchange_triton.py`` says how rows travel, and why
one meeting of all ranks is enough for each exchange.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....ddp.collectives.streams import OnStream, current_stream
from ....kernels.compat import HAS_TRITON
from ...torch_internals import symmetric_memory
from .transport import Meanwhile

if HAS_TRITON:
    from ....kernels.permutation.exchange_triton import (
        Exchange,
        Place,
        copy_half,
        flags_nbytes,
        meet,
        move_rows,
    )
    from ....kernels.triton_support import is_interpreted

__all__ = ["SymmetricExchange"]

_ALIGNMENT = 128


class _Route(NamedTuple):
    """The way that the rows of one ``send`` take."""

    plan: Tensor
    """See ``meet``."""
    splits: Tensor
    rows: int
    """R of this rank."""
    most_sent: int
    """Rows of any rank."""
    most_received: int
    """S, the same on all ranks."""


class SymmetricExchange:
    """See ``TokenTransport``; for ranks whose GPUs address each other's memory, with torch's symmetric memory.

    max_rows         rows of any rank in any call; None: in each call all ranks have as many rows
    capacity_factor  S / R: rows that a rank receives at most, over those that a rank sends at most. Rows beyond are
                     dropped: they come back as zeros, and ``num_dropped`` counts them. None: all rows may go to one
                     rank, and no row is dropped
    timeout          seconds, about, after which a rank that waits for others in vain ends with a CUDA error

    Exchanges are ordered: streams that call it wait for each other, and all ranks call it in one order. Received rows
    behind the last expert's are zeros. Buffers are made in the first call, and larger ones when a call needs them; both
    are collective, and refused in a capture. A graph that was captured needs the object for as long as it is replayed.

    Raises ``ValueError`` for tensors that are not on CUDA, and for more than ``max_rows`` rows.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        *,
        max_rows: int | None = None,
        capacity_factor: float | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.num_local = num_experts // self.num_ranks
        self.max_rows = max_rows
        self.capacity_factor = self.num_ranks if capacity_factor is None else capacity_factor
        self.timeout = timeout
        self._exchange: Exchange | None = None
        self._memory: list[Any] = []
        """Buffers and what maps those of the others. Graphs may be captured over old ones."""
        self._side: torch.cuda.Stream | None = None

    @property
    def num_dropped(self) -> Tensor | None:
        """[1] int64 on the device: rows that this rank received beyond S, in all calls so far; None before the first.

        Only the host's reading it waits.
        """
        return None if self._exchange is None else self._exchange.num_dropped

    def send(
        self,
        tensors: Sequence[Tensor],
        counts: Tensor,
        sent: _Route | None = None,
        meanwhile: Meanwhile = None,
        *,
        index: Sequence[Tensor | None] | None = None,
    ) -> tuple[list[Tensor], Tensor, _Route | None]:
        """See ``TokenTransport``.

        index  for each tensor [R] or None: the tensor [any, ...] is not sorted, and its rows ``tensor[index]`` are sent
        """
        indices = [None] * len(tensors) if index is None else index
        rows = len(tensors[0] if indices[0] is None else indices[0])
        route = self._route(rows, counts) if sent is None else sent
        told = None if sent is not None else counts.contiguous()
        lengths = [route.most_received] * len(tensors)
        return self._travel(tensors, lengths, indices, route, told, meanwhile), route.splits, route

    def send_back(
        self,
        tensors: Sequence[Tensor],
        sent: _Route,
        meanwhile: Meanwhile = None,
        *,
        index: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """See ``TokenTransport``.

        index  for each tensor [T, k] or None: returned are sums [T, ...] over j of the rows ``index[t, j]``, in fp32
               and in order of j, rounded once
        """
        indices = [None] * len(tensors) if index is None else index
        lengths = [sent.rows if at is None else len(at) for at in indices]
        return self._travel(tensors, lengths, indices, sent, None, meanwhile, back=True)

    def _route(self, rows: int, counts: Tensor) -> _Route:
        most = rows if self.max_rows is None else self.max_rows
        if rows > most:
            raise ValueError(f"SymmetricExchange: {rows} rows, and max_rows is {most}")
        plan = counts.new_empty(2 * self.num_ranks * self.num_local + 1, dtype=torch.int32)
        splits = counts.new_empty(self.num_local, dtype=torch.int64)
        return _Route(plan, splits, rows, most, math.ceil(most * self.capacity_factor))

    def _travel(
        self,
        tensors: Sequence[Tensor],
        lengths: Sequence[int],
        indices: Sequence[Tensor | None],
        route: _Route,
        counts: Tensor | None,
        meanwhile: Meanwhile,
        *,
        back: bool = False,
    ) -> list[Tensor]:
        """One exchange, on the current stream, or beside ``meanwhile`` on a side stream that the current waits for."""
        sources = [each.contiguous() for each in tensors]
        results = [each.new_empty(length, *each.shape[1:]) for each, length in zip(tensors, lengths, strict=True)]
        places = self._places(sources, route)

        def exchange() -> None:
            for source, place, at in zip(sources, places, indices, strict=True):
                if back:
                    move_rows(source, place, route.plan, push=True)
                else:
                    copy_half(source, place, route.plan, at, write=True)
            meet(places[0].exchange, counts, route.plan, route.splits, route.most_received, self.timeout)
            for result, place, at in zip(results, places, indices, strict=True):
                if back:
                    copy_half(result, place, route.plan, at, write=False)
                else:
                    move_rows(result, place, route.plan, push=False)

        if meanwhile is None:
            exchange()
            return results
        stream = current_stream(route.plan.device)
        if self._side is None:
            self._side = torch.cuda.Stream(route.plan.device, priority=-1)
        self._side.wait_stream(stream)
        with OnStream(self._side):
            exchange()
        try:
            meanwhile()
        finally:
            stream.wait_stream(self._side)  # memory of this call is the current stream's again
        return results

    def _places(self, tensors: Sequence[Tensor], route: _Route) -> list[Place]:
        """Where each tensor lies in the buffers, which are made, or made larger, where it does not fit."""
        ends = [_aligned(4 * len(route.plan))]  # counts lie in front
        for each in tensors:
            nbytes = route.most_sent * math.prod(each.shape[1:]) * each.element_size()
            ends.append(ends[-1] + _aligned(nbytes))
        exchange = self._exchange
        if exchange is None or exchange.half_nbytes < ends[-1]:
            exchange = self._exchange = self._make(ends[-1], tensors[0].device)
        return [Place(exchange, offset) for offset in ends[:-1]]

    def _make(self, half_nbytes: int, device: torch.device) -> Exchange:
        if not HAS_TRITON or not (device.type == "cuda" or is_interpreted()):
            raise ValueError(f"SymmetricExchange needs Triton and tensors on CUDA; got {device}")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"SymmetricExchange: an exchange of {half_nbytes} bytes in a capture needs buffers first: run it once "
                f"before, with as many rows"
            )
        memory: Any = symmetric_memory()
        own = memory.empty(flags_nbytes(self.num_ranks) + 2 * half_nbytes, dtype=torch.uint8, device=device)
        own.zero_()
        # No rank signals before all have cleared their flags, since all must come to the rendezvous.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        handle = memory.rendezvous(own, self.group.group_name)
        self._memory.append((own, handle))
        peers = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(self.num_ranks)]
        dropped = self.num_dropped
        return Exchange(
            torch.tensor(peers, device=device),
            own,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device) if dropped is None else dropped,
            self.group.rank(),
            self.num_ranks,
            half_nbytes,
        )


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
