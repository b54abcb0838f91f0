"""Tokens that stay in files until they are asked for, and digests by which tokens are told apart.

Files are read and not memory-mapped: a mapped file that shrinks kills the process with a signal that names no file.
"""

import copy
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataError", "Digest", "FileTokens", "Tokens", "check_tokens", "digest_of", "digest_of_borders"]

_DIGEST_BLOCK = 2**18
_DIGEST_BLOCKS = 1024
"""A digest reads at most ``_DIGEST_BLOCKS`` blocks of ``_DIGEST_BLOCK`` bytes, evenly spread: 256 MiB."""


class DataError(ValueError):
    """Data that cannot be trained on; the message names the file and the remedy."""


class FileTokens:
    """The tokens of a file, one dim; ``tokens[a:b]`` reads some of them.

    path   is opened once and stays open: a file that replaces it later is not read
    dtype  an unsigned integer dtype

    Raises ``DataError`` for a file that cannot be opened, is empty, has a size that is no multiple of the token size,
    or has become shorter since it was opened.
    """

    def __init__(self, path: Path, dtype: "np.dtype[np.unsignedinteger]") -> None:
        if not path.is_file():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise DataError(f"data file '{path}' {what} (working directory: {Path.cwd()}); correct data.paths")
        try:
            self._file = path.open("rb", buffering=0)
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from None
        if size == 0:
            raise DataError(f"data file '{path}' is empty; correct data.paths")
        if size % dtype.itemsize:
            raise DataError(
                f"data file '{path}' holds {size} bytes, not a whole number of {dtype.name} tokens; "
                f"correct data.token_dtype"
            )
        self.dtype = dtype
        self._path, self._length = path, size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice) -> "NDArray[np.unsignedinteger]":
        start, stop, _ = place.indices(self._length)
        begin, wanted = start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        found = bytearray()
        try:
            while len(found) < wanted:  # a read may return fewer bytes than asked for
                more = os.pread(self._file.fileno(), wanted - len(found), begin + len(found))
                if not more:
                    break
                found += more
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if len(found) < wanted:
            there = os.fstat(self._file.fileno()).st_size
            raise DataError(
                f"data file '{self._path}' has become shorter since the run began: {there} bytes are there, and tokens "
                f"up to byte {begin + wanted} are to be read; put it back as it was, and go on from the last "
                f"checkpoint with train.resume"
            )
        return np.frombuffer(found, self.dtype)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data file '{path}' cannot be read ({error.strerror}); correct its permissions, or data.paths")


class Tokens:
    """Tokens of several arrays or files, one after the other, one dim; ``tokens[a:b]`` reads some of them.

    parts  what ``part[a:b]`` gives tokens of
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in parts))
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._start, self._stop = 0, int(self._ends[-1])

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> Self:
        """Tokens [start, stop) of these tokens. Reads nothing."""
        found = copy.copy(self)
        found._start, found._stop = (min(self._start + place, self._stop) for place in (start, stop))
        return found

    def __getitem__(self, place: slice) -> "NDArray[np.unsignedinteger]":
        start, stop, _ = place.indices(len(self))
        start, stop = start + self._start, stop + self._start
        pieces = [np.empty(0, self.dtype)]
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[index]) - len(self._parts[index])
            end = min(stop, int(self._ends[index]))
            pieces.append(self._parts[index][start - begin : end - begin])
            start, index = end, index + 1
        return np.concatenate(pieces, dtype=self.dtype)


def check_tokens(largest: int, vocab_size: int) -> None:
    """Raise ``DataError`` for a token id outside the vocabulary."""
    if largest >= vocab_size:
        raise DataError(
            f"token {largest} is outside the vocabulary: model.vocab_size = {vocab_size}; raise it to at least "
            f"{largest + 1}, or correct data.token_dtype"
        )


class Digest(NamedTuple):
    """Identifies data: bodies of tokens and documents with equal digests count as the same data."""

    tokens: int
    """Number of tokens."""
    sha256: str
    """SHA-256 of all tokens; where they take more than 256 MiB, of 1024 evenly spread blocks of 256 KiB."""
    borders: str = ""
    """SHA-256 of where bodies end and documents begin. Empty: not noted."""

    def says_otherwise(self, now: "Digest") -> str | None:
        """How the data of this digest, which a checkpoint holds, differ from those of ``now``; None: not at all."""
        if self.tokens != now.tokens:
            return f"had {self.tokens} tokens, and now {now.tokens}"
        if self.sha256 != now.sha256:
            return "had other tokens"
        # Checkpoints of before borders were noted have none.
        return "had other borders of documents or paths" if self.borders and self.borders != now.borders else None


def digest_of(tokens: Tokens) -> Digest:
    """Read up to 256 MiB of the tokens."""
    return Digest(len(tokens), _sampled(tokens).hexdigest())


def digest_of_borders(bodies: Sequence[tuple[int, NDArray[np.int64] | None]]) -> str:
    """``Digest.borders`` of bodies: the number of tokens of each, and where its documents begin, where that is known.

    Reads up to 256 MiB of the places of each body.
    """
    hashed = hashlib.sha256()
    for length, starts in bodies:
        hashed.update(f"{length} {'unknown' if starts is None else len(starts)} ".encode())
        if starts is not None:
            hashed.update(_sampled(starts.astype("<i8", copy=False)).digest())
    return hashed.hexdigest()


def _sampled(values: Tokens | NDArray[np.int64]) -> "hashlib._Hash":
    block = _DIGEST_BLOCK // values.dtype.itemsize
    if len(values) <= block * _DIGEST_BLOCKS:
        starts = list(range(0, len(values), block))
    else:
        starts = np.linspace(0, len(values) - block, num=_DIGEST_BLOCKS).astype(np.int64).tolist()
    hashed = hashlib.sha256()
    for start in starts:
        hashed.update(values[start : start + block].tobytes())
    return hashed
