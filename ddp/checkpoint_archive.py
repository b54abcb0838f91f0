"""Reads a tensor that torch.save wrote right into the memory where it belongs, and checks its bytes on the way.

torch.save writes a zip archive: a pickle that describes the tensor, its bytes, and a CRC-32 of each. torch.load looks
at no CRC, and copies the bytes twice. Here they are read once, into their place, and compared with the CRC while they
are in the cache. Whatever is not a plain tensor (a transposed one, another byte order) is left to torch.load, after
its archive was checked as a whole. Nothing is allocated that the caller has not asked for.

Archives without any CRC (``torch.serialization.set_crc32_options(False)``) are read unchecked.
"""

import ctypes
import io
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .checkpoint_pickle import PickledTensor, read_tensor_pickle

__all__ = ["OtherTensor", "read_archive", "size_and_checksum"]

_BLOCK = 2**18
"""Bytes that are read and checked at a time: they stay in a core's cache."""
_MOST_AT_ONCE = 2**17
"""Bytes of an archive's directory and of what describes the tensor."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def read_archive(file: BinaryIO, offset: int, length: int, target: Tensor) -> Any:
    """Fill ``target`` from the archive in bytes [offset, offset + length) of ``file``; returns what the archive has.

    target  a contiguous CPU tensor of the dtype and sizes that the archive should have

    Returns ``target``; or, where the archive has no plain tensor, what torch.load makes of it. Raises `OtherTensor` for
    a tensor of another dtype or sizes, ``ValueError`` for bytes that differ from what was written; archives that are
    damaged otherwise raise nearly anything.
    """
    archive = _Archive.open(file, offset, length)
    described = archive.describe()
    if described is not None and (described.dtype, described.sizes) != (target.dtype, target.shape):
        raise OtherTensor(f"{described.dtype} {list(described.sizes)}")
    if described is None or not described.is_contiguous():
        return archive.load(target.nbytes)
    try:
        archive.read_into(archive.records["data/0"], _memory_of(target))
    finally:
        torch.autograd.graph.increment_version(target)  # as copy_ does: whoever compares versions sees the change
    return target


def size_and_checksum(path: Path) -> tuple[int, int]:
    """How many bytes a file has, and their CRC-32."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum


class OtherTensor(ValueError):
    """The archive has a tensor of another dtype or sizes; the message says which."""


class _Part(io.RawIOBase):
    """Bytes [offset, offset + length) of a file as a file of their own, of which little is read at once."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + position < 0:
            raise OSError(f"byte {start + position}")
        self._at = start + position
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if count is None or count < 0 else min(count, left)
        if count > _MOST_AT_ONCE:
            raise ValueError(f"{count} bytes that are not the tensor's")
        self._file.seek(self._offset + self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found


class _Archive(NamedTuple):
    file: BinaryIO
    start: int
    """Its first byte in the file."""
    length: int
    records: dict[str, zipfile.ZipInfo]
    """By their names within the archive's one folder."""
    checked: bool
    """It was written with checksums."""

    @classmethod
    def open(cls, file: BinaryIO, offset: int, length: int) -> "_Archive":
        with zipfile.ZipFile(_Part(file, offset, length)) as directory:
            entries = directory.infolist()
        for entry in entries:  # nothing grows when it is read
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > length:
                raise ValueError(f"'{entry.filename}' is not stored as it is")
        records = {entry.filename.partition("/")[2]: entry for entry in entries}
        return cls(file, offset, length, records, any(entry.CRC for entry in entries))

    def describe(self) -> PickledTensor | None:
        """What the bytes are; None for what only torch.load knows."""
        described = read_tensor_pickle(self.read("data.pkl"))
        order = self.read("byteorder").decode() if "byteorder" in self.records else "little"
        return described if order == sys.byteorder else None

    def read(self, name: str) -> bytes:
        """A small record."""
        entry = self.records[name]
        if entry.file_size > _MOST_AT_ONCE:
            raise ValueError(f"'{name}' has {entry.file_size} bytes")
        found = bytearray(entry.file_size)
        self.read_into(entry, memoryview(found))
        return bytes(found)

    def read_into(self, entry: zipfile.ZipInfo, memory: memoryview) -> None:
        """All bytes of a record. Raises ``ValueError`` where they are others, or more or fewer than fit."""
        if entry.file_size != len(memory):
            raise ValueError(f"{entry.file_size} bytes where {len(memory)} belong")
        header_at = self.start + entry.header_offset
        self.file.seek(header_at)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(self.file.read(_LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise ValueError("no record where its directory has one")
        self.file.seek(header_at + _LOCAL_HEADER.size + name_length + extra_length)
        checksum = 0
        for at in range(0, len(memory), _BLOCK):
            block = memory[at : at + _BLOCK]
            if self.file.readinto(block) != len(block):  # type: ignore[attr-defined]
                raise ValueError("the end is missing")
            checksum = zlib.crc32(block, checksum)
        if self.checked and checksum != entry.CRC:
            raise ValueError(f"its bytes have checksum {checksum:08x}, and when they were written {entry.CRC:08x}")

    def load(self, nbytes: int) -> Any:
        """By torch.load, whatever it is, but of no more bytes than a tensor of ``nbytes`` takes."""
        if self.length > nbytes + _MOST_AT_ONCE:
            raise ValueError(f"{self.length} bytes for a tensor of {nbytes}")
        self.file.seek(self.start)
        data = self.file.read(self.length)
        if self.checked:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the bytes of '{damaged}' have another checksum than when they were written")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive the view. NumPy has no view of every dtype."""
    if not tensor.is_cpu:
        raise ValueError(f"memory of {tensor.device}")
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
