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
from ..ddp.streams import OnStream, current_stream
from .grad_pool import GradPool
from .memory import Meter
from .sharded_bucket import ShardedBucket
from .unit import Unit

__all__ = ["GradRounds"]


class GradRounds:
    """The gradients of one model.

    units    of the model, the outermost first
    buckets  those with gradients, connected, about in backward's order
    unit_of  each one's unit, by ``id``
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[ShardedBucket],
        unit_of: Mapping[int, Unit],
        failures: FailureReporter,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
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
        self._broken = False  # a reduction was refused, perhaps outside backward: nobody else gives the iteration up
        self._home: torch.cuda.Stream | None = None  # of forwards: sums take their memory there and give it back there
        self._pool = GradPool(units, unit_of)

    def begin(self) -> None:
        """A forward starts: after an iteration's end the memory of gradients that were cleared is not needed."""
        if self._device.type == "cuda":
            home = current_stream(self._device)
            if self._home is not None and self._home != home:
                self._home.wait_stream(home)  # before it uses again what is let go here
            self._home = home
        if self._broken:
            self._broken = False
            self.discard()
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
        self._settle_all()
        for bucket in self._buckets:
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
        shard = bucket.reduction.shard
        cleared = shard.was_cleared or (bucket.awaits_delayed and shard.is_cleared)
        if cleared:
            self._discard(bucket)
        return cleared

    def await_delayed(self, bucket: ShardedBucket) -> None:
        """Backward has passed, and delayed weight gradients are missing."""
        bucket.awaits_delayed = self.left_over = True
        if bucket.reduction.shard.is_cleared:
            bucket.reduction.shard.hold()  # so that giving them up is seen

    def pass_bucket(self, bucket: ShardedBucket, *, final: bool) -> None:
        """All contributions of this backward are in."""
        bucket.awaits_delayed = False
        if bucket.holds_grads and not final:
            bucket.accumulated = True
            bucket.reduction.shard.hold()
            self.left_over = True
        else:
            self._launch(bucket, final=final, written=True)

    def _launch(self, bucket: ShardedBucket, *, final: bool, written: bool) -> None:
        assert bucket.bucket is not None, "trainable"
        if bucket.bucket.phase is not Phase.ACCUMULATING:
            self.make_room(bucket)
        if bucket.accumulated:
            self._make_way(bucket)  # its memory comes into the pool
        bucket.accumulated = self._ended = False
        bucket.reduction.final, bucket.reduction.written = final, written
        self._broken = True
        bucket.reduction.keeps_total = self._claim(bucket)
        self.launcher.launch(bucket.bucket)
        self._broken = False
        if not bucket.keeps_grads:
            self._pool.launched.append(bucket)

    def _claim(self, bucket: ShardedBucket) -> bool:
        """Have memory for the sums, of the stream whose activations get it next."""
        home = self._home
        if home is None or home == current_stream(self._device):
            return bucket.reduction.shard.claim()
        assert bucket.bucket is not None, "trainable"
        bucket.bucket.streams.add(home.cuda_stream)  # the reduction waits for it
        with OnStream(home):
            return bucket.reduction.shard.claim()

    def make_room(self, bucket: ShardedBucket) -> None:
        """Give a bucket's whole gradients memory; where a collective has it, wait for that first."""
        self._settle(bucket)
        assert bucket.bucket is not None, "trainable"
        if not bucket.grads.resident:
            self._make_way(bucket)
            bucket.grads.take()
        if bucket.bucket.idle:
            bucket.bucket.phase = Phase.ACCUMULATING

    def _make_way(self, bucket: ShardedBucket) -> None:
        """Wait for as many reductions as keep the pool bounded."""
        for other in self._pool.in_the_way(bucket):
            self._settle(other)

    def _settle_all(self) -> None:
        """Wait for reductions as they were launched: how many the pool has waited for may differ between ranks, and
        without streams the collective across instances begins in the wait."""
        for bucket in [*self._pool.launched, *self._buckets]:
            self._settle(bucket)

    def _settle(self, bucket: ShardedBucket) -> None:
        """Wait for a bucket's reduction, if it was launched, and take its memory back."""
        if bucket.bucket is None or bucket.bucket.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        self.launcher.wait_for(bucket.bucket)
        home = bucket.grads.stream  # to which the memory returns
        if home is not None and home != current_stream(self._device):
            home.wait_stream(current_stream(self._device))
        bucket.bucket.reset()
        if bucket in self._pool.launched:
            self._pool.launched.remove(bucket)
        if not bucket.keeps_grads:
            bucket.grads.release()

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
        self._settle_all()
        for bucket in self._buckets:
            self._discard(bucket)

    def _discard(self, bucket: ShardedBucket) -> None:
        self._settle(bucket)
        bucket.discard_grads()
