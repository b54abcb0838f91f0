"""The index of a checkpoint: where in the data files each tensor's elements lie. The index is a part of the manifest.

    "files":   [["__0_0.distcp", 9800], ["__1_0.distcp", 9672]]
    "tensors": {"model.up.weight": {"dtype": "bfloat16", "shape": [17, 15],
                                    "chunks": [[128, 0, 768, 2190183011], [127, 1, 704, 871223907]]}}

A chunk is a range of the flattened tensor whose bytes lie together in one file: number of elements, number of the file,
position of the first byte, CRC-32 of the bytes. Chunks are in the order of elements, so that no element can be in two
chunks, and the numbers of elements add up to the tensor's. Elements are stored row by row, in the byte order of the
machine.
"""

import math
import re
import reprlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...plan.ranges import Range
from .typed_json import dtype_name, dtype_named, expect, shape_from_json

__all__ = ["Chunk", "Index", "StoredTensor"]

_FILE = re.compile(r"\w{1,100}\.distcp", re.ASCII)


class Chunk(NamedTuple):
    """Elements [start, end) of a flattened tensor."""

    start: int
    end: int
    file: str
    position: int
    """Position of the first byte in the file."""
    checksum: int
    """CRC-32 of the bytes."""

    @property
    def range(self) -> Range:
        """The elements, counted in the flattened tensor."""
        return Range(self.start, self.end)


class StoredTensor(NamedTuple):
    """A tensor in the data files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    """All chunks of the tensor, in the order of elements."""

    @property
    def description(self) -> str:
        """Dtype and shape, in words."""
        return f"{dtype_name(self.dtype)} {list(self.shape)}"

    def overlapping(self, start: int, end: int) -> Iterator[Chunk]:
        """The chunks that hold elements of [start, end)."""
        at = bisect_right(self.chunks, start, key=lambda chunk: chunk.end)
        while at < len(self.chunks) and self.chunks[at].start < end:
            yield self.chunks[at]
            at += 1


class Index(NamedTuple):
    """All tensors of a checkpoint."""

    files: Mapping[str, int]
    """Data file -> its size in bytes."""
    tensors: Mapping[str, StoredTensor]

    def to_json(self) -> dict[str, Any]:
        """The index as fields of the manifest."""
        place = {name: number for number, name in enumerate(self.files)}
        tensors = {
            key: {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "chunks": [[end - start, place[file], *where] for start, end, file, *where in tensor.chunks],
            }
            for key, tensor in self.tensors.items()
        }
        return {"files": [list(file) for file in self.files.items()], "tensors": tensors}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Index":
        """The index in a manifest. No memory is allocated for the tensors.

        Raises ``TypeError``, ``ValueError`` or ``KeyError`` for an impossible index: elements in no file or outside
        their file, and tensors of more bytes than the files have.
        """
        files = [_parse_file(file) for file in expect(list, content["files"], "files")]
        left = [size for _, size in files]
        tensors = {
            key: _parse_tensor(key, entry, files, left)
            for key, entry in expect(dict, content["tensors"], "tensors").items()
        }
        if len(dict(files)) != len(files):
            raise ValueError("a data file is listed twice")
        return cls(dict(files), tensors)


def _parse_file(file: Any) -> tuple[str, int]:
    name, size = expect(list, file, "a data file")
    if not _FILE.fullmatch(expect(str, name, "the name of a data file")):
        raise ValueError(f"{reprlib.repr(name)} is no name of a data file")
    return name, expect(int, size, f"the size of '{name}'")


def _parse_tensor(key: str, entry: Any, files: Sequence[tuple[str, int]], left: list[int]) -> StoredTensor:
    """left: bytes of each file that no chunk has claimed; so few bytes cannot be claimed by many tensors."""
    dtype, shape = dtype_named(entry["dtype"]), shape_from_json(entry["shape"], key)
    chunks, start = [], 0
    for numbers in expect(list, entry["chunks"], f"the chunks of '{key}'"):
        if type(numbers) is not list or [type(number) for number in numbers] != [int] * 4:
            raise TypeError(f"{reprlib.repr(numbers)} as a chunk of '{key}'")
        count, file, position, checksum = numbers
        if min(numbers) < 0 or file >= len(files):
            raise ValueError(f"{reprlib.repr(numbers)} as a chunk of '{key}'")
        name, size = files[file]
        left[file] -= count * dtype.itemsize
        if position + count * dtype.itemsize > size or left[file] < 0:
            raise ValueError(f"a chunk of '{key}' of {reprlib.repr(count)} elements does not fit into '{name}'")
        chunks.append(Chunk(start, start + count, name, position, checksum))
        start += count
    if start != math.prod(shape):
        raise ValueError(f"'{key}' of shape {list(shape)} has chunks of {start} elements")
    return StoredTensor(dtype, shape, chunks)
