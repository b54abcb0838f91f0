"""``Capacity``: each rank sends the same number of rows for each expert, so the host need not know how many there are.

::

    rows of the sender      expert 0: a b c       expert 1: d              (R, sorted by expert)
    slots, 2 per expert               a b                   d -            c is dropped, - holds anything
    received                sender 0: a b d -     sender 1: ...            (equal parts)
    rows of the experts     a b (of sender 1 ...) d (of sender 1 ...) - -  (E slots, the empty ones last)

Legend: C slots for the rows of a sender for one expert; E, R, ep as in ``transport.py``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..moe_permutation import RowIdMap, row_id_map
from .all_to_all import Collective, to_experts, to_senders
from .transport import Meanwhile

__all__ = ["Capacity", "Slots"]


class Slots(NamedTuple):
    """Where the rows of one ``send`` are."""

    rows: Tensor
    """[E C] int64: the row in each slot; any row, in an empty one."""
    slots: Tensor
    """[R] int64: the slot of each row; any slot, for a row without one."""
    has_none: Tensor
    """[R] bool: rows without a slot."""
    sorting: RowIdMap
    """Empty slots are last."""


class Capacity(Collective):
    """See ``TokenTransport``. Shapes depend on no routing: nothing waits for the host, and a CUDA graph may hold it.

    capacity  C. Further rows for an expert are dropped, as if their ids were E
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"TokenDispatcher: capacity={capacity} rows of a rank for an expert")
        super().__init__(num_experts, group)
        self.capacity = capacity
        self.num_received = num_experts * capacity
        """S."""
        self.num_dropped: Tensor | None = None
        """int64 on the device: rows that this rank has dropped since the first ``send``, recomputes included."""

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: Slots | None = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, Slots]:
        """See ``TokenTransport``."""
        route = self._route(tensors[0].shape[0], counts) if sent is None else sent
        travelling = [
            tensor.index_select(0, route.rows) if len(tensor) else tensor.new_zeros(len(route.rows), *tensor.shape[1:])
            for tensor in tensors
        ]
        arrived = self._exchange(travelling, meanwhile)
        return [to_experts(tensor, route.sorting) for tensor in arrived], route.sorting.splits, route

    def send_back(self, tensors: Sequence[Tensor], sent: Slots, meanwhile: Meanwhile = None) -> list[Tensor]:
        """See ``TokenTransport``."""
        arrived = self._exchange([to_senders(tensor, sent.sorting) for tensor in tensors], meanwhile)
        # Zeros by choice and not by a product, which would make NaN of the Inf in an empty slot.
        return [
            tensor.index_select(0, sent.slots).masked_fill_(sent.has_none.view(-1, *[1] * (tensor.dim() - 1)), 0)
            for tensor in arrived
        ]

    def _route(self, num_rows: int, counts: Tensor) -> Slots:
        places = torch.arange(self.capacity, device=counts.device)
        kept = counts.clamp(max=self.capacity)
        if self.num_dropped is None:
            self.num_dropped = torch.zeros_like(counts[0])
        self.num_dropped += counts.sum() - kept.sum()
        ends = counts.cumsum(0)
        begins = ends - counts
        rows = (begins[:, None] + places).clamp_(max=num_rows - 1)
        row = torch.arange(num_rows, device=counts.device)
        expert = torch.searchsorted(ends, row, right=True)  # E for rows that go nowhere
        known = expert.clamp(max=self.num_experts - 1)
        place = row - begins[known]
        has_none = (expert == self.num_experts) | (place >= self.capacity)
        slots = known * self.capacity + place.clamp(max=self.capacity - 1)
        (from_ranks,) = self._exchange([kept])
        experts = torch.arange(self.num_local, device=counts.device).expand(from_ranks.numel() // self.num_local, -1)
        is_filled = places < from_ranks.view_as(experts)[..., None]
        ids = torch.where(is_filled, experts[..., None], self.num_local)
        return Slots(rows.view(-1), slots, has_none, row_id_map(ids.view(-1, 1), self.num_local))
