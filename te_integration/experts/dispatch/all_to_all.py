"""``AllToAll``: rows travel by ``torch.distributed.all_to_all_single``, between any ranks.

Its split sizes are on the host: each ``send`` that is new waits once for the device, to read them. So a CUDA graph
cannot hold it.
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

__all__ = ["AllToAll", "exchange", "reporter_of", "to_experts", "to_senders"]


class _Route(NamedTuple):
    """The way that the rows of one ``send`` take."""

    rows: int
    """R, with those that go nowhere."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    sorting: RowIdMap
    """From the order of senders into that of experts, for the received rows."""


class AllToAll:
    """See ``TokenTransport``; exact, whatever the routing.

    group  None: this process alone, where rows stay and the host reads nothing
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.num_local = num_experts // group_size(group)
        self._reporter = reporter_of(group)

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: "_Route | None" = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, "_Route | None"]:
        """See ``TokenTransport``. Raises ``RuntimeError`` in a capture of a CUDA graph."""
        if group_size(self.group) == 1:
            if meanwhile is not None:
                meanwhile()
            return list(tensors), counts, None
        route = self._route(tensors[0].shape[0], counts) if sent is None else sent
        travelling = [tensor[: sum(route.sent)] for tensor in tensors]
        arrived = [tensor.new_empty(sum(route.received), *tensor.shape[1:]) for tensor in tensors]
        self._exchange(travelling, arrived, route.sent, route.received, meanwhile)
        return [to_experts(tensor, route.sorting) for tensor in arrived], route.sorting.splits, route

    def send_back(self, tensors: Sequence[Tensor], sent: "_Route | None", meanwhile: Meanwhile = None) -> list[Tensor]:
        """See ``TokenTransport``."""
        if sent is None:
            if meanwhile is not None:
                meanwhile()
            return list(tensors)
        travelling = [to_senders(tensor, sent.sorting) for tensor in tensors]
        results = [tensor.new_empty(sent.rows, *tensor.shape[1:]) for tensor in tensors]
        num_sent = sum(sent.sent)
        self._exchange(travelling, [result[:num_sent] for result in results], sent.received, sent.sent, meanwhile)
        for result in results:
            result[num_sent:].zero_()
        return results

    def _route(self, rows: int, counts: Tensor) -> _Route:
        if is_capturing() or (counts.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "TokenDispatcher: the all_to_all transport reads split sizes on the host, and replays of a graph would "
                "keep the first: use transport='capacity' or 'symmetric'"
            )
        per_rank = counts.view(-1, self.num_local)
        from_ranks = torch.empty_like(per_rank)
        self._exchange([per_rank], [from_ranks], None, None, None)
        sent, received = torch.stack((per_rank.sum(1), from_ranks.sum(1))).tolist()
        experts = torch.arange(self.num_local, device=counts.device).expand_as(from_ranks).reshape(-1)
        ids = torch.repeat_interleave(experts, from_ranks.view(-1), output_size=sum(received))
        return _Route(rows, sent, received, row_id_map(ids[:, None], self.num_local))

    def _exchange(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sent: list[int] | None,
        received: list[int] | None,
        meanwhile: Meanwhile,
    ) -> None:
        assert self.group is not None, "ranks to exchange with"
        exchange(self.group, self._reporter, inputs, outputs, sent, received, meanwhile)


def exchange(
    group: dist.ProcessGroup,
    reporter: FailureReporter,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    sent: list[int] | None,
    received: list[int] | None,
    meanwhile: Meanwhile,
) -> None:
    """All-to-alls of tensors, with ``meanwhile`` beside them. None for ``sent`` and ``received``: equal parts."""
    with reporter.watch("an exchange of experts' rows"):
        works: list[Any] = [
            dist.all_to_all_single(output, each.contiguous(), received, sent, group=group, async_op=True)
            for each, output in zip(inputs, outputs, strict=True)
        ]
    if meanwhile is not None:
        meanwhile()
    with reporter.watch("an exchange of experts' rows"):
        for work in works:
            work.wait()


def reporter_of(group: dist.ProcessGroup | None) -> FailureReporter:
    """Tells all ranks of the group's exchanges who is missing where one fails."""
    reporter = FailureReporter()
    reporter.grids = (RankGrid(group, None, group),)
    return reporter


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
