"""Launches the buckets' collectives, in the plan's order on every rank, and waits for them once.

A bucket that is ready early waits for its predecessors in the plan: ranks may see gradients in different orders, and
collectives of one group must be issued in one order. Nothing here blocks the host or the compute stream before
``wait``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .bucket import Bucket, Phase
from .collectives import InFlight, reduce_grads
from .timeline import Mark, Timeline

__all__ = ["BucketLauncher"]


class BucketLauncher:
    """The reduction of one iteration's gradients."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        *,
        sharded: bool,
        average_in_collective: bool,
        device: torch.device,
    ) -> None:
        self.collective = "reduce_scatter" if sharded else "all_reduce"
        self.timeline: Timeline | None = None
        self._buckets = buckets
        self._group = group
        self._sharded = sharded
        self._average_in_collective = average_in_collective
        self._device = device
        # Scaling and zeroing run here, so that the compute stream never stands behind them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next = 0
        self._in_flight: list[InFlight] = []
        self._ready_marks: dict[int, Mark] = {}

    def note_ready(self, bucket: Bucket) -> None:
        """The last contribution of ``bucket`` is in: launch it if its turn has come, and whoever waited behind it."""
        if self.timeline is not None:
            self._ready_marks[bucket.index] = self.timeline.mark()
        while self._next < len(self._buckets) and self._buckets[self._next].phase is Phase.READY:
            self._launch_next()

    def launch_rest(self) -> None:
        """Launch whatever is left, ready or not: unused parameters are zeros."""
        while self._next < len(self._buckets):
            self._launch_next()

    def wait(self) -> None:
        """Order the current stream (CUDA) or this thread (CPU) behind every launched collective."""
        for bucket, flight in zip(self._buckets, self._in_flight, strict=True):
            flight.wait()
            bucket.phase = Phase.REDUCED
        self._in_flight.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def reset(self) -> None:
        """Start a new iteration."""
        self._next = 0
        self._ready_marks.clear()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(f"maingrad::launch {self.collective} {bucket.name}"):
                self._launch(bucket)
        else:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.phase = Phase.REDUCING
        if self._stream is None:
            self._in_flight.append(self._reduce(bucket))
            return
        # Waiting for each stream as it is now covers every contribution that its hooks have reported.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for raw in bucket.streams:
            self._stream.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
        with torch.cuda.stream(self._stream):
            self._in_flight.append(self._reduce(bucket))

    def _reduce(self, bucket: Bucket) -> InFlight:
        for record in bucket.records:
            record.zero_unwritten()
        timeline = self.timeline
        if timeline is None:
            return self._start_collective(bucket)
        ready = self._ready_marks.pop(bucket.index, None) or timeline.mark()
        launched = timeline.mark()
        nbytes = bucket.grad_data.numel() * bucket.grad_data.element_size()
        flight = self._start_collective(bucket)
        return timeline.watch(bucket.name, self.collective, nbytes, ready, launched, flight)

    def _start_collective(self, bucket: Bucket) -> InFlight:
        return reduce_grads(
            bucket.grad_data,
            self._group,
            sharded=self._sharded,
            average_in_collective=self._average_in_collective,
        )
