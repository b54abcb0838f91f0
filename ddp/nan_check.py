"""Finds NaN and Inf in gradients before they spread: noted on the device bucket by bucket, read by the host once."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket
from .grad_record import GradRecord
from .rank_grid import RankGrid

__all__ = ["NanCheck"]


class NanCheck:
    """The largest magnitude of every parameter's gradient on this rank, before it is summed with the others'.

    Costs one pass over the gradients, and one wait of the host in each ``finish_grad_sync``.
    """

    def __init__(self, records: Sequence[GradRecord], device: torch.device) -> None:
        self._place = {id(record): index for index, record in enumerate(records)}
        self._records = records
        # [rank, largest magnitude of each parameter's gradient]; fp64 holds whatever a gradient is made of.
        self._found = torch.zeros(1 + len(records), dtype=torch.float64, device=device)
        self._found[0] = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def note(self, bucket: Bucket) -> None:
        """Look at a bucket that is about to be reduced, on the current stream."""
        views = [record.view for record in bucket.records if record.view.numel()]
        if not views:
            return
        real = [torch.view_as_real(view) if view.is_complex() else view for view in views]
        places = [1 + self._place[id(record)] for record in bucket.records if record.view.numel()]
        # A bucket's records follow each other.
        largest = torch.stack(torch._foreach_norm(real, torch.inf)).double()
        for (start, end), part in _consecutive(places, largest):
            self._found[start:end] = part

    def raise_where_found(self, buckets: Sequence[Bucket], ranks: RankGrid) -> None:
        """After all buckets: raise ``FloatingPointError`` on every rank, naming rank, bucket and parameter."""
        rows = self._found.unsqueeze(0)
        for group in ranks.axes:
            gathered = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(gathered, rows, group=group)
            rows = torch.cat(gathered)
        bad = rows.isfinite().logical_not_().nonzero().tolist()  # the host waits here
        if not bad:
            return
        row, column = bad[0]
        record = self._records[column - 1]
        bucket = next(bucket for bucket in buckets if bucket.index == record.bucket_index)
        raise FloatingPointError(
            f"the gradient of parameter '{record.name}' holds NaN or Inf on rank {int(rows[row, 0])}, before it was "
            f"reduced in {bucket.name}; {len(bad)} such gradients over all ranks and parameters. The weights are as "
            f"they were: call zero_grad_buffer() to go on without this iteration"
        )


def _consecutive(places: list[int], values: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    """Runs of consecutive places, each with its part of ``values``."""
    runs, first = [], 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            runs.append(((places[first], places[index - 1] + 1), values[first:index]))
            first = index
    return runs
