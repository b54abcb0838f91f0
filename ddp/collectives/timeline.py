"""``Timeline``: recorded times of forwards, backwards, collectives and waits, which show what really overlapped.

On a CPU the clock is the host's, and a collective ends when a thread that waits for it returns. On CUDA times are
events on the communication and compute streams; ``close`` turns all events into seconds at once.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from .in_flight import InFlight
from .rank_grid import RankGrid, backends_of

__all__ = [
    "UNOBSERVED",
    "BackwardSpan",
    "BucketSpan",
    "ForwardSpan",
    "GatherSpan",
    "Mark",
    "Observer",
    "PhaseSpan",
    "Timeline",
    "WaitSpan",
    "recorded_on",
]


class Observer:
    """Forwards, backwards, reductions and gathers report to it. This one ignores all reports; ``Timeline`` records."""

    recording = False
    """Whether ``backward_started`` must be called under wrappers that need no hook for it otherwise."""

    def forward_started(self) -> None:
        """A forward of the wrapper begins. Forwards may nest."""

    def forward_ended(self) -> None:
        """The innermost running forward ended, or raised."""

    def backward_started(self) -> None:
        """The outermost backward reached the wrapper's outputs."""

    def backward_ended(self, synced: bool) -> None:
        """The outermost backward ended. synced: it ran outside ``no_sync``."""

    def bucket_ready(self, bucket: str) -> None:
        """The last contribution to a bucket's gradients is in."""

    def launch(
        self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
    ) -> InFlight:
        """Launch a collective by calling ``start``; returns its handle.

        collective  its name: ``all_gather`` gathers parameters, every other collective reduces gradients
        nbytes      returns the bytes of the bucket on the wire
        """
        return start()

    def wait(self, bucket: str, collective: str, order: Callable[[], object]) -> None:
        """Order the current stream behind a collective by calling ``order``."""
        order()


UNOBSERVED = Observer()
Span = TypeVar("Span")


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
    """Bytes of the whole bucket: the shards of all ranks."""
    launched: float
    finished: float


class WaitSpan(NamedTuple):
    """A wait of the compute stream (CUDA) or of the caller (CPU) for a bucket's collective."""

    bucket: str
    collective: str
    start: float
    end: float


class PhaseSpan(NamedTuple):
    """A named stretch of time on the compute stream, such as a drain of delayed weight gradients."""

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
    """Records spans inside ``DistributedDataParallel.record_timeline()``; read them after the block.

    forwards   one span for each forward
    backwards  one span for each backward
    buckets    one span for each reduction, in launch order
    gathers    one span for each gather of parameters, in launch order
    waits      one span for each wait for a collective
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
        self._recorded: list[tuple[list[Any], Callable[..., Any], tuple[Any, ...]]] = []
        """Each span's list, its class, and its fields, with marks in place of seconds."""
        self._forward_starts: list[Mark] = []  # of the running forwards, outermost first
        self._backward_start: Mark | None = None
        self._ready: dict[str, Mark] = {}  # by name of a bucket that is ready and not launched
        # gloo's work objects do not say when they ended: a thread waits for them in launch order. Collectives of
        # simulated ranks run on the ranks' own threads, and end when somebody waits.
        self._watcher = ThreadPoolExecutor(max_workers=1) if collectives_have_threads else None

    def mark(self) -> Mark:
        """The present time."""
        return Mark(self._device)

    def forward_started(self) -> None:
        self._forward_starts.append(self.mark())

    def forward_ended(self) -> None:
        if self._forward_starts:
            start = self._forward_starts.pop()
            if not self._forward_starts:
                self._record(self.forwards, ForwardSpan, start, self.mark())

    def backward_started(self) -> None:
        self._backward_start = self.mark()

    def backward_ended(self, synced: bool) -> None:
        if self._backward_start is not None:
            self._record(self.backwards, BackwardSpan, self._backward_start, self.mark(), synced)
            self._backward_start = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as one span."""
        start = self.mark()
        yield
        self._record(self.phases, PhaseSpan, name, start, self.mark())

    def bucket_ready(self, bucket: str) -> None:
        self._ready[bucket] = self.mark()

    def launch(
        self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
    ) -> InFlight:
        launched = self.mark()
        ready = self._ready.pop(bucket, launched)
        flight = start()
        finished: Mark | Callable[[], Mark]
        if flight.work is None:  # a world of one: nothing was launched
            finished = launched
        elif self._device.type == "cuda":
            flight.work.wait()  # the communication stream, which is current here, waits; the host does not
            finished = self.mark()
        else:
            ended = partial(self._wait_for, flight.work)
            end = finished = cache(ended) if self._watcher is None else self._watcher.submit(ended).result
            flight = InFlight(_NotedWork(lambda: self.wait(bucket, collective, end)), flight.tensors)
        name = "none" if flight.work is None else collective
        if collective == "all_gather":
            self._record(self.gathers, GatherSpan, bucket, name, nbytes(), launched, finished)
        else:
            self._record(self.buckets, BucketSpan, bucket, name, nbytes(), ready, launched, finished)
        return flight

    def wait(self, bucket: str, collective: str, order: Callable[[], object]) -> None:
        start = self.mark()
        order()
        self._record(self.waits, WaitSpan, bucket, collective, start, self.mark())

    def close(self) -> None:
        """Turn marks into seconds. Waits for collectives under way; a collective that failed gets no span.

        What is waited for after it is no more in ``waits``.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._watcher is not None:
            self._watcher.shutdown(wait=True)
        for spans, kind, fields in self._recorded:
            # The caller that needs the result of a failed collective gets its error; here it would hide that one.
            with suppress(RuntimeError):
                spans.append(kind(*map(self._in_seconds, fields)))
        self._recorded.clear()

    def _record(self, spans: list[Span], kind: Callable[..., Span], *fields: Any) -> None:
        self._recorded.append((spans, kind, fields))

    def _in_seconds(self, field: Any) -> Any:
        mark = field() if callable(field) else field
        return mark.since(self._origin) if isinstance(mark, Mark) else mark

    def _wait_for(self, work: Any) -> Mark:
        work.wait()
        return self.mark()


class _Observed(Protocol):
    observer: Observer


@contextmanager
def recorded_on(observed: _Observed, device: torch.device, grids: Iterable[RankGrid]) -> Iterator[Timeline]:
    """Make a ``Timeline`` the observer of ``observed`` inside the block; read the timeline after the block."""
    on_gloo = "gloo" in backends_of((group for grid in grids for group in grid.axes), device)
    timeline = Timeline(device, collectives_have_threads=on_gloo)
    observed.observer = timeline
    try:
        yield timeline
    finally:
        observed.observer = UNOBSERVED
        timeline.close()


class _NotedWork(NamedTuple):
    """A work object that records each wait for it."""

    wait: Callable[[], None]
