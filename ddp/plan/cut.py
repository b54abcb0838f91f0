"""Cuts a buffer into buckets: arithmetic on sizes, ranges and boxes.

``numels`` are element counts, of parameters or of rows of them, in the order in which backward reaches or completes
them.
"""

import bisect
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["PARAM_ALIGNMENT", "Box", "Range", "bucket_numel_for", "cut", "round_up"]

PARAM_ALIGNMENT = 64  # elements: 128 bytes of bf16, one cache line of parameters


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def cut(numels: Sequence[int], bucket_numel: int, least: Sequence[int] | None = None) -> list[int]:
    """The number of parameters in each bucket.

    A bucket is closed once it holds ``bucket_numel`` elements, and as many as each of its parameters needs. The last
    bucket takes in the buckets before it until it holds what it needs, or is the only one.

    least  elements that a bucket with this parameter needs, so that its shards are not mostly padding; None: any
    """
    counts: list[int] = []
    sizes: list[int] = []  # elements of each closed bucket
    count = held = need = 0
    for numel, own in zip(numels, least or [0] * len(numels), strict=True):
        count, held, need = count + 1, held + numel, max(need, own)
        if held >= bucket_numel and held >= need:
            counts.append(count)
            sizes.append(held)
            count = held = need = 0
    if count:
        while counts and held < need:  # a closed bucket has what it needs itself
            count, held = count + counts.pop(), held + sizes.pop()
        counts.append(count)
    return counts


def bucket_numel_for(sequences: Sequence[Sequence[int]], num_buckets: int) -> int:
    """The smallest bucket size at which all sequences of ``numels`` together make at most ``num_buckets`` buckets.

    sequences  none of them empty

    Where one bucket for each sequence is already more, each sequence gets one. The smallest size is the most even cut.
    """
    most = max(num_buckets, len(sequences))
    upper = 1 + max((sum(numels) for numels in sequences), default=0)  # at this size each sequence is one bucket
    # A larger size moves no cut forward, so that it never makes more buckets.
    return 1 + bisect.bisect_left(
        range(1, upper),
        True,
        key=lambda bucket_numel: sum(len(cut(numels, bucket_numel)) for numels in sequences) <= most,
    )


class Range(NamedTuple):
    """[start, end) of a flattened tensor's elements, or of its rows."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    def intersect(self, other: "Range") -> "Range":
        """The elements in both ranges; an empty range inside this one where there are none."""
        start = min(max(self.start, other.start), self.end)
        return Range(start, max(start, min(self.end, other.end)))

    def counted_from(self, origin: int) -> "Range":
        """The same elements, where element ``origin`` counts as 0."""
        return Range(self.start - origin, self.end - origin)


class Box(NamedTuple):
    """Elements [offset, offset + size) of a tensor along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Place behind the last element along each dim."""
        return tuple(map(operator.add, self.offsets, self.sizes))

    def intersect(self, other: "Box") -> "Box | None":
        """The elements that are in both boxes of one tensor; None: no element is."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(operator.sub, map(min, self.ends, other.ends), offsets))
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None

    def view_of(self, inner: "Box", data: Tensor) -> Tensor:
        """The elements of ``inner``, which is in this box, as a view of this box's elements ``data``."""
        starts, ends = (map(operator.sub, places, self.offsets) for places in (inner.offsets, inner.ends))
        return data[tuple(map(slice, starts, ends))]
