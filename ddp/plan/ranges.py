"""A range of elements: what slots, shards, segments, slices and chunks are made of."""

from typing import NamedTuple

__all__ = ["Range"]


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
