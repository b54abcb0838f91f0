"""Tokens of several files or tables, read as if they lay one after the other."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrowTokens", "JoinedTokens", "TokenRange"]


class TokenRange:
    """Tokens [start, stop) of something that reads them: its length and its parts."""

    _start: int
    _stop: int

    def part(self, start: int, stop: int) -> Self:
        """Tokens [start, stop) of these tokens. Reads nothing."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found._start = min(self._start + start, self._stop)
        found._stop = min(self._start + stop, self._stop)
        return found

    def __len__(self) -> int:
        return self._stop - self._start


class JoinedTokens(TokenRange):
    """Tokens [start, stop) of ``parts``, one dim; ``tokens[a:b]`` reads some of them, from each part that has some."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._start, self._stop = 0, int(self._ends[-1])

    def __getitem__(self, place: slice) -> "NDArray[np.unsignedinteger]":
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError("tokens are read in a row")
        start, stop = start + self._start, max(start, stop) + self._start
        pieces = [np.empty(0, self.dtype)]
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[index]) - len(self._parts[index])
            end = min(stop, int(self._ends[index]))
            pieces.append(self._parts[index][start - begin : end - begin])
            start, index = end, index + 1
        return np.concatenate(pieces).astype(self.dtype, copy=False)


class ArrowTokens:
    """A column of a ``datasets.Dataset`` with a list of integers in each row, as tokens one after the other.

    Rows stay in their memory-mapped file until they are read. ``starts`` [rows + 1] int64: the place of each row's
    first token, and the number of tokens.
    """

    dtype = np.dtype(np.uint32)

    def __init__(self, dataset: Any, column: str) -> None:
        self._rows, self._column = dataset.with_format("arrow", columns=[column]), column
        lengths = [self._values(first, first + 4096)[1] for first in range(0, len(dataset), 4096)]
        self.starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths, dtype=np.int64))]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def part(self, start: int, stop: int) -> JoinedTokens:
        """Tokens [start, stop) of these tokens. Reads nothing."""
        return JoinedTokens([self]).part(start, stop)

    def __getitem__(self, place: slice) -> "NDArray[np.unsignedinteger]":
        start, stop, _ = place.indices(len(self))
        if start >= stop:
            return np.empty(0, self.dtype)
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        begin = int(self.starts[first])
        return self._values(first, last)[0][start - begin : stop - begin]

    def _values(self, first: int, last: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The tokens of some rows, and the rows' lengths."""
        chunks = self._rows[first:last][self._column].chunks
        values = [chunk.flatten().to_numpy(zero_copy_only=False).astype(self.dtype) for chunk in chunks]
        lengths = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        return np.concatenate(values), np.concatenate(lengths)
