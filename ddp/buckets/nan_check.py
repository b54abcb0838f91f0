"""Finds NaN and Inf in gradients before a reduction spreads them to other ranks.

The device notes the largest magnitude bucket by bucket, and the host reads the notes once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..collectives.failure_report import FailureReporter, gather
from ..collectives.rank_grid import RankGrid
from ..collectives.reduction import GradReduction
from .bucket import Bucket

__all__ = ["NanCheck", "unscale"]


class NanCheck:
    """The largest magnitude of every parameter's gradient on this rank, before the sum over ranks.

    reduction  its wire dtype and factor say which finite gradients would overflow on the wire: these count as bad too

    Costs one pass over the gradients, a sum of one integer over ranks, and a wait of the host in each iteration.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, reduction: GradReduction) -> None:
        self._names = [(record.name, bucket.name) for bucket in buckets for record in bucket.records]
        largest_sent = torch.finfo(reduction.wire_dtype or torch.float64).max
        self._bound = min(largest_sent / reduction.factor, torch.finfo(torch.float64).max)
        self._or_more = f", or more than {reduction.wire_dtype} can hold," if reduction.wire_dtype else ""
        # fp64 holds the values of every dtype. Parameters without elements stay 0.
        self._largest = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        parts = self._largest.split([len(bucket.records) for bucket in buckets])
        self._parts = {bucket.index: part for bucket, part in zip(buckets, parts, strict=True)}

    def note(self, bucket: Bucket) -> None:
        """Note the gradients of a bucket before its reduction, beside those of an earlier one in this iteration.

        Computes on the current stream.
        """
        grads = [_reals(record.view) for record in bucket.records]
        part, largest = self._parts[bucket.index], torch.stack(torch._foreach_norm(grads, torch.inf)).double()
        part.copy_(largest if bucket.carried is None else torch.maximum(part, largest))

    def raise_where_found(self, ranks: RankGrid, failures: FailureReporter) -> None:
        """After all buckets: raise ``FloatingPointError`` on every rank if one has a bad gradient; names the first."""
        bad = self._largest.le(self._bound).logical_not_()  # NaN compares as False
        count = bad.sum()
        with failures.watch("the search for NaN and Inf"):
            ranks.sum(count)
        (total,) = _read(count.unsqueeze(0))
        if not total:
            return
        # How many gradients are bad on this rank, and the first of them in launch order.
        mine = _read(torch.stack([bad.sum(), bad.byte().argmax()]))
        everyone = gather(mine, ranks.axes, failures, "the ranks' NaN and Inf")
        found = {rank: theirs for rank, theirs in everyone.items() if theirs[0]}
        rank, (_, first) = next(iter(found.items()))
        parameter, bucket = self._names[first]
        elsewhere = f"; {len(found)} ranks have such gradients" if len(found) > 1 else ""
        raise FloatingPointError(
            f"the gradient of parameter '{parameter}' holds NaN or Inf{self._or_more} on rank {rank}, before it was "
            f"reduced in {bucket}: the first of {total} such gradients over all ranks{elsewhere}. "
            f"The weights are as they were: call model.zero_grad() to go on without this iteration"
        )


def _reals(view: Tensor) -> Tensor:
    """A gradient's real numbers, at least one: the norm of no numbers is undefined."""
    if view.numel() == 0:
        return torch.zeros(1, device=view.device)
    return torch.view_as_real(view) if view.is_complex() else view


def _read(numbers: Tensor) -> list[int]:
    """Copy to the host: the only place where the host waits for the device."""
    values: list[int] = numbers.tolist()
    return values


def unscale(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply in place by ``inv_scale``; add to ``found_inf`` where a gradient has Inf or NaN. Both are 0-dim fp32."""
    by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)  # torch's kernel takes one dtype at a time
    for grad in grads:
        by_dtype[grad.dtype].append(grad)
    for dtype, alike in by_dtype.items():
        if dtype is torch.bfloat16:  # torch's kernel does not support bf16 on CUDA
            largest = torch.stack(torch._foreach_norm(alike, torch.inf)).amax()
            found_inf += largest.isfinite().logical_not_()
            torch._foreach_mul_(alike, inv_scale)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, inv_scale)
