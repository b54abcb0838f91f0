"""Shard borders that cut no atom: the order and the gaps of one bucket's parameters, and how long its shards are.

An *atom* is a number of consecutive elements of a parameter that must stay together: a row, a block of rows, the whole
tensor. Shards are equally long, so that borders lie at multiples of the shard. A border inside a parameter must lie a
multiple of its atom behind its start. That leaves three cases for a parameter of ``n`` elements::

    no border inside       fine
    one border inside      fine if the parameter starts at the right place: a gap of less than an atom before it
    two and more           the shard must be a multiple of the atom as well: no way around it if n > 2 shards

The walk (``_walk``) fills a bucket from its front for one length of shards: next comes the parameter that can start
soonest, of those the one with the coarsest atom, of those the largest. Parameters that may be cut anywhere wait until
nothing coarser fits: they bridge borders and fill gaps. The search (``place``) looks for the shortest shards with
which the walk gets everything in, from a lower bound upwards; two plain layouts that always exist are its upper bound.

Arithmetic on integers only; ties go to the first parameter, so that every rank computes the same.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .layout_cut import PARAM_ALIGNMENT, round_up, stack_whole

__all__ = ["Placement", "atom_of", "cuts_an_atom", "least_shard_numel", "place"]

MAX_PILES = 16  # atoms that one step of the walk looks at; with more, the coarsest
MAX_LOOKS = 250_000  # looks at a pile in all walks of one bucket, about half a second
BISECTIONS = 12  # between the longest shard that was too short and the shortest that was not
HOPELESS_TRIES = 8  # lengths tried in a row at which some parameter fits nowhere


class Placement(NamedTuple):
    """Where the parameters of one bucket lie."""

    starts: list[int]
    """First element of each, from the bucket's start."""
    shard_numel: int
    """Elements of each shard, padding included."""


class _Kind(NamedTuple):
    """Size of one parameter in elements, and its atom."""

    numel: int
    atom: int


class _Pile(NamedTuple):
    """Parameters of one atom that are still to be placed, ascending by size; of equal ones the first is last."""

    atom: int
    """0: not to be cut at all."""
    numels: list[int]
    indices: list[int]


class _Option(NamedTuple):
    """A parameter and where it could start."""

    start: int
    pile: _Pile
    at: int
    """Its place in the pile."""


def atom_of(shape: Sequence[int], kind: Literal["element", "row", "whole"] | int) -> int:
    """Elements of ``ParamSpec.atom`` for a parameter of this shape.

    kind  "element": may be cut anywhere; "row": between entries of dim 0; "whole": nowhere; an integer: between blocks
          of so many rows, of which the last may be shorter

    A row of a 1-D parameter is one element, and a scalar is one element. Raises ``ValueError`` for another kind.
    """
    if kind == "element":
        return 1
    if kind == "whole":
        return max(1, math.prod(shape))
    if kind == "row":
        return max(1, math.prod(shape[1:]))
    if not isinstance(kind, int) or isinstance(kind, bool):
        raise ValueError(f"an atom is 'element', 'row', 'whole' or a number of rows, got {kind!r}")
    if kind < 1:
        raise ValueError(f"an atom of rows has at least one row, got {kind}")
    return max(1, kind * math.prod(shape[1:]))


