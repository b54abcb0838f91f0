"""Where a buffer is cut into buckets, and which shard of a bucket a whole parameter goes to: arithmetic on sizes.

A *run* is a list of parameters' element counts in the order in which backward reaches them. ``degree`` is the number of
shards where parameters lie whole in one of them, and 1 where shards may cut through parameters.
"""

import bisect
import heapq
from collections.abc import Sequence

__all__ = ["PARAM_ALIGNMENT", "bucket_numel_for", "cut", "deal", "round_up", "stack_whole"]

PARAM_ALIGNMENT = 64  # elements: 128 bytes of bf16, one cache line of parameters


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def cut(run: Sequence[int], bucket_numel: int, degree: int = 1) -> list[int]:
    """How many parameters each bucket takes.

    A bucket is closed once it holds ``bucket_numel`` elements, and ``degree`` times its largest parameter: with fewer,
    shards would be mostly padding, since each is as long as that parameter. The last bucket takes in those before it
    until that is true of it as well, or there is only one.
    """
    counts: list[int] = []
    sizes: list[int] = []  # elements in each closed bucket
    peaks: list[int] = []  # its largest parameter
    count = held = peak = 0
    for numel in run:
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


def bucket_numel_for(runs: Sequence[Sequence[int]], num_buckets: int) -> int:
    """The smallest bucket size at which these runs make at most ``num_buckets`` buckets.

    Where even one bucket for each run is more, they get one each. The smallest size is the most even cut.
    """
    most = max(num_buckets, sum(1 for run in runs if run))
    upper = 1 + max((sum(run) for run in runs), default=0)  # never reached: one bucket for each run
    # A larger size moves every cut back or leaves it, so the number of buckets never grows with it.
    return 1 + bisect.bisect_left(
        range(1, upper), True, key=lambda bucket_numel: sum(len(cut(run, bucket_numel)) for run in runs) <= most
    )


def deal(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The shard of each parameter of one bucket, such that shards come out about equally long.

    sizes  elements that each parameter takes up
    loads  elements that each rank already has of earlier buckets; one entry for each shard

    Parameters are dealt from the largest down, each to the pile that is lowest so far; the highest pile then goes to
    the rank with the smallest load. The highest pile is at most (1 - 1/shards) times the largest parameter above the
    mean. Ties go to the first parameter, pile and rank, so that every rank computes the same.
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
    """Each parameter in one shard: their starts from the bucket's start, and the elements of a shard.

    numels    elements of each parameter
    loads     elements that each rank already has of earlier buckets; those of this one are added
    multiple  elements that a shard's length is a multiple of; parameters start at multiples of 64 where it is one
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
