"""Stretches of time as [start, end) pairs: joined, cut, measured."""

from collections.abc import Iterable, Sequence
from math import inf

__all__ = ["Interval", "clip", "length", "union", "without"]

Interval = tuple[float, float]
"""[start, end), in the caller's unit of time."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in ascending order that cover what ``intervals`` cover."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """``intervals`` less ``holes``; both must be disjoint and in ascending order."""
    edges = [-inf, *(edge for hole in holes for edge in hole), inf]
    return [part for gap in zip(edges[::2], edges[1::2], strict=True) for part in clip(intervals, gap)]


def clip(intervals: Iterable[Interval], span: Interval) -> list[Interval]:
    """The parts of ``intervals`` that lie in ``span``."""
    clipped = ((max(span[0], start), min(span[1], end)) for start, end in intervals)
    return [(start, end) for start, end in clipped if start < end]


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths of ``intervals``."""
    return sum(end - start for start, end in intervals)
