"""Rows that travel by ``torch.distributed.all_to_all_single``, between any ranks.

::

    rows of the sender, sorted by expert -> chosen -> all-to-all -> by sender -> sorted by local expert
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....ddp.collectives.failure_report import FailureReporter
from ....ddp.collectives.rank_grid import RankGrid, group_size
from ....ddp.collectives.streams import is_capturing
from ....kernels import permute_rows, unpermute_rows
from ..moe_permutation import RowIdMap, row_id_map
from .transport import Meanwhile

__all__ = ["AllToAll", "Alone", "Collective"]


class Alone:
    """See ``TokenTransport``; one process, where rows stay."""

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: None = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, None]:
        """See ``TokenTransport``."""
        return self.send_back(tensors, None, meanwhile), counts, None

    def send_back(self, tensors: Sequence[Tensor], sent: None, meanwhile: Meanwhile = None) -> list[Tensor]:
        """See ``TokenTransport``."""
        if meanwhile is not None:
            meanwhile()
        return list(tensors)


class Collective:
    """The base of transports by all-to-alls. Their routes have a ``sorting``, from the order of senders into that of
    experts, for the received rows.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None) -> None:
        self.num_experts, self.group = num_experts, group
        self.num_local = num_experts // group_size(group)
        self._reporter = FailureReporter()
        """Tells all ranks of the group's exchanges who is missing where one fails."""
        self._reporter.grids = (RankGrid(group, None, group),)

    def _exchange(
        self,
        tensors: Sequence[Tensor],
        meanwhile: Meanwhile = None,
        sent: list[int] | None = None,
        received: list[int] | None = None,
        rows: int = 0,
    ) -> list[Tensor]:
        """All-to-alls of tensors, with ``meanwhile`` beside them.

        sent, received  rows to and from each rank; None: equal parts, as many as were given
        rows            of each result at least; those behind the received are zeros
        """
        if received is None and group_size(self.group) == 1:
            return Alone().send_back(tensors, None, meanwhile)
        arriving = len(tensors[0]) if received is None else sum(received)
        results = [each.new_empty(max(rows, arriving), *each.shape[1:]) for each in tensors]
        with self._reporter.watch("an exchange of experts' rows"):
            works: list[Any] = [
                dist.all_to_all_single(
                    result[:arriving], each.contiguous(), received, sent, group=self.group, async_op=True
                )
                for each, result in zip(tensors, results, strict=True)
            ]
        if meanwhile is not None:
            meanwhile()
        with self._reporter.watch("an exchange of experts' rows"):
            for work in works:
                work.wait()
        for result in results:
            result[arriving:].zero_()
        return results


class _Route(NamedTuple):
    """The way that the rows of one ``send`` take."""

    rows: int
    """R, with those that go nowhere."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    sorting: RowIdMap


class AllToAll(Collective):
    """See ``TokenTransport``; exact, whatever the routing.

    Split sizes are on the host: each ``send`` that is new waits once for the device, to read them. So a CUDA graph
    cannot hold it.
    """

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: _Route | None = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, _Route]:
        """See ``TokenTransport``. Raises ``RuntimeError`` in a capture of a CUDA graph."""
        route = self._route(tensors[0].shape[0], counts) if sent is None else sent
        travelling = [tensor[: sum(route.sent)] for tensor in tensors]
        arrived = self._exchange(travelling, meanwhile, route.sent, route.received)
        return [to_experts(tensor, route.sorting) for tensor in arrived], route.sorting.splits, route

    def send_back(self, tensors: Sequence[Tensor], sent: _Route, meanwhile: Meanwhile = None) -> list[Tensor]:
        """See ``TokenTransport``."""
        travelling = [to_senders(tensor, sent.sorting) for tensor in tensors]
        return self._exchange(travelling, meanwhile, sent.received, sent.sent, sent.rows)

    def _route(self, rows: int, counts: Tensor) -> _Route:
        if is_capturing() or (counts.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "TokenDispatcher: the all_to_all transport reads split sizes on the host, and replays of a graph would "
                "keep the first: use transport='capacity' or 'symmetric'"
            )
        per_rank = counts.view(-1, self.num_local)
        (from_ranks,) = self._exchange([per_rank])
        sent, received = torch.stack((per_rank.sum(1), from_ranks.sum(1))).tolist()
        experts = torch.arange(self.num_local, device=counts.device).expand_as(from_ranks).reshape(-1)
        ids = torch.repeat_interleave(experts, from_ranks.view(-1), output_size=sum(received))
        return _Route(rows, sent, received, row_id_map(ids[:, None], self.num_local))


def to_experts(rows: Tensor, sorting: RowIdMap) -> Tensor:
    """[S, ...] in the order of senders -> in the order of experts."""
    if rows.dim() == 2 and rows.is_floating_point():
        return permute_rows(rows, sorting.places)
    return rows.index_select(0, sorting.copies)


def to_senders(rows: Tensor, sorting: RowIdMap) -> Tensor:
    """The inverse of ``to_experts``."""
    if rows.dim() == 2 and rows.is_floating_point():
        return unpermute_rows(rows, sorting.places)
    return rows.index_select(0, sorting.places.view(-1))
