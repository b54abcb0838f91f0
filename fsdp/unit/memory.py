"""The bound on the bytes of whole gradients that are written or reduced, from sizes alone."""

from collections.abc import Sequence

__all__ = ["num_to_end", "pool_limit"]


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes that are enough to write a unit's gradients while an equal unit's gradients are being reduced.

    sizes  bytes of the unit's buckets

    That is sum + max(largest bucket, sum / 2): twice the unit for one bucket, one and a half times the unit for several
    buckets of at most half the unit. The first of several buckets are reduced before the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


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
