"""Process groups that may be None, and collectives as handles that hold their tensors.

A process group of None means a world of one: every collective is the identity.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals import start_all_gather
from .world import WorldOfOne, check_not_launched

__all__ = [
    "InFlight",
    "all_gather_shards",
    "backend_of",
    "device_types_of",
    "group_or_default",
    "group_rank",
    "group_size",
    "in_stages",
    "sum_over_group",
]


class InFlight(NamedTuple):
    """A collective under way. Its tensors stay alive because this refers to them, not through ``record_stream``."""

    work: Any
    """``torch.distributed.Work`` or ``_Stages``, or None where there was nothing to do."""
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Order the current stream (CUDA) or the calling thread (CPU) behind the collective."""
        if self.work is not None:
            self.work.wait()


def in_stages(stages: Iterator[Any], tensors: tuple[Tensor, ...]) -> InFlight:
    """Start collectives of which each needs the one before: ``stages`` yields each one's work and goes on after it.

    The first is started now, the rest in ``wait``: at once on a CUDA stream, which is all that waits.
    """
    first = next(stages, _OVER)
    return InFlight(None if first is _OVER else _Stages(first, stages), tensors)


_OVER = object()


class _Stages:
    """Looks like one ``Work``. A stage may have None for a work: it is done, and the next one follows."""

    def __init__(self, work: Any, rest: Iterator[Any]) -> None:
        self._work = work
        self._rest = rest

    def wait(self) -> None:
        while self._work is not _OVER:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._rest, _OVER)


def group_or_default(
    group: dist.ProcessGroup | WorldOfOne | None, option: str = "process_group"
) -> dist.ProcessGroup | None:
    """``group``; for None the default group. None for a world of one: asked for, or without ``torch.distributed``.

    Raises ``ValueError`` for None where there is no default group and a launcher has started several ranks.

    option  what ``group`` is called where the user gave it
    """
    if isinstance(group, WorldOfOne):
        return None
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    check_not_launched(option)
    return None


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 without a group."""
    return 1 if group is None else group.size()


def device_types_of(group: dist.ProcessGroup) -> list[str]:
    """The kinds of devices whose tensors the group takes; none where it takes all kinds."""
    config = str(dist.get_backend_config(group))
    return [entry.split(":")[0] for entry in config.split(",") if ":" in entry]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves this kind of device: a group may have one for each."""
    config = str(dist.get_backend_config(group))
    by_device = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    return by_device.get(device.type, config)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 without a group."""
    return 0 if group is None else group.rank()


def all_gather_shards(flat: Tensor, group: dist.ProcessGroup | None, *, on_stream: bool = False) -> InFlight:
    """Fill ``flat`` [n] with every rank's shard [n / size], in place and asynchronously; mine already lies in it.

    on_stream  CUDA: on the current stream, which is then a side stream of the caller's
    """
    size = group_size(group)
    if group is None or size == 1:
        return InFlight(None, (flat,))
    shard = flat.view(size, -1)[group_rank(group)]
    return InFlight(start_all_gather(flat, shard, group, on_stream=on_stream), (flat, shard))


def sum_over_group(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a small tensor over the group, in place, ordered with the current stream; returns it."""
    if group is not None and group.size() > 1:
        with torch.no_grad():
            dist.all_reduce(value, group=group)
    return value
