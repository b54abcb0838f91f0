"""``SymmetricExchange``: rows travel within one NVLink domain by kernels that copy to and from other GPUs' memory.

Split sizes stay on the device: the host waits for nothing, and a captured CUDA graph replays with another routing. So
received tensors have a static number of rows. ``kernels/permutation/exchange_triton.py`` says how rows travel, and why
one meeting of all ranks is enough for each exchange.
"""

import itertools
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
    from ....kernels.permutation.exchange_triton import FLAGS_NBYTES, Exchange, copy_rows, meet
    from ....kernels.triton_support import is_interpreted

__all__ = ["Route", "SymmetricExchange"]

_ALIGNMENT = 128
_TIMEOUT = 600.0
"""Seconds, about, after which a rank that waits for others in vain ends with a CUDA error."""


class Route(NamedTuple):
    """The way that the rows of one ``send`` take."""

    plan: Tensor
    """See ``meet``."""
    splits: Tensor
    rows: int
    """R of this rank."""


class SymmetricExchange:
    """See ``TokenTransport``; for ranks whose GPUs address each other's memory, with torch's symmetric memory.

    max_rows         R at most, on any rank and in any call; None: the largest of the first call
    capacity_factor  S / ``max_rows``, S rows being received at most. Rows beyond are dropped: they come back as zeros.
                     None: the number of ranks, so that all rows may go to one rank

    Exchanges are ordered: streams that call it wait for each other, and all ranks call it in one order. Received rows
    behind the last expert's are zeros. The first call and those with wider rows than before make buffers: the host
    waits, and a capture refuses it. A captured graph needs the object for as long as it is replayed.

    Raises ``ValueError`` for tensors that are not on CUDA, and for more than ``max_rows`` rows.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        *,
        max_rows: int | None = None,
        capacity_factor: float | None = None,
    ) -> None:
        self.group = group
        self.num_local = num_experts // group.size()
        self.capacity_factor = group.size() if capacity_factor is None else capacity_factor
        self.max_rows = max_rows
        self.num_dropped: Tensor | None = None
        """[1] int64 on the device: received rows beyond S, in all calls so far; None before the first."""
        self._exchange: Exchange | None = None
        self._memory: list[Any] = []
        """Buffers and what maps those of the others. Graphs may be captured over old ones."""
        self._side: torch.cuda.Stream | None = None

    @property
    def num_received(self) -> int | None:
        """S; None before the first call, if that says ``max_rows``."""
        return None if self.max_rows is None else math.ceil(self.capacity_factor * self.max_rows)

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: Route | None = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, Route]:
        """See ``TokenTransport``."""
        route = self._route(len(tensors[0]), counts) if sent is None else sent
        told = None if sent is not None else counts.contiguous()
        return self._travel(tensors, route, told, meanwhile), route.splits, route

    def send_back(self, tensors: Sequence[Tensor], sent: Route, meanwhile: Meanwhile = None) -> list[Tensor]:
        """See ``TokenTransport``."""
        return self._travel(tensors, sent, None, meanwhile, back=True)

    def _route(self, rows: int, counts: Tensor) -> Route:
        if self.max_rows is None:
            _refuse_capture(counts)
            most = torch.tensor(rows, device=counts.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
            self.max_rows = int(most)
        if rows > self.max_rows:
            raise ValueError(f"SymmetricExchange: {rows} rows, and max_rows={self.max_rows}: give a larger one")
        plan = counts.new_empty(2 * len(counts) + 1, dtype=torch.int32)
        return Route(plan, counts.new_empty(self.num_local, dtype=torch.int64), rows)

    def _travel(
        self,
        tensors: Sequence[Tensor],
        route: Route,
        counts: Tensor | None,
        meanwhile: Meanwhile,
        *,
        back: bool = False,
    ) -> list[Tensor]:
        """One exchange, on the current stream, or beside ``meanwhile`` on a side stream that the current waits for."""
        sources = [each.contiguous() for each in tensors]
        exchange, offsets = self._places(sources, route)
        most = self.num_received or 0
        results = [each.new_empty(route.rows if back else most, *each.shape[1:]) for each in tensors]

        def run() -> None:
            # Rows of the receiver are routed by the plan, on either side of the meeting.
            for offset, source in zip(offsets, sources, strict=True):
                copy_rows(exchange, offset, source, route.plan, routed=back, write=True)
            meet(exchange, counts, route.plan, route.splits, most, _TIMEOUT)
            for offset, result in zip(offsets, results, strict=True):
                copy_rows(exchange, offset, result, route.plan, routed=not back, write=False)

        if meanwhile is None:
            run()
            return results
        stream = current_stream(route.plan.device)
        if self._side is None:
            self._side = torch.cuda.Stream(route.plan.device, priority=-1)
        self._side.wait_stream(stream)
        with OnStream(self._side):
            run()
        try:
            meanwhile()
        finally:
            stream.wait_stream(self._side)  # memory of this call is the current stream's again
        return results

    def _places(self, tensors: Sequence[Tensor], route: Route) -> "tuple[Exchange, list[int]]":
        """The buffers, and where each tensor lies in a half of them; larger buffers where they do not fit."""
        nbytes = [4 * len(route.plan)]  # counts lie in front
        nbytes += [(self.max_rows or 0) * math.prod(each.shape[1:]) * each.element_size() for each in tensors]
        *offsets, end = itertools.accumulate(-(-each // _ALIGNMENT) * _ALIGNMENT for each in nbytes)
        if self._exchange is None or self._exchange.half_nbytes < end:
            self._exchange = self._make(end, route.plan)
        return self._exchange, offsets

    def _make(self, half_nbytes: int, like: Tensor) -> "Exchange":
        if not HAS_TRITON or not (like.is_cuda or is_interpreted()):
            raise ValueError(f"SymmetricExchange needs Triton and tensors on CUDA; got {like.device}")
        _refuse_capture(like)
        memory: Any = symmetric_memory()
        ranks = self.group.size()
        own = memory.empty(FLAGS_NBYTES + 2 * half_nbytes, dtype=torch.uint8, device=like.device)
        own.zero_()
        # No rank signals before all have cleared their flags, since all must come to the rendezvous.
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        handle = memory.rendezvous(own, self.group.group_name)
        self._memory.append((own, handle))
        peers = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(ranks)]
        if self.num_dropped is None:
            self.num_dropped = like.new_zeros(1, dtype=torch.int64)
        table = like.new_tensor(peers, dtype=torch.int64)
        return Exchange(table, own, like.new_zeros(1), self.num_dropped, self.group.rank(), ranks, half_nbytes)


def _refuse_capture(tensor: Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("SymmetricExchange: buffers cannot be made in a capture: run the captured code once before")
