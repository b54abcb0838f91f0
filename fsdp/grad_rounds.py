"""The rounds of gradients: memory for what backward writes, reductions, and the end of an iteration.

A bucket goes round: memory is taken from the pool at the first write, the reduction is launched when backward has
passed the unit, and the memory goes back to the pool when somebody else needs it, or the iteration ends.
"""

from collections.abc import Mapping, Sequence

import torch

from ..ddp.bucket import Phase
from ..ddp.failure_report import FailureReporter
from ..ddp.iteration_checks import check_nothing_bypassed, check_nothing_pending
from ..ddp.launcher import BucketLauncher
from ..ddp.streams import current_stream
from .memory import Meter
from .sharded_bucket import ShardedBucket
from .unit import Unit

__all__ = ["GradRounds"]

GRAD_POOL_UNITS = 2
"""Units whose whole gradients have memory at once: the one that is being written, and reductions under way."""


class GradRounds:
    """The gradients of one model.

    buckets  those with gradients, connected, about in backward's order
    unit_of  each one's unit, by ``id``
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        unit_of: Mapping[int, Unit],
        failures: FailureReporter,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._unit_of = unit_of
        self._device = device
        self.meter = Meter()
        """Memory of whole gradients."""
        for bucket in buckets:
            bucket.grads.meter = self.meter
        self.launcher = BucketLauncher(
            [bucket.bucket for bucket in buckets if bucket.bucket is not None],
            [bucket.reduction for bucket in buckets],
            None,
            failures,
            device=device,
        )
        self.left_over = False
        """Some microbatches were not reduced over all ranks yet."""
        self._ended = False  # the iteration, in ``finish``; no round of the next one was launched
        self._holders: list[Unit] = []  # whose whole gradients have memory, as far as they come from the pool

    def begin(self) -> None:
        """A forward starts: after an iteration's end the memory of gradients that were cleared is not needed."""
        if self._ended:
            for bucket in self._buckets:
                bucket.reduction.shard.forget_cleared()

    def finish_grad_sync(self) -> None:
        """Reduce what is left of the iteration, and wait: then ``.grad`` of every shard is complete."""
        check_nothing_pending((record for bucket in self._buckets for record in bucket.records), "finish_grad_sync()")
        self.finish()

    def finish(self) -> None:
        """The same, where nothing is pending."""
        self._check_nothing_bypassed()
        if self.left_over:
            for bucket in self._buckets:
                if not self._was_cleared(bucket) and (bucket.accumulated or bucket.reduction.shard.has_partial):
                    self._launch(bucket, final=True, written=bucket.accumulated)
            self.left_over = False
        self._ended = True
        for bucket in self._buckets:
            self._settle(bucket)
            bucket.reduction.shard.publish()
        if self._device.type == "cuda" and any(bucket.shard.device != self._device for bucket in self._buckets):
            current_stream(self._device).synchronize()  # the optimizer reads gradients on the host

    def _check_nothing_bypassed(self) -> None:
        pairs = [entry for bucket in self._buckets for entry in zip(bucket.pairs, bucket.records, strict=True)]
        try:
            check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
        except RuntimeError:
            for pair, _ in pairs:
                pair.whole.grad = None
            raise

    def drop_what_was_cleared(self) -> None:
        """Whoever clears ``.grad`` in the middle of an iteration gives up what the iteration holds elsewhere."""
        for bucket in self._buckets:
            self._was_cleared(bucket)

    def _was_cleared(self, bucket: ShardedBucket) -> bool:
        cleared = bucket.reduction.shard.was_cleared
        if cleared:
            self._discard(bucket)
        return cleared

    def pass_bucket(self, bucket: ShardedBucket, *, final: bool) -> None:
        """All contributions of this backward are in."""
        bucket.awaits_delayed = False
        if bucket.keeps_grads and not final:
            bucket.accumulated = True
            bucket.reduction.shard.hold()
            self.left_over = True
        else:
            self._launch(bucket, final=final, written=True)

    def _launch(self, bucket: ShardedBucket, *, final: bool, written: bool) -> None:
        assert bucket.bucket is not None, "trainable"
        if bucket.bucket.phase is not Phase.ACCUMULATING:
            self.make_room(bucket)
        bucket.accumulated = self._ended = False
        bucket.reduction.final, bucket.reduction.written = final, written
        self.launcher.launch(bucket.bucket)

    def make_room(self, bucket: ShardedBucket) -> None:
        """Give a bucket's whole gradients memory; where a collective has it, wait for that first."""
        self._settle(bucket)
        assert bucket.bucket is not None, "trainable"
        if not bucket.grads.resident:
            self._take_from_pool(self._unit_of[id(bucket)], bucket)
            bucket.grads.take()
        if bucket.bucket.idle:
            bucket.bucket.phase = Phase.ACCUMULATING

    def _take_from_pool(self, unit: Unit, bucket: ShardedBucket) -> None:
        """Keep the number of units with whole gradients bounded: this one, and those that are being reduced.

        Units that are still being written are not waited for: their last gradient may come long after, or never.
        """
        if bucket.keeps_grads or unit in self._holders:
            return
        launched = [held for held in self._holders if _is_reduced(held)]
        for done in launched[: len(launched) - (GRAD_POOL_UNITS - 1)]:
            for other in done.buckets:
                self._settle(other)
        self._holders.append(unit)

    def _settle(self, bucket: ShardedBucket) -> None:
        """Wait for a bucket's reduction, if it was launched, and take its memory back."""
        if bucket.bucket is None or bucket.bucket.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        self.launcher.wait_for(bucket.bucket)
        home = bucket.grads.stream  # to which the memory returns
        if home is not None and home != current_stream(self._device):
            home.wait_stream(current_stream(self._device))
        bucket.bucket.reset()
        if not bucket.keeps_grads:
            bucket.grads.release()
            unit = self._unit_of[id(bucket)]
            if unit in self._holders and not any(b.trainable and b.grads.resident for b in unit.buckets):
                self._holders.remove(unit)

    def note_stream(self, bucket: ShardedBucket) -> None:
        """A gradient was written on the current stream."""
        if self._device.type == "cuda" and bucket.bucket is not None:
            bucket.bucket.streams.add(torch._C._cuda_getCurrentRawStream(self._device.index))

    @property
    def has_pending(self) -> bool:
        """Whether delayed weight gradients are missing."""
        return any(bucket.has_pending for bucket in self._buckets)

    def discard(self) -> None:
        """Give up what is not reduced; what is under way ends."""
        for bucket in self._buckets:
            self._discard(bucket)
        self._holders.clear()

    def _discard(self, bucket: ShardedBucket) -> None:
        self._settle(bucket)
        bucket.discard_grads()


def _is_reduced(unit: Unit) -> bool:
    """Whether no gradient of it is being written."""
    return all(
        bucket.bucket is None or bucket.bucket.phase in (Phase.REDUCING, Phase.REDUCED) or bucket.bucket.idle
        for bucket in unit.buckets
    )
