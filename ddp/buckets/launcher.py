"""Launches the buckets' reductions in the plan's order, and waits for them at the end.

All ranks must issue the collectives of a group in one order, but may see gradients in different orders. So a ready
bucket waits for its predecessors in the plan. Nothing blocks the host or the compute stream before
``wait``.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..collectives.failure_report import FailureReporter, Watch
from ..collectives.in_flight import InFlight
from ..collectives.reduction import GradReduction
from ..collectives.streams import OnStream, communication_stream, current_stream
from ..collectives.timeline import UNOBSERVED, Observer
from ..torch_internals import is_profiling
from .bucket import Bucket, Phase
from .nan_check import NanCheck

__all__ = ["BucketLauncher"]


class BucketLauncher:
    """The reduction of one iteration's gradients.

    buckets     in launch order
    reductions  one for each bucket, in the same order
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
        # Reductions run on streams of their own, so that the compute stream never waits for a collective. Where a
        # reduction has two collectives, a bucket's second one runs beside the next bucket's first one.
        num_streams = max([1, *(reduction.num_collectives for reduction in reductions)])
        self.waits_launch_nothing = device.type == "cuda" or num_streams == 1
        """False on CPUs where reductions have two collectives: a wait begins the second one, so all ranks wait in one
        order."""
        streams = [communication_stream(device) for _ in range(num_streams)]
        self._streams = [stream for stream in streams if stream is not None]
        self._reduced = [torch.cuda.Event() for _ in buckets] if self._streams else []
        self._next = 0
        self._all_came = False  # no backward of the iteration is to come: only delayed gradients hold buckets back
        self._in_flight: dict[int, InFlight] = {}
        self._carried: dict[int, tuple[Tensor, Tensor]] = {}
        self._waited_on: dict[int, torch.cuda.Stream] = {}  # in a backward, or a drain: other streams are still to wait

    def __del__(self) -> None:
        # The launcher may die while reductions run. Freed memory returns to the stream that allocated it, and this
        # stream must not reuse the memory before the reduction has ended.
        if vars(self).get("_reduced") and self._in_flight and not sys.is_finalizing():
            for index in self._in_flight:
                current_stream(self._device).wait_event(self._reduced[index])

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """CUDA: a stream of reductions. Small collectives behind them run here too, so that groups keep one order."""
        return self._streams[0] if self._streams else None

    def on_bucket_ready(self, bucket: Bucket) -> None:
        """``bucket`` is ready: launch every ready bucket whose turn has come."""
        self.observer.bucket_ready(bucket.name)
        self.launch_ready()

    def on_backward_over(self) -> None:
        """A backward is over, perhaps the iteration's last: parameters that it has not reached are unused.

        Launched here, all ranks' reductions come before whatever collectives the program issues next.
        """
        self._all_came = True
        self.launch_ready()

    def launch_ready(self) -> None:
        """Launch every bucket whose turn has come, and which waits for nothing: a delayed gradient was computed."""
        while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
            self._launch_next()

    def _is_ready(self, bucket: Bucket) -> bool:
        return bucket.phase is Phase.READY or (self._all_came and not any(record.pending for record in bucket.records))

    def launch_rest(self) -> None:
        """Launch all buckets that are left, ready or not. Gradients of unused parameters are zeros."""
        while self._next < len(self._buckets):
            self._launch_next()

    def wait(self) -> None:
        """Make the current stream (CUDA) or this thread (CPU) wait for every launched reduction."""
        for bucket in self._buckets:
            self.wait_for(bucket)

    def wait_for(self, bucket: Bucket) -> None:
        """Wait, as ``wait`` does, for one bucket's reduction."""
        flight = self._in_flight.get(bucket.index)
        if flight is None:
            waited = self._waited_on.pop(bucket.index, None)
            if waited is not None and waited != (current := current_stream(self._device)):
                current.wait_stream(waited)
            return
        if self._reduced:
            order = partial(current_stream(self._device).wait_event, self._reduced[bucket.index])
            self.observer.wait(bucket.name, self._reductions[bucket.index].name, order)
        else:
            with self._watch(bucket):
                flight.wait()
        del self._in_flight[bucket.index]
        bucket.end_reduction()
        if bucket.index in self._carried:
            owned, reduced_before = self._carried.pop(bucket.index)
            owned.add_(reduced_before)

    def wait_for_all_but(self, num_latest: int) -> None:
        """Wait, as ``wait`` does, for the oldest reductions under way.

        Nothing is done where waits begin second collectives: ranks come here at different times.
        """
        if self.waits_launch_nothing:
            for index in list(self._in_flight)[:-num_latest]:
                self.wait_for(self._buckets[index])
                if self._streams:
                    self._waited_on[index] = current_stream(self._device)

    def carry(self) -> None:
        """The iteration goes on after its reductions: add what they gave after the next ones."""
        self._carried = {bucket.index: (bucket.reduced, bucket.reduced.clone()) for bucket in self._buckets}

    def reset(self, *, forget: bool = True) -> None:
        """Launch all buckets again: in a new iteration, or in one that goes on (not ``forget``)."""
        self.wait()  # on this stream, where another one has waited
        self._next = 0
        self._all_came = False
        if forget:
            self._carried.clear()

    def forget(self) -> None:
        """A capture has failed: what was launched in it has not run. On CPUs it has, and is waited for."""
        self._waited_on.clear()
        for bucket in self._buckets:
            flight = self._in_flight.pop(bucket.index, None)
            if flight is not None and not self._streams:
                flight.wait()
            if bucket.phase is Phase.REDUCING:
                bucket.phase = Phase.REDUCED

    def launch(self, bucket: Bucket, start: Callable[[Tensor], InFlight] | None = None) -> None:
        """Launch this bucket now. The caller makes sure that all ranks launch in one order.

        start  reduces the bucket's ``grad_data``; None: the bucket's own reduction
        """
        start = start or bucket.start_of(self._reductions[bucket.index])
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
        # Step 6 of docs/by_hand.py: the reduction starts, and backward goes on.
        bucket.begin_reduction()
        if not self._streams:
            with self._watch(bucket):
                self._in_flight[bucket.index] = self._reduce(bucket, start)
            return
        stream = self._streams[bucket.index % len(self._streams)]
        # Every contribution that a hook has reported is already queued on one of these streams.
        current = current_stream(self._device)
        stream.wait_stream(current)
        for raw in bucket.streams:
            if raw != current.cuda_stream:
                stream.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
        with OnStream(stream), self._watch(bucket):
            flight = self._reduce(bucket, start)
            flight.wait()  # makes this stream wait, and issues the collectives after the first one
            self._reduced[bucket.index].record(stream)
        self._in_flight[bucket.index] = flight

    def _watch(self, bucket: Bucket) -> Watch:
        reduction = self._reductions[bucket.index]
        return self._failures.watch(reduction.name, bucket.name)

    def _reduce(self, bucket: Bucket, start: Callable[[Tensor], InFlight]) -> InFlight:
        for record in bucket.records:
            record.zero_unwritten()
        if self._nan_check is not None:
            self._nan_check.note(bucket, again=bucket.index in self._carried)
        reduction = self._reductions[bucket.index]
        nbytes = partial(reduction.wire_nbytes, bucket.layout.numel, bucket.grad_data.dtype)
        return self.observer.launch(bucket.name, reduction.name, nbytes, partial(start, bucket.grad_data))
