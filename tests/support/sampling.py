"""Which combinations of a large matrix are tried first, and which long tests it is the turn of."""

import zlib
from itertools import combinations
from typing import Any

__all__ = ["is_its_turn", "sample"]


def is_its_turn(test: str, turn: str) -> bool:
    """Whether the test runs in turn ``K/N``: each runs in one of N turns, and in turn K + N again."""
    number, turns = map(int, turn.split("/"))
    return zlib.crc32(test.encode()) % turns == number % turns


def sample(places: list[dict[str, int]], most: int) -> set[int]:
    """Indices of ``most`` of a matrix's places, which say the value on each axis by its number.

    Each next place brings most values that none before it has, then most pairs of values; of those that bring as much
    it is the one farthest from all before it. So ``most`` places show all values of axes that are no longer than that.
    """
    axes = [axis for axis in places[0] if len({place[axis] for place in places}) > 1]
    values = [{(axis, place[axis]) for axis in axes} for place in places]
    pairs = [set(combinations(sorted(each), 2)) for each in values]
    kept, seen_values, seen_pairs = set[int](), set[tuple[str, int]](), set[Any]()
    distances = dict.fromkeys(range(len(places)), len(places))
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
    return kept
