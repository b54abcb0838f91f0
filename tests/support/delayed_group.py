"""A gloo group whose collectives take a given time, and which notes when each one really ran."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

__all__ = [
    "DELAY",
    "DELAYED",
    "CollectiveInterval",
    "DelayedGroup",
    "Delays",
    "Watched",
    "delayed_group",
    "new_groups_delayed",
]

DELAY = 0.1


class CollectiveInterval(NamedTuple):
    """One collective, in seconds of ``time.perf_counter``."""

    op: str
    """The process group's method."""
    numel: int
    """Elements of the larger of its two sides."""
    queued: float
    """When it was called."""
    start: float
    """When the group's thread took it up: from here on it sleeps, then communicates."""
    end: float


class DelayedGroup(dist.ProcessGroup):
    """Collectives of ``inner``, run one after another in one thread, each after ``delay`` seconds of sleep.

    Nothing is hidden in a queue of its own: like a NCCL stream, the thread takes up a collective when the one before it
    has ended. ``torch.distributed``'s functions see a gloo group. The few integers by which ranks compare their steps
    take no time and are not noted: tests time gradients and parameters.
    """

    def __init__(self, inner: dist.ProcessGroup, delay: float) -> None:
        super().__init__(inner.rank(), inner.size())
        self.delay = delay
        self.intervals: list[CollectiveInterval] = []
        self._inner = inner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-group")

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> "_Work":
        if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            return _Work(self._thread.submit(lambda: self._inner.allreduce(tensors, opts).wait()))
        return self._submit("allreduce", tensors[0].numel(), tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> "_Work":
        return self._submit("broadcast", tensors[0].numel(), tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> "_Work":
        return self._submit("allgather", sum(out.numel() for out in outputs[0]), outputs, inputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> "_Work":
        return self._submit("reduce_scatter_single", input.numel(), output, input, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> "_Work":
        return self._submit("all_gather_single", output.numel(), output, input, opts)

    # Their names before torch 2.13.
    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> "_Work":
        return self._submit("_reduce_scatter_base", input.numel(), output, input, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> "_Work":
        return self._submit("_allgather_base", output.numel(), output, input, opts)

    def barrier(self, opts: Any = None) -> "_Work":
        return self._submit("barrier", 0)

    def close(self) -> None:
        """Wait for what is under way and end the thread."""
        self._thread.shutdown(wait=True)

    def _submit(self, op: str, numel: int, *args: Any) -> "_Work":
        queued = time.perf_counter()
        collective = getattr(self._inner, op)

        def run() -> None:
            start = time.perf_counter()
            if self.delay:
                time.sleep(self.delay)
            collective(*args).wait()
            self.intervals.append(CollectiveInterval(op, numel, queued, start, time.perf_counter()))

        return _Work(self._thread.submit(run))


class _Work:
    """What the collectives return: complete when the thread has run them."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


@contextmanager
def delayed_group(delay: float, inner: dist.ProcessGroup | None = None) -> Iterator[DelayedGroup]:
    """A ``DelayedGroup`` over ``inner`` (the default group), known to ``torch.distributed`` within the block."""
    inner = inner or dist.group.WORLD
    assert inner is not None, "torch.distributed is initialised"
    group = DelayedGroup(inner, delay)
    registries: tuple[dict[Any, Any], ...] = (_world.pg_map, _world.pg_group_ranks, _world.pg_backend_config)
    for registry in registries:
        registry[group] = registry[inner]
    try:
        yield group
    finally:
        group.close()
        for registry in registries:
            registry.pop(group, None)


@contextmanager
def new_groups_delayed(delay: float) -> Iterator[list[DelayedGroup]]:
    """Groups that ``dist.new_group`` makes in here take ``delay`` seconds longer; the wrapper gathers on such a one."""
    made: list[DelayedGroup] = []
    plain = dist.new_group
    with ExitStack() as stack:

        def new_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
            made.append(stack.enter_context(delayed_group(delay, plain(*args, **kwargs))))
            return made[-1]

        dist.new_group = new_group
        try:
            yield made
        finally:
            dist.new_group = plain


class Delays(NamedTuple):
    """Seconds that everything takes longer, on this rank."""

    reduce: float
    gather: float
    compute: float


class Watched(NamedTuple):
    """What a run did, and how often each thing was delayed."""

    losses: list[float]
    weights: list[Tensor]
    reductions: int
    gathers: int
    computes: int
    seconds: float


DELAYED = {
    "gather": [Delays(0, DELAY, 0)] * 2,
    "reduce": [Delays(DELAY, 0, 0)] * 2,
    "compute": [Delays(0, 0, DELAY)] * 2,
    "each rank something else": [Delays(DELAY, 0, 0), Delays(0, DELAY, DELAY)],
}
"""By what is slow, for two ranks."""
