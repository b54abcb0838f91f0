"""``InFlight``: a collective as a handle that holds its tensors."""

import atexit
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..torch_internals.distributed import start_all_gather
from .rank_grid import group_rank, group_size

__all__ = [
    "InFlight",
    "all_gather_shards",
    "finished",
    "in_stages",
]


class InFlight(NamedTuple):
    """A collective under way. This reference keeps its tensors alive; ``record_stream`` is not needed."""

    work: Any
    """``torch.distributed.Work`` or ``_Stages``; None in a world of one."""
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Order the current stream (CUDA) or the calling thread (CPU) behind the collective."""
        if self.work is not None:
            self.work.wait()


def in_stages(stages: Iterator[Any], tensors: tuple[Tensor, ...]) -> InFlight:
    """Start a chain of collectives. ``stages`` starts one, yields its work, and is resumed when that work is done.

    The first collective starts now, the others in ``wait``. On CUDA ``wait`` returns at once: only the stream waits.
    """
    first = next(stages, _OVER)
    return InFlight(None if first is _OVER else _Stages(first, stages), tensors)


def finished(stages: Generator[Any, None, Tensor]) -> Tensor:
    """What a chain of collectives returns: start one after the other, and wait for each on the host or stream."""
    results: list[Tensor] = []

    def kept() -> Iterator[Any]:
        results.append((yield from stages))

    in_stages(kept(), ()).wait()
    return results[0]


_OVER = object()


class _Stages:
    """A chain of collectives with the interface of one ``Work``. A stage that is done already yields None."""

    def __init__(self, work: Any, rest: Iterator[Any]) -> None:
        self._work = work
        self._rest = rest

    def wait(self) -> None:
        while self._work is not _OVER:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._rest, _OVER)


def all_gather_shards(flat: Tensor, group: dist.ProcessGroup | None, *, on_stream: bool = False) -> InFlight:
    """Start an all-gather in place: ``flat`` [n] holds this rank's shard [n / size] and gets all others.

    on_stream  NCCL runs on the current CUDA stream, which is a side stream of the caller's
    """
    size = group_size(group)
    if group is None or size == 1:
        return InFlight(None, (flat,))
    shard = flat.view(size, -1)[group_rank(group)]
    return InFlight(start_all_gather(flat, shard, group, on_stream=on_stream), (flat, shard))


@atexit.register
def _let_gloo_finish() -> None:
    """Let gloo's threads release the tensors of the last collectives while the interpreter still runs.

    A thread of gloo releases a collective's tensors after it has woken who waits, and takes the interpreter's lock for
    that. In an interpreter that ends, whoever takes the lock aborts the process (pytorch/pytorch#190489). Torch joins
    these threads with the group, which objects of this library keep alive past ``destroy_process_group``.
    """
    deadline = time.monotonic() + 10
    threads = [each for each in Path("/proc/self/task").glob("*/stat") if _GLOO in _text(each)]
    while threads and time.monotonic() < deadline:
        time.sleep(0.001)  # without the lock: a thread that waits for the lock gets it now
        if not any(f"{_GLOO} R" in _text(each) for each in threads):  # none runs
            break


_GLOO = "(pt_gloo_runloop)"


def _text(stat: Path) -> str:
    try:
        return stat.read_text()
    except OSError:  # the thread has ended
        return ""
