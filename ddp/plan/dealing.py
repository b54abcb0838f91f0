"""Deals whole parameters to ranks: little padding first, then equal work of the optimizer, over all buckets.

All shards of a bucket have one length, so that a rank with fewer elements than another has padding, which every step
sends. The cost of a parameter is the work of its update, for a matrix that of Muon's iterations. With 2 ranks::

    matrices as backward reaches them    A a B b A a B b A      A and B larger than a and b
    rows                                 AA  aa  BB  bb         one for each rank: no padding, and equal costs
    rest                                 A                      dealt with as many rows of small ones as fill the gaps

Each function is a pure one of sizes and costs, and ties go to the first parameter and rank: all ranks agree.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...kernels.optimizer.orthogonal.flops import orthogonalize_flops
from .cut import PARAM_ALIGNMENT, cut, round_up

__all__ = ["Whole", "deal", "rows_of", "stack_whole", "update_cost"]

_PADDING = 0.01
"""Padding of the rest, as a fraction of all elements, above which rows are dealt with it."""
_MAX_TRIES = 100
"""Rows that are tried: each costs a dealing of the rest."""


class Whole(NamedTuple):
    """A parameter that lies in one shard."""

    numel: int
    cost: float


def update_cost(shape: Sequence[int]) -> float:
    """The work of an update: FLOPs of Muon's iterations for matrices [.., rows, columns], elements for vectors."""
    if len(shape) < 2:
        return float(shape[0] if shape else 1)
    return math.prod(shape[:-2]) * orthogonalize_flops(*shape[-2:])


def rows_of(params: Sequence[Whole], bucket_numel: int, degree: int) -> list[list[int]]:
    """Indices of parameters that are reduced together: rows, and the rest in as few buckets as its padding asks for.

    They come in the order in which backward completes them. Rows are not joined to buckets of ``bucket_numel`` elements
    yet; the rest's are.
    """
    rows: list[list[int]] = []
    open_rows: dict[Whole, list[int]] = {}
    for index, param in enumerate(params):
        row = open_rows.setdefault(param, [])
        row.append(index)
        if len(row) == degree:
            rows.append(open_rows.pop(param))
    rest = [index for row in open_rows.values() for index in row]
    if rest:
        rest = _filled(params, rest, rows, degree)
        rows += _parts(params, rest, bucket_numel, degree)
    return sorted(rows, key=lambda row: row[-1])


def _filled(params: Sequence[Whole], rest: list[int], rows: list[list[int]], degree: int) -> list[int]:
    """The rest with rows that fill its gaps, which leave ``rows``: the smallest first, of one size the last first."""
    allowed = _PADDING * sum(param.numel for param in params)
    padding = _padding((params[index].numel for index in rest), degree)
    largest = max(params[index].numel for index in rest)
    smaller = [row for row in reversed(rows) if params[row[0]].numel < largest]
    for row in sorted(smaller, key=lambda row: params[row[0]].numel)[:_MAX_TRIES]:
        if padding <= allowed:
            break
        filled = _padding((params[index].numel for index in rest + row), degree)
        if filled < padding:
            rows.remove(row)
            rest, padding = rest + row, filled
    return sorted(rest)


def _parts(params: Sequence[Whole], rest: list[int], bucket_numel: int, degree: int) -> list[list[int]]:
    """The rest in several buckets, if that costs little padding more than one."""
    numels = [params[index].numel for index in rest]
    parts, first = [], 0
    for count in cut(numels, bucket_numel, [degree * numel for numel in numels]):
        parts.append(rest[first : first + count])
        first += count
    paddings = (_padding((params[index].numel for index in part), degree) for part in parts)
    more = sum(paddings) - _padding(numels, degree)
    return parts if more <= _PADDING * sum(param.numel for param in params) else [rest]


def _padding(numels: Iterable[int], degree: int) -> int:
    """Elements of padding in a bucket of whole parameters."""
    sizes = [round_up(numel, PARAM_ALIGNMENT) for numel in numels]
    return degree * max(_piles(sizes, degree)[1]) - sum(sizes)


def _piles(sizes: Sequence[int], degree: int) -> tuple[list[int], list[int]]:
    """The pile of each parameter, and the heights of piles: from the largest down, each to the lowest pile.

    The highest pile exceeds the mean by at most (1 - 1/piles) times the largest parameter.
    """
    lowest = [(0, pile) for pile in range(degree)]  # a heap of heights
    pile_of, heights = [0] * len(sizes), [0] * degree
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        height, pile = lowest[0]
        pile_of[index], heights[pile] = pile, height + sizes[index]
        heapq.heapreplace(lowest, (heights[pile], pile))
    return pile_of, heights


def deal(sizes: Sequence[int], costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Deal one bucket's parameters to shards; returns the shard of each parameter.

    sizes  elements of each parameter, alignment included
    costs  cost of each parameter
    loads  costs that each rank has of other buckets; one entry for each shard

    Piles of about equal height give the shortest shard. Within its length parameters are dealt again, the costliest
    first, each to the rank with the smallest load that has room. Where one finds no room, the piles stay, and the
    costliest goes to the rank with the smallest load.
    """
    degree = len(loads)
    pile_of, heights = _piles(sizes, degree)
    longest = max(heights)
    rank_of, room = [0] * len(sizes), [longest] * degree
    ranks = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ranks)
    for index in sorted(range(len(sizes)), key=lambda index: (-costs[index], -sizes[index])):
        full = []
        while ranks and room[ranks[0][1]] < sizes[index]:
            full.append(heapq.heappop(ranks))
        if not ranks:
            return _by_piles(pile_of, costs, loads)
        load, rank = ranks[0]
        rank_of[index] = rank
        room[rank] -= sizes[index]
        heapq.heapreplace(ranks, (load + costs[index], rank))
        for entry in full:
            heapq.heappush(ranks, entry)
    return rank_of


def _by_piles(pile_of: Sequence[int], costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """The shard of each parameter: a pile goes to one rank, the costliest to the rank with the smallest load."""
    totals = [0.0] * len(loads)
    for pile, cost in zip(pile_of, costs, strict=True):
        totals[pile] += cost
    costliest_first = sorted(range(len(loads)), key=lambda pile: -totals[pile])
    least_loaded_first = sorted(range(len(loads)), key=loads.__getitem__)
    rank_of = dict(zip(costliest_first, least_loaded_first, strict=True))
    return [rank_of[pile] for pile in pile_of]


def stack_whole(params: Sequence[Whole], loads: list[float], multiple: int) -> tuple[list[int], int]:
    """Lay each parameter into one shard; returns parameters' starts in the bucket, and the elements of a shard.

    loads     costs that each rank has of other buckets; this function adds this bucket's
    multiple  a shard's length is a multiple of this; if 64 divides it, parameters start at multiples of 64 elements
    """
    sizes = [round_up(param.numel, PARAM_ALIGNMENT) for param in params]
    shards = deal(sizes, [param.cost for param in params], loads)
    fill = [0] * len(loads)
    offsets = []
    for param, size, shard in zip(params, sizes, shards, strict=True):
        offsets.append(fill[shard])
        fill[shard] += size
        loads[shard] += param.cost
    shard_numel = max(round_up(max(fill), multiple), multiple)
    return [shard * shard_numel + offset for shard, offset in zip(shards, offsets, strict=True)], shard_numel
