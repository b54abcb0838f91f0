"""How many bytes of whole gradients there are at once: what a bucket that takes memory has to wait for."""

from collections.abc import Sequence

from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

__all__ = ["GradPool", "pool_limit"]


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes in which a unit of such buckets can be written while the one before, as large, is being reduced.

    That is twice its own, or where it has several buckets one and a half times, if none is larger than half of it: the
    first are reduced by the time that the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


class GradPool:
    """The bound on what is written and what is being reduced, beside what the outermost unit writes.

    units  the outermost first
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.launched: list[ShardedBucket] = []
        """Those whose memory a reduction has, in the order in which they were launched."""
        self._outermost = units[0]
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        limits = [pool_limit([bucket.grads.nbytes for bucket in _pooled(unit)]) for unit in units[1:]]
        self._limit = max(limits, default=0)

    def must_end_before(self, bucket: ShardedBucket) -> list[ShardedBucket]:
        """The reductions, the oldest first, that have to end before ``bucket`` adds to what the pool holds.

        What counts is what is being reduced, and what the bucket's own unit has. Other units that are still being
        written do not: their last gradient may come long after, or never. Nobody waits to write the outermost unit's,
        which come when activations have gone, or before anything is reduced, nor what has its memory for good.
        """
        unit = self._unit_of[id(bucket)]
        if unit is self._outermost or bucket.whole_grads_at_rest:
            return []
        launched = {id(other) for other in self.launched}
        held = bucket.grads.nbytes + sum(other.grads.nbytes for other in self.launched)
        for other in _pooled(unit):
            if other is not bucket and other.grads.resident and id(other) not in launched:
                held += other.grads.nbytes
        waits: list[ShardedBucket] = []
        for oldest in self.launched:
            if held <= self._limit:
                break
            held -= oldest.grads.nbytes
            waits.append(oldest)
        return waits


def _pooled(unit: Unit) -> list[ShardedBucket]:
    return [bucket for bucket in unit.buckets if bucket.trainable and not bucket.whole_grads_at_rest]
