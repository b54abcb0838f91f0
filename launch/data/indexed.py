"""Megatron's token files: ``PREFIX.bin`` holds token ids, ``PREFIX.idx`` says where sequences and documents begin.

The index, little-endian:

    9 bytes  "MMIDIDX", 0, 0
    uint64   version, 1
    uint8    dtype of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6 and 7 are floats)
    uint64   S, number of sequences
    uint64   D, number of entries in the list of documents
    int32    [S] tokens in each sequence
    int64    [S] byte in PREFIX.bin at which each sequence begins
    int64    [D] sequence with which each document begins; first 0, last S

A document that is longer than an int32 can say is several sequences.
"""

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .replacing import replacing
from .tokens import DataError, FileTokens

__all__ = ["IndexedTokens", "Written", "read_indexed", "write_indexed"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    8: np.uint16,
}
"""Token ids are not negative: signed types are read as the unsigned ones of their size."""
_CODES = {"uint8": 1, "int32": 4, "uint16": 8}
_LONGEST = 2**31 - 1
"""Most tokens of a sequence: lengths are int32."""


class IndexedTokens(NamedTuple):
    """What a pair of files holds."""

    tokens: FileTokens
    starts: NDArray[np.int64]
    """[documents] place of the first token of each document; the first is 0."""


def read_indexed(prefix: str | os.PathLike[str]) -> IndexedTokens:
    """Open ``PREFIX.bin`` and ``PREFIX.idx``. Raises ``DataError`` for missing or damaged files, and for no pair."""
    stem = os.fspath(prefix).removesuffix(".bin").removesuffix(".idx")
    path = Path(f"{stem}.idx")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"index file '{path}' cannot be read ({error.strerror}); data.paths names the prefix of PREFIX.bin and "
            f"PREFIX.idx (working directory: {Path.cwd()})"
        ) from None
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"'{path}' is no index file of Megatron: it does not begin with MMIDIDX; correct data.paths")
    _, version, code, num_sequences, num_documents = _HEADER.unpack_from(data)
    if version != _VERSION or code not in _DTYPES:
        raise DataError(
            f"index file '{path}' has version {version} and dtype code {code}; this reads version {_VERSION} and codes "
            f"{', '.join(map(str, _DTYPES))}; write it again with maingrad tokenize"
        )
    if len(data) < _HEADER.size + 12 * num_sequences + 8 * num_documents:
        raise DataError(f"index file '{path}' is cut off: it declares {num_sequences} sequences; copy it again")
    lengths = np.frombuffer(data, "<i4", num_sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_documents, _HEADER.size + 12 * num_sequences)
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    places = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if (lengths < 0).any() or not np.array_equal(pointers, places[:-1] * dtype.itemsize):
        raise DataError(f"index file '{path}': sequences do not follow each other in the file; write the pair again")
    if (documents < 0).any() or (documents > num_sequences).any() or (np.diff(documents) < 0).any():
        raise DataError(
            f"index file '{path}' names documents beyond its {num_sequences} sequences; write the pair again"
        )
    tokens = FileTokens(Path(f"{stem}.bin"), dtype)
    if len(tokens) != places[-1]:
        raise DataError(
            f"'{stem}.bin' holds {len(tokens)} tokens and '{path}' declares {places[-1]}: they are not of one pair"
        )
    starts = places[np.unique(np.concatenate([[0], documents]))]
    return IndexedTokens(tokens, np.unique(starts[starts < len(tokens)]))


def _sequences_of(length: int) -> list[int]:
    """Lengths of the sequences of a document of ``length`` tokens."""
    full, rest = divmod(length, _LONGEST)
    return [_LONGEST] * full + [rest] * bool(rest)


class Written(NamedTuple):
    """What has been written."""

    documents: int
    tokens: int


def write_indexed(prefix: str | os.PathLike[str], documents: Iterable[ArrayLike], *, dtype: str) -> Written:
    """Write ``PREFIX.bin`` and ``PREFIX.idx`` from token ids of documents; those without a token are left out.

    dtype  ``"uint8"``, ``"uint16"`` or ``"int32"``

    The files appear under their names when they are whole: an error leaves none. Raises ``DataError`` for an id that
    the dtype cannot hold.
    """
    stored, limit = np.dtype(dtype).newbyteorder("<"), np.iinfo(dtype).max
    lengths: list[int] = []  # tokens of each sequence
    firsts = [0]  # the sequence with which each document begins, and at last the number of sequences
    stem = os.fspath(prefix)
    Path(stem).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(f"{stem}.idx"), "wb") as index, replacing(Path(f"{stem}.bin"), "wb") as binary:
        for document in documents:
            ids = np.asarray(document, dtype=np.int64)
            if not len(ids):
                continue
            if ids.min() < 0 or ids.max() > limit:
                raise DataError(f"token ids {ids.min()} to {ids.max()} do not fit {dtype}; choose a wider dtype")
            ids.astype(stored).tofile(binary)
            lengths += _sequences_of(len(ids))
            firsts.append(len(lengths))
        counts = np.asarray(lengths, dtype=np.int64)
        index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(counts), len(firsts)))
        index.write(counts.astype("<i4").tobytes())
        index.write(((np.cumsum(counts) - counts) * stored.itemsize).astype("<i8").tobytes())
        index.write(np.asarray(firsts, dtype="<i8").tobytes())
    return Written(len(firsts) - 1, int(counts.sum()))
