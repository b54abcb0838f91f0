"""Cuts a buffer into buckets, and deals whole parameters to the shards of a bucket: arithmetic on sizes and ranges.

``numels`` are parameters' element counts, in the order in which backward reaches the parameters. ``degree`` is the
number of shards where each parameter lies whole in one shard, and 1 where shard borders may cut parameters.
"""

import bisect
import heapq
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PARAM_ALIGNMENT", "Range", "bucket_numel_for", "cut", "deal", "round_up", "stack_whole"]

PARAM_ALIGNMENT = 64  # elements: 128 bytes of bf16, one cache line of parameters


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def cut(numels: Sequence[int], bucket_numel: int, degree: int = 1) -> list[int]:
    """The number of parameters in each bucket.

    A bucket is closed once it holds ``bucket_numel`` elements and ``degree`` times its largest parameter. With fewer
    elements its shards would be mostly padding, since each shard is as long as the largest parameter. The last bucket
    takes in the buckets before it until it holds ``degree`` times its largest parameter, or is the only one.
    """
    counts: list[int] = []
    sizes: list[int] = []  # elements of each closed bucket
    peaks: list[int] = []  # largest parameter of each closed bucket
    count = held = peak = 0
    for numel in numels:
        count, held, peak = count + 1, held + numel, max(peak, numel)
        if held >= bucket_numel and held >= degree * peak:
            counts.append(count)
            sizes.append(held)
            peaks.append(peak)
            count = held = peak = 0
    if count:
        while counts and held < degree * peak:
            count, held, peak = count + counts.pop(), held + sizes.pop(), max(peak, peaks.pop())
        counts.append(count)
    return counts


def bucket_numel_for(sequences: Sequence[Sequence[int]], num_buckets: int) -> int:
    """The smallest bucket size at which all sequences of ``numels`` together make at most ``num_buckets`` buckets.

    Where one bucket for each sequence is already more, each sequence gets one. The smallest size is the most even cut.
    """
    most = max(num_buckets, sum(1 for numels in sequences if numels))
    upper = 1 + max((sum(numels) for numels in sequences), default=0)  # at this size each sequence is one bucket
    # A larger size moves no cut forward, so that it never makes more buckets.
    return 1 + bisect.bisect_left(
        range(1, upper),
        True,
        key=lambda bucket_numel: sum(len(cut(numels, bucket_numel)) for numels in sequences) <= most,
    )


def deal(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Deal one bucket's parameters to shards of about equal length; returns the shard of each parameter.

    sizes  elements of each parameter, alignment included
    loads  elements that each rank has of earlier buckets; one entry for each shard

    Parameters are dealt from the largest down, each to the pile that is lowest so far. Then the highest pile goes to
    the rank with the smallest load. The highest pile exceeds the mean by at most (1 - 1/shards) times the largest
    parameter. Ties go to the first parameter, pile and rank, so that every rank computes the same result.
    """
    degree = len(loads)
    piles = [(0, pile) for pile in range(degree)]  # a heap of heights
    pile_of = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        height, pile_of[index] = piles[0]
        heapq.heapreplace(piles, (height + sizes[index], pile_of[index]))
    highest_first = [pile for _, pile in sorted(piles, key=lambda entry: (-entry[0], entry[1]))]
    least_loaded_first = sorted(range(degree), key=loads.__getitem__)
    rank_of = dict(zip(highest_first, least_loaded_first, strict=True))
    return [rank_of[pile] for pile in pile_of]


def stack_whole(numels: Sequence[int], loads: list[int], multiple: int) -> tuple[list[int], int]:
    """Lay each parameter into one shard; returns parameters' starts in the bucket, and the elements of a shard.

    numels    elements of each parameter
    loads     elements that each rank has of earlier buckets; this function adds this bucket's
    multiple  a shard's length is a multiple of this; if 64 divides it, parameters start at multiples of 64 elements
    """
    sizes = [round_up(numel, PARAM_ALIGNMENT) for numel in numels]
    shards = deal(sizes, loads)
    fill = [0] * len(loads)
    offsets = []
    for size, shard in zip(sizes, shards, strict=True):
        offsets.append(fill[shard])
        fill[shard] += size
    for shard, size in enumerate(fill):
        loads[shard] += size
    shard_numel = max(round_up(max(fill), multiple), multiple)
    return [shard * shard_numel + offset for shard, offset in zip(shards, offsets, strict=True)], shard_numel


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
