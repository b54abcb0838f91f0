"""Finds the bytes of a tensor in a zip archive of ``torch.save``, and their checksum.

The archive holds a pickle that describes the tensor, the tensor's bytes, uncompressed, and a CRC-32 of each entry.
``torch.save`` computes the CRC-32 while it writes; ``torch.load`` does not compare it.
"""

import io
import struct
import zipfile
import zlib
from typing import BinaryIO

import torch

__all__ = ["place_in_archive"]

_BLOCK = 2**18
"""Bytes of one read."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def place_in_archive(file: BinaryIO, offset: int, length: int, nbytes: int) -> tuple[int, int]:
    """(position in ``file``, CRC-32) of the bytes of a tensor.

    offset, length  of the tensor's archive in ``file``, in bytes
    nbytes          size of the tensor in bytes: raises ``ValueError`` where the archive holds another number
    """
    with zipfile.ZipFile(_FileWindow(file, offset, length)) as directory:
        entry = next(entry for entry in directory.infolist() if entry.filename.endswith("/data/0"))
    if entry.file_size != nbytes or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"torch.save has written {entry.file_size} bytes for a tensor of {nbytes}")
    header_at = offset + entry.header_offset
    file.seek(header_at)
    _, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    position = header_at + _LOCAL_HEADER.size + name_length + extra_length
    if torch.serialization.get_crc32_options():
        return position, entry.CRC
    file.seek(position)  # torch was told to compute no CRC-32
    checksum = 0
    for at in range(0, nbytes, _BLOCK):
        checksum = zlib.crc32(file.read(min(_BLOCK, nbytes - at)), checksum)
    return position, checksum


class _FileWindow(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + position
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        found = self._file.read(left if count is None or count < 0 else min(count, left))
        self._at += len(found)
        return found
