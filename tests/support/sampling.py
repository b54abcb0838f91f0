"""Which combinations of a large matrix are tried first, and which long tests it is the turn of."""

import zlib
from collections.abc import Iterator
from itertools import combinations, islice
from typing import Any

__all__ = ["is_its_turn", "sample"]

_SAMPLES = 4


def is_its_turn(test: str, turn: str) -> bool:
    """Whether the test runs in turn ``K/N``: each runs in one of N turns, and in turn K + N again."""
    number, turns = map(int, turn.split("/"))
    return zlib.crc32(test.encode()) % turns == number % turns


def sample(places: list[dict[str, int]], most: int, turn: str = "0/1") -> set[int]:
    """Indices of the places of a matrix that run in turn ``K/N``; a place says the value on each axis by its number.

    Up to four samples of ``most`` places follow each other, which have no place in common: a turn runs one of them, and
    ``0/1`` all. Tests that run in every N-th turn alone (``is_its_turn``) come to all samples as well.
    """
    number, turns = map(int, turn.split("/"))
    samples = islice(_samples(places, most), _SAMPLES)
    if turns == 1:
        return set().union(*samples)
    num_samples = min(_SAMPLES, -(-len(places) // most))
    return next(islice(samples, (number + number // turns) % num_samples, None))  # makes none behind it: they take time


def _samples(places: list[dict[str, int]], most: int) -> Iterator[set[int]]:
    """Each next place brings most values that none before it in its sample has, then most pairs of values that none in
    any sample has; of those that bring as much it is the one farthest from all before it. So a sample shows all values
    of axes that are no longer than ``most``, as far as places are left.
    """
    axes = [axis for axis in places[0] if len({place[axis] for place in places}) > 1]
    values = [{(axis, place[axis]) for axis in axes} for place in places]
    pairs = [set(combinations(sorted(each), 2)) for each in values]
    seen_pairs = set[Any]()
    distances = dict.fromkeys(range(len(places)), len(places))
    while distances:
        kept, seen_values = set[int](), set[tuple[str, int]]()
        while distances and len(kept) < most:
            best = max(
                distances,
                key=lambda index: (len(values[index] - seen_values), len(pairs[index] - seen_pairs), distances[index]),
            )
            del distances[best]
            distances = {index: min(distance, abs(index - best)) for index, distance in distances.items()}
            kept.add(best)
            seen_values |= values[best]
            seen_pairs |= pairs[best]
        yield kept
