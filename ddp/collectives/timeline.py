"""Recorded times of forwards, backwards and collectives: what really overlapped, not what was meant to.

On a CPU the clock is the host's, and a collective ends when the thread that waits for it says so. On CUDA the marks are
events on the communication and compute streams, resolved once at the end.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .in_flight import InFlight, backend_of
from .observer import UNOBSERVED, Observer
from .rank_grid import RankGrid

__all__ = [
    "BackwardSpan",
    "BucketSpan",
    "ForwardSpan",
    "GatherSpan",
    "Mark",
    "PhaseSpan",
    "Timeline",
    "WaitSpan",
    "recorded_on",
]


class BackwardSpan(NamedTuple):
    """One backward pass through the wrapper, in seconds since the recording began."""

    start: float
    end: float
    synced: bool
    """Whether gradients were reduced with it (outside ``no_sync``)."""


class ForwardSpan(NamedTuple):
    """One forward pass through the wrapper, in seconds since the recording began."""

    start: float
    end: float


class BucketSpan(NamedTuple):
    """One reduction of a bucket's gradients, in seconds since the recording began."""

    bucket: str
    collective: str
    """``all_reduce``, ``reduce_scatter``, or ``none`` in a world of one."""
    nbytes: int
    ready: float
    launched: float
    finished: float


class GatherSpan(NamedTuple):
    """One gather of a bucket's parameters, in seconds since the recording began."""

    bucket: str
    collective: str
    """``all_gather``, or ``none`` in a world of one."""
    nbytes: int
    """Of the whole bucket, all ranks' shards."""
    launched: float
    finished: float


class WaitSpan(NamedTuple):
    """A stretch in which the compute stream (CUDA) or the caller (CPU) stood still for a bucket's collective."""

    bucket: str
    collective: str
    start: float
    end: float


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


