"""One rank's data file, in the safetensors format: the boxes that this rank wrote, and a checksum of each.

    rank-00007.safetensors   model.embed.weight            [151936, 1024]   all of the tensor
                             master.up.weight[12,0]        [5, 1024]        rows 12 to 16

An entry's name has the offsets of its box unless it is the whole tensor. The metadata of the header hold the id of the
save with the name of the file, and the CRC-32 of each entry, in the order of names.

Files of two saves have the same names and sizes. Ids tell them apart before a load changes the model.
"""

import json
import operator
import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import Box, Part, Parts
from .whole_file import whole_file

__all__ = [
    "Entry",
    "RankFile",
    "check_size",
    "file_name",
    "write_rank_file",
]

TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes. Elements of other dtypes are stored as their bytes, along one more dim."""

_OF, _CHECKSUMS = "maingrad.of", "maingrad.crc32"
_ALIGNMENT = 64
_BLOCK = 2**18
"""Bytes that are read or written, and checked, at a time: few enough to stay in a core's cache meanwhile."""
_SENT = 2**23
"""Bytes after which the disk begins to write them, beside the checksums of the next ones."""
_LONGEST_HEADER = 10**8
"""In bytes; the format's own limit."""


def file_name(rank: int) -> str:
    """Name of the data file of a rank of the group that writes."""
    return f"rank-{rank:05d}.safetensors"


def write_rank_file(path: Path, save_id: str, parts: Parts) -> None:
    """Write the parts. The file gets its name when all of its bytes are on the disk.

    Tensors on devices are copied to the host one at a time. Raises ``OSError`` with the file's name.
    """
    # Readers view the bytes of an entry as elements in place: the widest come first, so that all lie aligned.
    in_order = [(part, section, dtype) for part in parts for section, dtype in part.dtypes]
    in_order.sort(key=lambda each: -each[2].itemsize)
    entries: dict[str, dict[str, Any]] = {}
    position = 0
    for part, section, dtype in in_order:
        entry = _described(part.box, dtype, position)
        entries[_entry_name(part, section, part.box)] = entry
        position = entry["data_offsets"][1]
    checksums = dict.fromkeys(entries, 0)
    with whole_file(path) as file:
        file.write(_head(f"{save_id} {path.name}", entries, checksums))
        begun = 0
        for name, (part, section, dtype) in zip(entries, in_order, strict=True):
            for block in _blocks(parts[part][section].to(dtype)):
                checksums[name] = zlib.crc32(block, checksums[name])
                file.write(block)
                position = file.tell()
                if position - begun > _SENT and hasattr(os, "posix_fadvise"):  # macOS has none
                    # Linux begins to write these bytes to the disk; they are not on it yet, and stay in the cache.
                    os.posix_fadvise(file.fileno(), begun, position - begun, os.POSIX_FADV_DONTNEED)
                    begun = position
            block = None  # before the next tensor is copied or rounded, the memory of this one is free
        file.seek(0)
        file.write(_head(f"{save_id} {path.name}", entries, checksums))


def check_size(path: Path, nbytes: int) -> None:
    """Raise ``ValueError`` for a data file that is missing or has fewer bytes."""
    if not path.is_file():
        raise ValueError(f"the data file '{path}' is missing (a checkpoint lies on a file system that all ranks share)")
    size = path.stat().st_size
    if size < nbytes:
        raise ValueError(f"the data file '{path}' is truncated: {size} bytes, for tensors of {nbytes}")