def cuts_an_atom(start: int, numel: int, atom: int, shard_numel: int) -> bool:
    """Whether a multiple of ``shard_numel`` lies inside an atom of the parameter at [start, start + numel)."""
    borders = range((start // shard_numel + 1) * shard_numel, start + numel, shard_numel)
    return any((border - start) % atom for border in (borders[:1] if shard_numel % atom == 0 else borders[:2]))


def place(numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int) -> Placement:
    """Place the parameters of one bucket so that no shard border cuts an atom.

    numels, atoms  of each parameter, in elements
    degree         number of shards
    multiple       elements that a shard's length must be a multiple of

    Where the plain order with element atoms cuts nothing, that is the result. Always succeeds: a shard that holds all
    parameters cuts none.
    """
    kinds = [_Kind(numel, atom) for numel, atom in zip(numels, atoms, strict=True)]
    plain = _in_order(kinds, degree, multiple)
    if not any(cuts_an_atom(start, *kind, plain.shard_numel) for kind, start in zip(kinds, plain.starts, strict=True)):
        return plain
    best = Placement(*stack_whole(numels, [0] * degree, math.lcm(PARAM_ALIGNMENT, multiple)))
    aligned = _in_aligned_order(kinds, degree, multiple, best.shard_numel)
    return _search(kinds, degree, multiple, best if aligned is None else aligned)


def least_shard_numel(numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int) -> int:
    """A lower bound of ``place(...).shard_numel``: elements that the shards need whatever the order and the gaps.

    A shard holds the longest atom, all shards hold all parameters, and a parameter of more than two shards makes the
    shard a multiple of its atom.
    """
    kinds = [_Kind(numel, atom) for numel, atom in zip(numels, atoms, strict=True)]
    everything = sum(round_up(numel, PARAM_ALIGNMENT) for numel in numels)
    end = round_up(everything, multiple) + 1  # no bound is longer than one shard for everything
    for low, high, forced in _stretches(kinds, _least(kinds, degree), multiple, end):
        if round_up(low, forced) < high:
            return max(round_up(low, forced), multiple)
    return end - 1


def _least(kinds: Sequence[_Kind], degree: int) -> int:
    padded = [round_up(kind.numel, PARAM_ALIGNMENT) for kind in kinds]
    least = sum(padded) - max(size - kind.numel for size, kind in zip(padded, kinds, strict=True))
    return max(-(-least // degree), max(min(kind) for kind in kinds))


def _in_order(kinds: Sequence[_Kind], degree: int, multiple: int) -> Placement:
    """One parameter behind the other, as if all atoms were elements."""
    starts, position = [], 0
    for kind in kinds:
        starts.append(round_up(position, PARAM_ALIGNMENT))
        position = starts[-1] + kind.numel
    return Placement(starts, max(round_up(-(-position // degree), multiple), multiple))


def _in_aligned_order(kinds: Sequence[_Kind], degree: int, multiple: int, below: int) -> Placement | None:
    """One behind the other, each at a multiple of its atom, shards a multiple of every atom; None: not below that."""
    common = multiple
    for kind in kinds:
        common = math.lcm(common, kind.atom)
        if common >= below:
            return None
    starts, position = [], 0
    for kind in kinds:
        starts.append(round_up(position, math.lcm(kind.atom, PARAM_ALIGNMENT)))
        position = starts[-1] + kind.numel
    shard_numel = round_up(-(-position // degree), common)
    return Placement(starts, shard_numel) if shard_numel < below else None


# ---- The walk: one length of shards. ----


def _piles(kinds: Sequence[_Kind]) -> dict[int, _Pile]:
    """By atom, coarsest first: what may not be cut (0), then falling atoms, then single elements (1)."""
    piles: dict[int, _Pile] = {}
    for index in sorted(range(len(kinds)), key=lambda index: (kinds[index].numel, -index)):
        numel, atom = kinds[index]
        pile = piles.setdefault(0 if 1 < atom >= numel else atom, _Pile(0 if 1 < atom >= numel else atom, [], []))
        pile.numels.append(numel)
        pile.indices.append(index)
    return dict(sorted(piles.items(), key=lambda entry: -(entry[0] or math.inf)))


def _walk(kinds: Sequence[_Kind], shard_numel: int) -> tuple[list[int], int] | None:
    """Place everything at this length of shards; returns the starts and the end of the last parameter.

    The number of shards is unlimited here. None: some parameter fits nowhere.
    """
    piles = _piles([kind for kind in kinds if kind.numel])
    numbers = [index for index, kind in enumerate(kinds) if kind.numel]  # those without elements stay at 0
    free = piles.pop(1, _Pile(1, [], []))
    coarse = list(piles.values())
    starts = [0] * len(kinds)
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
            # Of those that do not keep the coarse one waiting the largest, else the largest of all.
            fitting = len(free.numels) if best is None else bisect_right(free.numels, best.start - first)
            best = _Option(first, free, (fitting or len(free.numels)) - 1)
        assert best is not None
        starts[numbers[best.pile.indices.pop(best.at)]] = best.start
        position = best.start + best.pile.numels.pop(best.at)
        if not best.pile.numels and best.pile is not free:
            coarse = [pile for pile in coarse if pile.numels]
    return starts, position


def _soonest(pile: _Pile, first: int, shard_numel: int) -> _Option | None:
    """Where a parameter of this pile can start soonest from ``first`` on, a multiple of 64; None: nowhere near.

    Of those that can start there, the largest.
    """
    atom, numels, _ = pile
    last = len(numels) - 1
    if atom and shard_numel % atom == 0:
        aligned = round_up(first, math.lcm(atom, PARAM_ALIGNMENT))  # any number of borders
        if aligned == first:
            return _Option(first, pile, last)
        whole = bisect_right(numels, -first % shard_numel or shard_numel) - 1
        return _Option(first, pile, whole) if whole >= 0 else _Option(aligned, pile, last)
    for _ in range(2):  # from here, or from the next border
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
    """The smallest multiple of 64 from ``first`` on that lies a multiple of ``atom`` away from ``border``, or None."""
    common = math.gcd(PARAM_ALIGNMENT, atom)
    if border % common:
        return None
    period = atom // common
    count = border // common * pow(PARAM_ALIGNMENT // common, -1, period) % period  # of 64 elements each
    return first + (count * PARAM_ALIGNMENT - first) % (period * PARAM_ALIGNMENT)


# ---- The search: the shortest shards. ----


def _search(kinds: Sequence[_Kind], degree: int, multiple: int, best: Placement) -> Placement:
    """The placement with the shortest shards that a limited number of walks finds, or ``best``."""
    cost = len(kinds) * min(MAX_PILES, len(_piles(kinds)))  # looks of one walk
    walks = max(MAX_LOOKS // cost, 4)
    for low, high, forced in _stretches(kinds, _least(kinds, degree), multiple, best.shard_numel):
        if round_up(low, forced) >= min(high, best.shard_numel):
            continue
        for common in _moduli(kinds, forced, best.shard_numel):
            trial = _Trial(kinds, degree, common, walks)
            best = trial.shortest(low, min(high, best.shard_numel)) or best
            walks = trial.walks
        if best.shard_numel < high:
            break  # what follows is longer
    return best


def _stretches(kinds: Sequence[_Kind], shortest: int, multiple: int, end: int) -> Iterator[tuple[int, int, int]]:
    """[low, high) of shards' lengths below ``end``, ascending, and what a length in it must be a multiple of.

    A parameter longer than two shards has two borders inside, wherever it starts.
    """
    cuttable = [kind for kind in kinds if 1 < kind.atom < kind.numel]
    halves = {-(-kind.numel // 2) for kind in cuttable}
    limits = [shortest, *sorted(half for half in halves if shortest < half < end), end]
    for low, high in itertools.pairwise(limits):
        forced = multiple
        for kind in cuttable:
            if kind.numel > 2 * low and forced < end:
                forced = math.lcm(forced, kind.atom)
        yield low, high, forced


def _moduli(kinds: Sequence[_Kind], forced: int, end: int) -> list[int]:
    """Multiples worth trying: what is forced, and with more atoms, those of the most elements first.

    Shards that are multiples of an atom cost up to that much each; all others cost up to an atom at each border.
    """
    elements: dict[int, int] = {}
    for numel, atom in kinds:
        if 1 < atom < numel:
            elements[atom] = elements.get(atom, 0) + numel
    moduli = [forced, math.lcm(forced, PARAM_ALIGNMENT)]
    for atom in sorted(elements, key=lambda atom: (-elements[atom], atom))[:4]:
        moduli.append(math.lcm(moduli[-1], atom))
    return list(dict.fromkeys(modulus for modulus in moduli if modulus < end))


class _Trial:
    """Walks over multiples of one number, as long as there are walks left."""

    def __init__(self, kinds: Sequence[_Kind], degree: int, common: int, walks: int) -> None:
        self.walks = walks
        self._kinds = kinds
        self._degree = degree
        self._common = common
        self._extent: int | None = None

    def shortest(self, low: int, high: int) -> Placement | None:
        """The shortest found with low <= shard < high."""
        found, too_short = None, low - 1
        shard_numel, hopeless = round_up(low, self._common), 0
        while found is None and shard_numel < high and self.walks and hopeless < HOPELESS_TRIES:
            found = self._try(shard_numel)
            if found is None:
                too_short = shard_numel
                hopeless = hopeless + 1 if self._extent is None else 0
                needed = -(-(self._extent or 0) // self._degree)
                shard_numel = round_up(max(needed, shard_numel + 1), self._common)
        for _ in range(BISECTIONS):
            if found is None:
                break
            middle = round_up((too_short + found.shard_numel) // 2, self._common)
            if not too_short < middle < found.shard_numel or not self.walks:
                break
            shorter = self._try(middle)
            found, too_short = (found, middle) if shorter is None else (shorter, too_short)
        return found

    def _try(self, shard_numel: int) -> Placement | None:
        self.walks -= 1
        walked = _walk(self._kinds, shard_numel)
        self._extent = None if walked is None else walked[1]
        return Placement(walked[0], shard_numel) if walked and walked[1] <= shard_numel * self._degree else None
