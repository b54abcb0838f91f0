"""Recorded times of backwards and of bucket collectives: what really overlapped, not what was meant to.

On a CPU the clock is the host's, and a collective ends when the thread that waits for it says so. On CUDA the marks are
events on the communication and compute streams, resolved once at the end.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .collectives import InFlight

__all__ = ["BackwardSpan", "BucketSpan", "Mark", "PhaseSpan", "Timeline"]


class BackwardSpan(NamedTuple):
    """One backward pass through the wrapper, in seconds since the recording began."""

    start: float
    end: float
    synced: bool
    """Whether gradients were reduced with it (outside ``no_sync``)."""


class BucketSpan(NamedTuple):
    """One bucket's collective, in seconds since the recording began."""

    bucket: str
    collective: str
    """``all_reduce``, ``reduce_scatter``, or ``none`` in a world of one."""
    nbytes: int
    ready: float
    launched: float
    finished: float


class PhaseSpan(NamedTuple):
    """A named stretch of the compute stream, such as a drain of delayed weight gradients."""

    name: str
    start: float
    end: float


class Mark:
    """A point in time: the host's clock, or an event on the CUDA stream that was current."""

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter()
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def since(self, origin: "Mark") -> float:
        if self.event is None:
            return self.host - origin.host
        return float(origin.event.elapsed_time(self.event)) * 1e-3


class Timeline:
    """Collects spans while ``DistributedDataParallel.record_timeline()`` is active; readable after it.

    backwards  one span for each backward
    buckets    one span for each collective, in launch order
    phases     one span for each ``phase`` block
    """

    def __init__(self, device: torch.device, *, collectives_have_threads: bool) -> None:
        self.backwards: list[BackwardSpan] = []
        self.buckets: list[BucketSpan] = []
        self.phases: list[PhaseSpan] = []
        self._device = device
        self._origin = Mark(device)
        self._backwards: list[tuple[Mark, Mark, bool]] = []
        self._buckets: list[tuple[str, str, int, Mark, Mark, Callable[[], Mark]]] = []
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._backward_start: Mark | None = None
        # Waits for collectives in launch order, since gloo's work objects cannot say when they ended. Where collectives
        # run on the ranks' own threads (simulated ranks) they end when somebody waits.
        self._watcher = ThreadPoolExecutor(max_workers=1) if collectives_have_threads else None

    def mark(self) -> Mark:
        """Now."""
        return Mark(self._device)

    def backward_started(self) -> None:
        """The outermost backward reached the wrapper's outputs."""
        self._backward_start = self.mark()

    def backward_ended(self, synced: bool) -> None:
        """The outermost backward ended."""
        if self._backward_start is not None:
            self._backwards.append((self._backward_start, self.mark(), synced))
            self._backward_start = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what runs in here as one span."""
        start = self.mark()
        yield
        self._phases.append((name, start, self.mark()))

    def watch(
        self, bucket: str, collective: str, nbytes: int, ready: Mark, launched: Mark, flight: InFlight
    ) -> InFlight:
        """Record one launched collective; the handle to wait for is the one returned."""
        if flight.work is None:
            self._buckets.append((bucket, "none", nbytes, ready, launched, lambda: launched))
            return flight
        if self._device.type == "cuda":
            flight.work.wait()  # orders the communication stream, which is current here, not the host
            finished = self.mark()
            self._buckets.append((bucket, collective, nbytes, ready, launched, lambda: finished))
            return flight
        waited = _WaitedWork(flight.work, self.mark, self._watcher)
        self._buckets.append((bucket, collective, nbytes, ready, launched, waited.finished))
        return InFlight(waited, flight.tensors)

    def close(self) -> None:
        """Turn marks into seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._watcher is not None:
            self._watcher.shutdown(wait=True)
        for start, end, synced in self._backwards:
            self.backwards.append(BackwardSpan(start.since(self._origin), end.since(self._origin), synced))
        for name, start, end in self._phases:
            self.phases.append(PhaseSpan(name, start.since(self._origin), end.since(self._origin)))
        for bucket, collective, nbytes, ready, launched, finished in self._buckets:
            times = (mark.since(self._origin) for mark in (ready, launched, finished()))
            self.buckets.append(BucketSpan(bucket, collective, nbytes, *times))
        self._backwards.clear()
        self._phases.clear()
        self._buckets.clear()


class _WaitedWork:
    """A work object that notes when its wait ended: in the watcher's thread, or in the first caller's."""

    def __init__(self, work: Any, mark: Callable[[], Mark], watcher: ThreadPoolExecutor | None) -> None:
        self._work = work
        self._mark = mark
        self._finished: Mark | None = None
        self._future: Future[Mark] | None = None if watcher is None else watcher.submit(self._wait_for_work)

    def _wait_for_work(self) -> Mark:
        self._work.wait()
        return self._mark()

    def wait(self) -> None:
        if self._finished is None:
            self._finished = self._wait_for_work() if self._future is None else self._future.result()

    def finished(self) -> Mark:
        self.wait()
        assert self._finished is not None, "wait() notes the time"
        return self._finished
