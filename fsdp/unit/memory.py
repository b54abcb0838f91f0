"""The bound on the bytes of whole gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bucket import ShardedBucket

__all__ = ["GradPool", "num_to_end", "pool_limit"]


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes that are enough to write a unit's gradients while an equal unit's gradients are being reduced.

    sizes  bytes of the unit's buckets

    That is sum + max(largest bucket, sum / 2): twice the unit for one bucket, one and a half times the unit for several
    buckets of at most half the unit. The first of several buckets are reduced before the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


class GradPool:
    """Bounds the memory of whole gradients that are written or reduced, in the units that it was made for.

    units  of each unit the buckets, perhaps none
    """

    def __init__(self, units: "Sequence[Sequence[ShardedBucket]]") -> None:
        self._beside = {bucket: buckets for buckets in units for bucket in buckets}
        self._limit = max(
            (pool_limit([bucket.whole_grads.nbytes for bucket in buckets]) for buckets in units), default=0
        )
        self._launched: list[ShardedBucket] = []  # whose memory a reduction uses, in the order of launches

    def to_end_before(self, bucket: "ShardedBucket") -> "Sequence[ShardedBucket]":
        """Return the buckets whose reductions must end before this one takes memory, the oldest first."""
        if bucket not in self._beside:
            return ()
        written = bucket.whole_grads.nbytes
        for other in self._beside[bucket]:
            if other is not bucket and other.whole_grads.resident and other not in self._launched:
                written += other.whole_grads.nbytes
        return self._launched[: num_to_end(written, [each.whole_grads.nbytes for each in self._launched], self._limit)]

    def launched(self, bucket: "ShardedBucket") -> None:
        """A reduction uses the bucket's memory."""
        if bucket.is_pooled:
            self._launched.append(bucket)

    def ended(self, bucket: "ShardedBucket") -> None:
        """The reduction has ended, if one was launched."""
        if bucket in self._launched:
            self._launched.remove(bucket)


def num_to_end(written: int, launched: Sequence[int], limit: int) -> int:
    """Number of launched reductions, the oldest first, that must end before a bucket takes memory.

    written   bytes of the bucket, and of the buckets of its unit that have memory and are not launched. Other units
              that are still being written do not count: a wait for them might never end
    launched  bytes of each bucket whose memory a reduction uses, the oldest first
    limit     bytes that ``written`` and ``launched`` may have together
    """
    taken = written + sum(launched)
    for count, nbytes in enumerate(launched):
        if taken <= limit:
            return count
        taken -= nbytes
    return len(launched)
