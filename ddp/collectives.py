"""The collectives of gradient reduction and parameter gathering, as handles that hold their tensors.

A process group of None means a world of one without ``torch.distributed``: every collective is the identity.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.compat import all_gather_single, reduce_scatter_single

__all__ = [
    "InFlight",
    "all_gather_shards",
    "group_or_default",
    "group_rank",
    "group_size",
    "reduce_grads",
    "sum_over_group",
]


class InFlight(NamedTuple):
    """A collective under way. Its tensors stay alive because this refers to them, not through ``record_stream``."""

    work: Any
    """``torch.distributed.Work``, or None where there was nothing to do."""
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Order the current stream (CUDA) or the calling thread (CPU) behind the collective."""
        if self.work is not None:
            self.work.wait()


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``; for None the default group, or None still where ``torch.distributed`` is not in use."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 without a group."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 without a group."""
    return 0 if group is None else group.rank()


def reduce_grads(
    grads: Tensor, group: dist.ProcessGroup | None, *, sharded: bool, average_in_collective: bool
) -> InFlight:
    """Average ``grads`` [n] over the group, in place and asynchronously.

    sharded                reduce-scatter: rank r's result is elements [r n/size, (r+1) n/size), the rest is undefined;
                           otherwise all-reduce: every rank gets all of it
    average_in_collective  the collective divides (NCCL); otherwise each rank divides its own gradients before it
    """
    size = group_size(group)
    if group is None or size == 1:
        return InFlight(None, (grads,))
    op = dist.ReduceOp.AVG if average_in_collective else dist.ReduceOp.SUM
    if not average_in_collective:
        grads.mul_(1.0 / size)
    if not sharded:
        return InFlight(dist.all_reduce(grads, op=op, group=group, async_op=True), (grads,))
    shard = grads.view(size, -1)[group_rank(group)]
    return InFlight(reduce_scatter_single(shard, grads, op=op, group=group, async_op=True), (grads, shard))


def all_gather_shards(flat: Tensor, group: dist.ProcessGroup | None) -> InFlight:
    """Fill ``flat`` [n] with every rank's shard [n / size], in place and asynchronously; mine already lies in it."""
    size = group_size(group)
    if group is None or size == 1:
        return InFlight(None, (flat,))
    shard = flat.view(size, -1)[group_rank(group)]
    return InFlight(all_gather_single(flat, shard, group=group, async_op=True), (flat, shard))


def sum_over_group(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a small tensor over the group, in place, ordered with the current stream; returns it."""
    if group is not None and group.size() > 1:
        with torch.no_grad():
            dist.all_reduce(value, group=group)
    return value
