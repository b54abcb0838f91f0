"""Lays one bucket's parameters behind each other, for a given length of shards, so that no shard border cuts an atom.

``walk`` fills the bucket from the front. The next parameter is the one that can start soonest; of those, the one with
the coarsest atom; of those, the largest. Parameters that may be cut anywhere come where no other parameter fits: they
bridge borders and fill gaps.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .cut import PARAM_ALIGNMENT, round_up

__all__ = ["MAX_PILES", "ParamSize", "piles_of", "walk"]

MAX_PILES = 16  # each step of the walk looks at so many of the coarsest atoms


class ParamSize(NamedTuple):
    """One parameter's number of elements, and its atom."""

    numel: int
    atom: int


class _Pile(NamedTuple):
    """Parameters of one atom that the walk has not placed yet, ascending by size; of equal sizes the first is last."""

    atom: int
    """0: no border may cut the parameter."""
    numels: list[int]
    indices: list[int]


class _Option(NamedTuple):
    """A parameter and where it could start."""

    start: int
    pile: _Pile
    at: int
    """The parameter's place in the pile."""


def piles_of(sizes: Sequence[ParamSize]) -> dict[int, _Pile]:
    """Piles by atom, coarsest first: 0 (no cut at all), then falling atoms, then 1 (single elements)."""
    piles: dict[int, _Pile] = {}
    for index in sorted(range(len(sizes)), key=lambda index: (sizes[index].numel, -index)):
        pile = piles.setdefault(_pile_atom(sizes[index]), _Pile(_pile_atom(sizes[index]), [], []))
        pile.numels.append(sizes[index].numel)
        pile.indices.append(index)
    return dict(sorted(piles.items(), key=lambda entry: -(entry[0] or math.inf)))


def walk(sizes: Sequence[ParamSize], shard_numel: int) -> tuple[list[int], int] | None:
    """Place all parameters; returns their starts, and the end of the last one. None: some parameter fits nowhere.

    ``walk`` takes as many shards of ``shard_numel`` elements as it needs.
    """
    piles = piles_of([size for size in sizes if size.numel])
    numbers = [index for index, size in enumerate(sizes) if size.numel]  # parameters without elements stay at 0
    free = piles.pop(1, _Pile(1, [], []))
    coarse = list(piles.values())
    starts = [0] * len(sizes)
    position = 0
    while coarse or free.numels:
        first = round_up(position, PARAM_ALIGNMENT)
        best: _Option | None = None
        for pile in coarse[:MAX_PILES]:
            option = _soonest(pile, first, shard_numel)
            if option is None:
                return None
            if best is None or option.start < best.start:
                best = option
            if best.start == first:
                break
        if free.numels and (best is None or best.start > first):
            # The largest that ends before the coarse parameter starts, else the largest of all.
            fitting = len(free.numels) if best is None else bisect_right(free.numels, best.start - first)
            best = _Option(first, free, (fitting or len(free.numels)) - 1)
        assert best is not None
        starts[numbers[best.pile.indices.pop(best.at)]] = best.start
        position = best.start + best.pile.numels.pop(best.at)
        if not best.pile.numels and best.pile is not free:
            coarse = [pile for pile in coarse if pile.numels]
    return starts, position


def _soonest(pile: _Pile, first: int, shard_numel: int) -> _Option | None:
    """The soonest start of a parameter of this pile from ``first``, a multiple of 64, with the largest that can start.

    None: no parameter of the pile can start before the next border, nor before the one after it.
    """
    atom, numels, _ = pile
    last = len(numels) - 1
    if atom and shard_numel % atom == 0:
        aligned = round_up(first, math.lcm(atom, PARAM_ALIGNMENT))  # then any number of borders may follow
        if aligned == first:
            return _Option(first, pile, last)
        whole = bisect_right(numels, -first % shard_numel or shard_numel) - 1
        return _Option(first, pile, whole) if whole >= 0 else _Option(aligned, pile, last)
    for _ in range(2):  # before the next border, then before the one after it
        border = (first // shard_numel + 1) * shard_numel
        whole = bisect_right(numels, border - first) - 1
        if whole >= 0:
            return _Option(first, pile, whole)
        if atom and (start := _congruent(first, border, atom)) is not None and start < border:
            cut_once = bisect_right(numels, border + shard_numel - start) - 1
            if cut_once >= 0:
                return _Option(start, pile, cut_once)
        first = round_up(border, PARAM_ALIGNMENT)
    return None


def _congruent(first: int, border: int, atom: int) -> int | None:
    """The first multiple of 64 from ``first`` on whose distance to ``border`` is a multiple of ``atom``, or None."""
    common = math.gcd(PARAM_ALIGNMENT, atom)
    if border % common:
        return None
    period = atom // common
    count = border // common * pow(PARAM_ALIGNMENT // common, -1, period) % period  # of 64 elements each
    return first + (count * PARAM_ALIGNMENT - first) % (period * PARAM_ALIGNMENT)


def _pile_atom(size: ParamSize) -> int:
    return 0 if 1 < size.atom >= size.numel else size.atom
