"""Launches the buckets' reductions, in the plan's order on every rank, and waits for them once.

A bucket that is ready early waits for its predecessors in the plan: ranks may see gradients in different orders, and
collectives of one group must be issued in one order. Nothing here blocks the host or the compute stream before
``wait``.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..collectives.failure_report import FailureReporter, Watch
from ..collectives.in_flight import InFlight
from ..collectives.observer import UNOBSERVED, Observer
from ..collectives.reduction import GradReduction
from ..collectives.streams import OnStream, current_stream
from ..torch_internals import is_profiling
from .bucket import Bucket, Phase
from .nan_check import NanCheck

__all__ = ["BucketLauncher"]


class BucketLauncher:
    """The reduction of one iteration's gradients.

    buckets     in launch order
    reductions  one for each of them
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reductions: Sequence[GradReduction],
        nan_check: NanCheck | None,
        failures: FailureReporter,
        *,
        device: torch.device,
    ) -> None:
        self.observer: Observer = UNOBSERVED
        self._buckets = buckets
        self._reductions = reductions
        self._nan_check = nan_check
        self._failures = failures
        self._device = device
        # Everything around a collective runs here, so that the compute stream never stands behind it. Where a bucket
        # takes several, the next bucket's first one runs beside this one's second.
        num_streams = max([1, *(reduction.num_collectives for reduction in reductions)])
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)] if device.type == "cuda" else []
        self._reduced = [torch.cuda.Event() for _ in buckets] if self._streams else []
        self._next = 0
        self._in_flight: dict[int, InFlight] = {}

    def __del__(self) -> None:
        # Let go while they run: freed memory returns to the stream it came from, which must not overtake a reduction.
        if vars(self).get("_reduced") and self._in_flight and not sys.is_finalizing():
            for index in self._in_flight:
                current_stream(self._device).wait_event(self._reduced[index])

    def note_ready(self, bucket: Bucket) -> None:
        """The last contribution of ``bucket`` is in: launch it if its turn has come, and whoever waited behind it."""
        self.observer.bucket_ready(bucket.name)
        while self._next < len(self._buckets) and self._buckets[self._next].phase is Phase.READY:
            self._launch_next()

    def launch_rest(self) -> None:
        """Launch whatever is left, ready or not: unused parameters are zeros."""
        while self._next < len(self._buckets):
            self._launch_next()

    def wait(self) -> None:
        """Order the current stream (CUDA) or this thread (CPU) behind every launched reduction."""
        for bucket in self._buckets:
            self.wait_for(bucket)

    def wait_for(self, bucket: Bucket) -> None:
        """The same for one bucket's."""
        flight = self._in_flight.get(bucket.index)
        if flight is None:
            return
        if self._reduced:
            order = partial(current_stream(self._device).wait_event, self._reduced[bucket.index])
            self.observer.wait(bucket.name, self._reductions[bucket.index].name, order)
        else:
            with self._watch(bucket):
                flight.wait()
        del self._in_flight[bucket.index]
        bucket.phase = Phase.REDUCED

    def reset(self) -> None:
        """Start a new iteration."""
        self._next = 0

    def launch(self, bucket: Bucket, start: Callable[[Tensor], InFlight] | None = None) -> None:
        """Launch this bucket now: whoever calls it knows that all ranks do so in one order.

        start  reduces the bucket's ``grad_data``; None: its reduction
        """
        start = start or self._reductions[bucket.index].start
        if is_profiling():
            reduction = self._reductions[bucket.index]
            with torch.profiler.record_function(f"maingrad::launch {reduction.name} {bucket.name}"):
                self._launch(bucket, start)
        else:
            self._launch(bucket, start)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self.launch(bucket)

    def _launch(self, bucket: Bucket, start: Callable[[Tensor], InFlight]) -> None:
        bucket.phase = Phase.REDUCING
        if not self._streams:
            with self._watch(bucket):
                self._in_flight[bucket.index] = self._reduce(bucket, start)
            return
        stream = self._streams[bucket.index % len(self._streams)]
        # Waiting for each stream as it is now covers every contribution that its hooks have reported.
        current = current_stream(self._device)
        stream.wait_stream(current)
        for raw in bucket.streams:
            if raw != current.cuda_stream:
                stream.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
        with OnStream(stream), self._watch(bucket):
            flight = self._reduce(bucket, start)
            flight.wait()  # orders this stream, and issues what follows the first collective
            self._reduced[bucket.index].record(stream)
        self._in_flight[bucket.index] = flight

    def _watch(self, bucket: Bucket) -> Watch:
        reduction = self._reductions[bucket.index]
        return self._failures.watch(reduction.name, bucket.name, len(bucket.records))

    def _reduce(self, bucket: Bucket, start: Callable[[Tensor], InFlight]) -> InFlight:
        for record in bucket.records:
            record.zero_unwritten()
        if self._nan_check is not None:
            self._nan_check.note(bucket)
        reduction = self._reductions[bucket.index]
        nbytes = partial(reduction.wire_nbytes, bucket.layout.numel, bucket.grad_data.dtype)
        return self.observer.launch(bucket.name, reduction.name, nbytes, partial(start, bucket.grad_data))