class RankFile:
    """A data file to read. It stays open: its bytes are those of this save also after the file has been replaced.

    Raises ``ValueError`` for a file that is truncated, damaged or of another save.
    """

    def __init__(self, path: Path, save_id: str) -> None:
        self.path = path
        self.content = path.open("rb")
        weakref.finalize(self, self.content.close)
        size = os.stat(self.content.fileno()).st_size
        try:
            length = int.from_bytes(self.content.read(8), "little")
            self._begin = 8 + length
            entries = json.loads(self.content.read(min(length, size, _LONGEST_HEADER)))
            metadata = entries.pop("__metadata__")
            found = metadata[_OF]
            self._checksums = dict(zip(sorted(entries), metadata[_CHECKSUMS].split(), strict=True))
            self._entries: dict[str, Any] = entries
            self._starts = {name: operator.index(entry["data_offsets"][0]) for name, entry in entries.items()}
            end = self._begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the data file '{path}' is truncated or damaged ({error!r})") from None
        if end > size:
            raise ValueError(f"the data file '{path}' is truncated: {size} bytes of {end}")
        expected = f"{save_id} {path.name}"
        if found != expected:
            raise ValueError(
                f"the data file '{path}' is '{found}', and the manifest beside it belongs to '{expected}': files of "
                f"two checkpoints are mixed in this folder, or have been renamed"
            )

    def find(self, part: Part, section: str, box: Box, dtype: torch.dtype) -> "Entry":
        """The entry of a box of the tensor of which ``part`` is wanted."""
        name = _entry_name(part, section, box)
        start, found = self._starts.get(name, 0), self._entries.get(name)
        expected = _described(box, dtype, start)
        if found != expected or start < 0:
            raise ValueError(
                f"'{self.path}' is damaged where '{name}' lies (it is {found} there, and {expected} in the manifest)"
            )
        return Entry(self, name, box, dtype, self._begin + start, self._checksums[name], [])


class Entry(NamedTuple):
    """A box in a data file, and the parts that want elements of it."""

    file: RankFile
    name: str
    box: Box
    dtype: torch.dtype
    position: int
    """Place of its first byte in the file."""
    checksum: str
    """CRC-32 of its bytes when they were written."""
    wanted: list[tuple[Box, Tensor]]
    """What a part wants of the box, and where these elements go."""

    def read(self) -> None:
        """Copy the elements to where they are wanted; values are rounded to the dtypes there.

        Bytes go straight to where a single part wants all elements as they are stored.

        Raises ``ValueError`` unless the bytes are those that were written.
        """
        (both, view), *others = self.wanted
        as_stored = both == self.box and view.dtype is self.dtype and not (view.is_conj() or view.is_neg())
        in_place = as_stored and not others and view.is_cpu and view.is_contiguous()
        elements = view if in_place else torch.empty(self.box.sizes, dtype=self.dtype, device="cpu")
        if in_place:
            torch.autograd.graph.increment_version(view)  # optimizers compare versions
        checksum = 0
        self.file.content.seek(self.position)
        for block in _blocks(elements):
            if self.file.content.readinto(block) < len(block):
                raise ValueError(f"'{self.file.path}' is truncated where '{self.name}' lies")
            checksum = zlib.crc32(block, checksum)
        if f"{checksum:08x}" != self.checksum:
            raise ValueError(
                f"'{self.file.path}' is damaged where '{self.name}' lies: its bytes have checksum {checksum:08x}, and "
                f"{self.checksum} when they were written"
            )
        for both, view in () if in_place else self.wanted:
            view.copy_(self.box.view_of(both, elements))


def _entry_name(part: Part, section: str, box: Box) -> str:
    """Name of the entry of a box of the tensor of which ``part`` is another."""
    name = f"{section}.{part.name}"
    if box.sizes == part.shape and not name.endswith("]"):
        return name
    return f"{name}[{','.join(map(str, box.offsets))}]"


def _described(box: Box, dtype: torch.dtype, start: int) -> dict[str, Any]:
    """What the header says of a box whose first byte is at ``start``."""
    shape = [*box.sizes] if dtype in TYPE_NAMES else [*box.sizes, dtype.itemsize]
    place = [start, start + box.numel * dtype.itemsize]
    return {"dtype": TYPE_NAMES.get(dtype, "U8"), "shape": shape, "data_offsets": place}


def _head(of: str, entries: dict[str, Any], checksums: dict[str, int]) -> bytes:
    """The header: as many bytes whatever the checksums are."""
    metadata = {_OF: of, _CHECKSUMS: " ".join(f"{checksums[each]:08x}" for each in sorted(checksums))}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _blocks(tensor: Tensor) -> Iterator[Any]:
    """The tensor's elements, row by row, as bytes, a block at a time."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A dim of one element may have any stride, and view() wants 1.
    content: Any = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    for at in range(0, len(content), _BLOCK):
        yield content[at : at + _BLOCK]