class Timeline(Observer):
    """Collects spans while ``DistributedDataParallel.record_timeline()`` is active; readable after it.

    forwards   one span for each forward
    backwards  one span for each backward
    buckets    one span for each reduction, in launch order
    gathers    one span for each gather of parameters, in launch order
    waits      one span for each wait for a collective; what it hid is what ran and did not wait
    phases     one span for each ``phase`` block
    """

    recording = True

    def __init__(self, device: torch.device, *, collectives_have_threads: bool) -> None:
        self.forwards: list[ForwardSpan] = []
        self.backwards: list[BackwardSpan] = []
        self.buckets: list[BucketSpan] = []
        self.gathers: list[GatherSpan] = []
        self.waits: list[WaitSpan] = []
        self.phases: list[PhaseSpan] = []
        self._device = device
        self._origin = Mark(device)
        self._forwards: list[tuple[Mark, Mark]] = []
        self._backwards: list[tuple[Mark, Mark, bool]] = []
        self._collectives: list[_Collective] = []
        self._waits: list[tuple[str, str, Mark, Mark]] = []
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._forward_starts: list[Mark] = []  # of the forwards that run now, one inside the other
        self._backward_start: Mark | None = None
        self._ready: dict[str, Mark] = {}  # buckets whose gradients are in, and not launched yet
        self._closed = False
        # Waits for collectives in launch order, since gloo's work objects cannot say when they ended. Where collectives
        # run on the ranks' own threads (simulated ranks) they end when somebody waits.
        self._watcher = ThreadPoolExecutor(max_workers=1) if collectives_have_threads else None

    def mark(self) -> Mark:
        """Now."""
        return Mark(self._device)

    def forward_started(self) -> None:
        self._forward_starts.append(self.mark())

    def forward_ended(self) -> None:
        if self._forward_starts:
            start = self._forward_starts.pop()
            if not self._forward_starts:
                self._forwards.append((start, self.mark()))

    def backward_started(self) -> None:
        self._backward_start = self.mark()

    def backward_ended(self, synced: bool) -> None:
        if self._backward_start is not None:
            self._backwards.append((self._backward_start, self.mark(), synced))
            self._backward_start = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what runs in here as one span."""
        start = self.mark()
        yield
        self._phases.append((name, start, self.mark()))

    def bucket_ready(self, bucket: str) -> None:
        self._ready[bucket] = self.mark()

    def launch(
        self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
    ) -> InFlight:
        launched = self.mark()
        ready = self._ready.pop(bucket, launched)
        flight = start()
        finished: Callable[[], Mark]
        alone = flight.work is None
        if alone:
            finished = partial(_given, launched)
        elif self._device.type == "cuda":
            flight.work.wait()  # orders the communication stream, which is current here, not the host
            finished = partial(_given, self.mark())
        else:
            work = _WaitedWork(flight.work, self.mark, self._watcher)
            finished = work.finished
            flight = InFlight(_NotedWork(work, bucket, collective, self), flight.tensors)
        self._collectives.append(_Collective(bucket, collective, alone, nbytes(), ready, launched, finished))
        return flight

    def wait(self, bucket: str, collective: str, order: Callable[[], None]) -> None:
        start = self.mark()
        order()
        if not self._closed:  # a handle may be waited for after the recording
            self._waits.append((bucket, collective, start, self.mark()))

    def close(self) -> None:
        """Turn marks into seconds. A collective that is still under way is waited for; one that failed has no span."""
        self._closed = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._watcher is not None:
            self._watcher.shutdown(wait=True)
        since = self._since_origin
        self.forwards += [ForwardSpan(since(start), since(end)) for start, end in self._forwards]
        self.backwards += [BackwardSpan(since(start), since(end), synced) for start, end, synced in self._backwards]
        self.waits += [WaitSpan(name, kind, since(start), since(end)) for name, kind, start, end in self._waits]
        self.phases += [PhaseSpan(name, since(start), since(end)) for name, start, end in self._phases]
        for one in self._collectives:
            try:
                finished = since(one.finished())
            except RuntimeError:  # raised for whoever needs the result; here it would stand in front of that error
                continue
            name, launched = "none" if one.alone else one.collective, since(one.launched)
            if one.collective == "all_gather":
                self.gathers.append(GatherSpan(one.bucket, name, one.nbytes, launched, finished))
            else:
                self.buckets.append(BucketSpan(one.bucket, name, one.nbytes, since(one.ready), launched, finished))
        for marks in (self._forwards, self._backwards, self._collectives, self._waits, self._phases):
            marks.clear()

    def _since_origin(self, mark: Mark) -> float:
        return mark.since(self._origin)


class _Collective(NamedTuple):
    bucket: str
    collective: str
    alone: bool
    """Nothing was launched: a world of one."""
    nbytes: int
    ready: Mark
    launched: Mark
    finished: Callable[[], Mark]


class _Observed(Protocol):
    observer: Observer


@contextmanager
def recorded_on(observed: _Observed, device: torch.device, grids: Iterable[RankGrid]) -> Iterator[Timeline]:
    """Record what ``observed`` does for as long as the block runs; the timeline can be read after that."""
    on_gloo = any(backend_of(group, device) == "gloo" for grid in grids for group in grid.axes)
    timeline = Timeline(device, collectives_have_threads=on_gloo)
    observed.observer = timeline
    try:
        yield timeline
    finally:
        observed.observer = UNOBSERVED
        timeline.close()


def _given(mark: Mark) -> Mark:
    return mark


class _NotedWork:
    """A work object that notes who waited for it, and how long."""

    def __init__(self, work: Any, bucket: str, collective: str, timeline: Timeline) -> None:
        self._work = work
        self._bucket = bucket
        self._collective = collective
        self._timeline = timeline

    def wait(self) -> None:
        self._timeline.wait(self._bucket, self._collective, self._work.wait)


class _WaitedWork:
    """A work object that notes when it ended: in the watcher's thread, or in the first caller's."""

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
