"""A range of a flattened tensor: what shards, slots, chunks and slices have in common."""

from typing import NamedTuple

__all__ = ["Range"]


class Range(NamedTuple):
    """[start, end) of a flattened tensor's elements, or of its rows."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        """How many they are."""
        return self.end - self.start

    def intersect(self, other: "Range") -> "Range":
        """The elements that are in both; an empty range inside this one where there are none."""
        start = min(max(self.start, other.start), self.end)
        return Range(start, max(start, min(self.end, other.end)))
