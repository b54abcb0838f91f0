"""Arranges one bucket's parameters so that no shard border cuts an atom, with shards as short as can be found.

An *atom* is a number of consecutive elements of a parameter that must stay together: a row, a block of rows, the whole
tensor. All shards have one length, so that borders lie at multiples of this length. The distance between a parameter's
start and a border inside the parameter must be a multiple of the atom. For a parameter of ``n`` elements::

    no border inside       always possible
    one border inside      possible if the parameter starts at the right place: after a gap of less than an atom
    two or more borders    the shard's length must be a multiple of the atom too; this case is forced if n > 2 shards

``walk`` finds order and gaps for a given length of shards. ``arrange`` tries lengths, from a lower bound upwards, until
all parameters fit. Two simple arrangements, which always exist, are the upper bound. ``split`` splits a bucket whose
atoms together would need much padding.

All arithmetic is on integers, and ties go to the first parameter, so that every rank computes the same result.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ...kernels.optimizer.eight_bits import BLOCK
from .cut import PARAM_ALIGNMENT, round_up
from .dealing import Whole, stack_whole

__all__ = [
    "MAX_PILES",
    "Arrangement",
    "ParamSize",
    "arrange",
    "atom_of",
    "cuts_an_atom",
    "least_shard_numel",
    "piles_of",
    "split",
    "walk",
]

# ---- ``walk``, for a given length of shards, fills the bucket from the front. The next parameter is the one that can
# ---- start soonest; of those, the one with the coarsest atom; of those, the largest. Parameters that may be cut
# ---- anywhere come where no other parameter fits: they bridge borders and fill gaps.

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
            # The largest that ends before the coarse parameter starts, else, at -1, the largest of all.
            fitting = len(free.numels) if best is None else bisect_right(free.numels, best.start - first)
            best = _Option(first, free, fitting - 1)
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
        whole = bisect_right(numels, -first % shard_numel) - 1
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


# ---- ``arrange``: the shortest shards.

MAX_LOOKS = 250_000  # how often all walks of one bucket may look at a pile: about half a second
BISECTIONS = 12  # steps between the longest length that was too short and the shortest that was enough
HOPELESS_TRIES = 8  # the search ends after so many lengths in a row at which some parameter fits nowhere


class Arrangement(NamedTuple):
    """Where the parameters of one bucket lie."""

    starts: Sequence[int]
    """First element of each parameter, counted from the bucket's start."""
    shard_numel: int
    """Elements of each shard, padding included."""


def atom_of(shape: Sequence[int], atom: Literal["element", "block", "row", "whole"] | int) -> int:
    """``ParamSpec.atom`` in elements, for a parameter of this shape.

    atom  where borders may lie. "element": anywhere; "block": between blocks of 256 elements, as moments in 8 bits
          have; "row": between entries of dim 0; "whole": nowhere; an integer: between blocks of this many rows. The
          last block may be shorter

    A row of a 1-D parameter is one element, and a scalar is one element. Raises ``ValueError`` for any other atom.
    """
    if atom == "element":
        return 1
    if atom == "block":
        return BLOCK
    if atom == "whole":
        return max(1, math.prod(shape))
    if atom == "row":
        return max(1, math.prod(shape[1:]))
    if not isinstance(atom, int) or isinstance(atom, bool):
        raise ValueError(f"an atom is 'element', 'block', 'row', 'whole' or a number of rows, got {atom!r}")
    if atom < 1:
        raise ValueError(f"an atom of rows has at least one row, got {atom}")
    return max(1, atom * math.prod(shape[1:]))


