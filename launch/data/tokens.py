"""Tokens that stay in a file until they are asked for, and digests by which tokens are told apart.

Files are read and not memory-mapped: a mapped file that shrinks kills the process with a signal that names no file.
"""

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .joined import ArrowTokens, JoinedTokens, TokenRange

__all__ = ["DataError", "Digest", "FileTokens", "Tokens", "digest_of", "digest_of_borders", "part_of"]

_DIGEST_BLOCK = 2**18
_DIGEST_BLOCKS = 1024
"""A digest reads at most ``_DIGEST_BLOCKS`` blocks of ``_DIGEST_BLOCK`` bytes, evenly spread: 256 MiB."""


class DataError(ValueError):
    """Data that cannot be trained on; the message names the file and the remedy."""


class FileTokens(TokenRange):
    """Tokens [start, stop) of a file, one dim; ``tokens[a:b]`` reads some of them.

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
        self._path = path
        self._start, self._stop = 0, size // dtype.itemsize
        self._lock = threading.Lock()

    def __getitem__(self, place: slice) -> "NDArray[np.unsignedinteger]":
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError("tokens are read in a row")
        found = np.empty(max(0, stop - start), dtype=self.dtype)
        buffer: Any = found.view(np.uint8)  # a buffer, but the stubs for Python 3.11 do not say so
        begin, memory, filled = (self._start + start) * self.dtype.itemsize, memoryview(buffer), 0
        try:
            with self._lock:
                self._file.seek(begin)
                while filled < len(memory):  # a read may return fewer bytes than asked for
                    count = self._file.readinto(memory[filled:])
                    if not count:
                        break
                    filled += count
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if filled < len(memory):
            raise DataError(
                f"data file '{self._path}' has become shorter since the run began: {self._bytes_left()} bytes are "
                f"there, and tokens up to byte {begin + len(memory)} are to be read; put it back as it was, and go on "
                f"from the last checkpoint with train.resume"
            )
        return found

    def _bytes_left(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file. Parts of these tokens share the file and cannot be read any more."""
        self._file.close()


Tokens = NDArray[np.unsignedinteger] | FileTokens | JoinedTokens | ArrowTokens


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data file '{path}' cannot be read ({error.strerror}); correct its permissions, or data.paths")


def part_of(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Tokens [start, stop) of ``tokens``. Reads nothing from files."""
    return tokens[start:stop] if isinstance(tokens, np.ndarray) else tokens.part(start, stop)


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
