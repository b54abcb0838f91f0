"""The bound on the bytes of whole gradients: which reductions must end before a bucket takes memory."""

from collections.abc import Sequence

from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

__all__ = ["GradPool", "pool_limit"]


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes that are enough to write a unit's gradients while an equal unit's gradients are being reduced.

    sizes  bytes of the unit's buckets

    That is sum + max(largest bucket, sum / 2): twice the unit for one bucket, one and a half times the unit for several
    buckets of at most half the unit. The first of several buckets are reduced before the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


class GradPool:
    """Bounds the bytes of whole gradients that are written or being reduced. The outermost unit does not count.

    units  the outermost first
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.launched: list[ShardedBucket] = []
        """Buckets whose memory is used by a reduction, in the order of launches."""
        self._outermost = units[0]
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        limits = [pool_limit([bucket.grads.nbytes for bucket in _pooled(unit)]) for unit in units[1:]]
        self._limit = max(limits, default=0)

    def must_end_before(self, bucket: ShardedBucket) -> list[ShardedBucket]:
        """The reductions, the oldest first, that must end before ``bucket`` takes memory.

        Counted are the buckets that are being reduced, and the buckets of the same unit that have memory. Other units
        that are still being written are not counted: a wait for them might never end. No wait is needed for the
        outermost unit, whose gradients come first or after most activations are freed, nor for buckets that always
        have memory.
        """
        unit = self._unit_of[id(bucket)]
        if unit is self._outermost or bucket.whole_grads_at_rest:
            return []
        launched = {id(other) for other in self.launched}
        taken = bucket.grads.nbytes + sum(other.grads.nbytes for other in self.launched)
        for other in _pooled(unit):
            if other is not bucket and other.grads.resident and id(other) not in launched:
                taken += other.grads.nbytes
        waits: list[ShardedBucket] = []
        for oldest in self.launched:
            if taken <= self._limit:
                break
            taken -= oldest.grads.nbytes
            waits.append(oldest)
        return waits


def _pooled(unit: Unit) -> list[ShardedBucket]:
    return [bucket for bucket in unit.buckets if bucket.trainable and not bucket.whole_grads_at_rest]