def cuts_an_atom(start: int, numel: int, atom: int, shard_numel: int) -> bool:
    """Whether a multiple of ``shard_numel`` lies inside an atom of the parameter at [start, start + numel)."""
    borders = range((start // shard_numel + 1) * shard_numel, start + numel, shard_numel)
    return any((border - start) % atom for border in (borders[:1] if shard_numel % atom == 0 else borders[:2]))


def arrange(numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int) -> Arrangement:
    """Arrange the parameters of one bucket so that no shard border cuts an atom.

    numels, atoms  of each parameter, in elements
    degree         number of shards
    multiple       a shard's length must be a multiple of this, in elements

    Keeps the given order without gaps where this order cuts no atom. Always succeeds: one shard can hold everything.
    """
    return _arrange(tuple(ParamSize(numel, atom) for numel, atom in zip(numels, atoms, strict=True)), degree, multiple)


@functools.lru_cache(maxsize=64)  # a model has many layers of the same shapes
def _arrange(sizes: tuple[ParamSize, ...], degree: int, multiple: int) -> Arrangement:
    plain = _in_order(sizes, degree, multiple)
    if not any(cuts_an_atom(start, *size, plain.shard_numel) for size, start in zip(sizes, plain.starts, strict=True)):
        return plain._replace(starts=tuple(plain.starts))
    whole = [Whole(size.numel, size.numel) for size in sizes]
    best = Arrangement(*stack_whole(whole, [0.0] * degree, math.lcm(PARAM_ALIGNMENT, multiple)))
    aligned = _in_aligned_order(sizes, degree, multiple, best.shard_numel)
    best = _search(sizes, degree, multiple, best if aligned is None else aligned)
    return best._replace(starts=tuple(best.starts))


def least_shard_numel(numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int) -> int:
    """A lower bound of ``arrange(...).shard_numel``, whatever the order and the gaps.

    One shard holds the longest atom; all shards together hold all parameters; and where a parameter is longer than two
    shards, the shard is a multiple of its atom.
    """
    sizes = [ParamSize(numel, atom) for numel, atom in zip(numels, atoms, strict=True)]
    everything = sum(round_up(numel, PARAM_ALIGNMENT) for numel in numels)
    end = round_up(everything, multiple) + 1  # no bound is longer than one shard for everything
    for low, high, forced in _stretches(sizes, _least(sizes, degree), multiple, end):
        if round_up(low, forced) < high:
            return max(round_up(low, forced), multiple)
    return end - 1


def _least(sizes: Sequence[ParamSize], degree: int) -> int:
    padded = [round_up(size.numel, PARAM_ALIGNMENT) for size in sizes]
    least = sum(padded) - max(longer - size.numel for longer, size in zip(padded, sizes, strict=True))
    return max(-(-least // degree), max(min(size) for size in sizes))


def _in_order(sizes: Sequence[ParamSize], degree: int, multiple: int) -> Arrangement:
    """Parameters in the given order, as if all atoms were single elements."""
    starts, position = [], 0
    for size in sizes:
        starts.append(round_up(position, PARAM_ALIGNMENT))
        position = starts[-1] + size.numel
    return Arrangement(starts, max(round_up(-(-position // degree), multiple), multiple))


def _in_aligned_order(sizes: Sequence[ParamSize], degree: int, multiple: int, below: int) -> Arrangement | None:
    """The given order, each parameter at a multiple of its atom, and a shard that is a multiple of every atom.

    None: such a shard is not shorter than ``below``.
    """
    common = multiple
    for size in sizes:
        common = math.lcm(common, size.atom)
        if common >= below:
            return None
    starts, position = [], 0
    for size in sizes:
        starts.append(round_up(position, math.lcm(size.atom, PARAM_ALIGNMENT)))
        position = starts[-1] + size.numel
    shard_numel = round_up(-(-position // degree), common)
    return Arrangement(starts, shard_numel) if shard_numel < below else None


# ---- The search: the shortest shards. ----


def _search(sizes: Sequence[ParamSize], degree: int, multiple: int, best: Arrangement) -> Arrangement:
    """The shortest shards that a limited number of walks finds, or ``best`` where no walk finds shorter shards."""
    cost = len(sizes) * min(MAX_PILES, len(piles_of(sizes)))  # looks of one walk
    walks = max(MAX_LOOKS // cost, 4)
    for low, high, forced in _stretches(sizes, _least(sizes, degree), multiple, best.shard_numel):
        if round_up(low, forced) >= min(high, best.shard_numel):
            continue
        for common in _moduli(sizes, forced, best.shard_numel):
            trial = _Trial(sizes, degree, common, walks)
            best = trial.shortest(low, min(high, best.shard_numel)) or best
            walks = trial.walks
        if best.shard_numel < high:
            break  # all later stretches have longer shards
    return best


def _stretches(sizes: Sequence[ParamSize], shortest: int, multiple: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Stretches [low, high) of lengths below ``end``, ascending, each with the number that divides all usable lengths.

    A parameter longer than two shards has two borders inside, wherever the parameter starts.
    """
    cuttable = [size for size in sizes if 1 < size.atom < size.numel]
    halves = {-(-size.numel // 2) for size in cuttable}
    limits = [shortest, *sorted(half for half in halves if shortest < half < end), end]
    for low, high in itertools.pairwise(limits):
        forced = multiple
        for size in cuttable:
            if size.numel > 2 * low and forced < end:
                forced = math.lcm(forced, size.atom)
        yield low, high, forced


def _moduli(sizes: Sequence[ParamSize], forced: int, end: int) -> list[int]:
    """Divisors of the shard's length to try: ``forced`` first, then also the atoms of most elements.

    A shard that is a multiple of an atom costs up to an atom once; any other costs up to an atom at each border.
    """
    elements: dict[int, int] = {}
    for numel, atom in sizes:
        if 1 < atom < numel:
            elements[atom] = elements.get(atom, 0) + numel
    moduli = [forced, math.lcm(forced, PARAM_ALIGNMENT)]
    for atom in sorted(elements, key=lambda atom: (-elements[atom], atom))[:2]:
        moduli.append(math.lcm(moduli[-1], atom))
    return list(dict.fromkeys(modulus for modulus in moduli if modulus < end))


class _Trial:
    """Tries lengths that are multiples of one number, as long as walks are left."""

    def __init__(self, sizes: Sequence[ParamSize], degree: int, common: int, walks: int) -> None:
        self.walks = walks
        self._sizes = sizes
        self._degree = degree
        self._common = common
        self._extent: int | None = None

    def shortest(self, low: int, high: int) -> Arrangement | None:
        """The arrangement with the shortest shards found in low <= length < high; None: no length was enough."""
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

    def _try(self, shard_numel: int) -> Arrangement | None:
        self.walks -= 1
        walked = walk(self._sizes, shard_numel)
        self._extent = None if walked is None else walked[1]
        return Arrangement(walked[0], shard_numel) if walked and walked[1] <= shard_numel * self._degree else None


# ---- ``split``. A parameter longer than two shards makes the shard a multiple of its atom. So rows of 2,880 and of
# ---- 4,096 elements in one bucket make the shard a multiple of 184,320. In two buckets, each shard is a multiple of
# ---- one row only. But each bucket costs a collective, so that atoms stay in one bucket where this costs little
# ---- padding. Padding is estimated by the lower bound ``least_shard_numel``, which ``arrange`` nearly always reaches.

MAX_PARTS = 12  # with more different atoms, the finest stay together


def split(
    numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int, max_padding: float
) -> list[list[int]]:
    """Split one bucket into few buckets with little padding; returns the indices of the parameters of each.

    numels, atoms  of each parameter, in elements
    degree         number of shards
    multiple       a shard's length must be a multiple of this, in elements
    max_padding    most padding of all buckets together, as a fraction of the parameters' elements

    One bucket stays one where its padding is small enough, or where a split saves none. Where one bucket for each atom
    still has more padding than ``max_padding``, atoms share a bucket only where this adds no padding.
    """

    def padding(part: Sequence[int]) -> int:
        part_numels = [numels[index] for index in part]
        shard_numel = least_shard_numel(part_numels, [atoms[index] for index in part], degree, multiple)
        return shard_numel * degree - sum(part_numels)

    together = list(range(len(numels)))
    allowed = int(max_padding * sum(numels))
    if padding(together) <= allowed:
        return [together]
    by_atom: dict[int, list[int]] = {}
    coarsest = sorted(set(atoms), reverse=True)[: MAX_PARTS - 1]
    for index in together:
        by_atom.setdefault(atoms[index] if atoms[index] in coarsest else 1, []).append(index)
    parts = list(by_atom.values())
    paddings = [padding(part) for part in parts]
    while len(parts) > 1:
        joined = []
        for one, other in itertools.combinations(range(len(parts)), 2):
            more = padding(parts[one] + parts[other]) - paddings[one] - paddings[other]
            joined.append((more, one, other))
        more, one, other = min(joined)
        if more > max(allowed - sum(paddings), 0):
            break
        parts[one] = sorted(parts[one] + parts.pop(other))
        paddings[one] += paddings.pop(other) + more
    return sorted(parts, key=lambda part: part[-1]) if sum(paddings) < padding(together) else [together]
