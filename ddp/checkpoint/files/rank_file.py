"""One rank's data file, in the safetensors format: the boxes that this rank wrote, and a checksum of each.

    rank-00007.safetensors   model.embed.weight            [151936, 1024]   all of the tensor
                             master.up.weight[12,0]        [5, 1024]        rows 12 to 16

An entry's name has the offsets of its box unless it is the whole tensor. The metadata of the header hold the id of the
save with the name of the file, and the CRC-32 of each entry, in the order of names.

Files of two saves have the same names and sizes. Ids tell them apart before a load changes the model.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .boxes import Box, Part

__all__ = [
    "FILE_NAME",
    "TYPE_NAMES",
    "RankFile",
    "file_name",
    "may_be_head",
    "size_of",
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

FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors", re.ASCII)
"""Names of data files."""
_PREFIX = "maingrad-"
_OF, _CHECKSUMS = "maingrad.of", "maingrad.crc32"
_HEAD = f'{{"__metadata__":{{"{_OF}":"{_PREFIX}'.encode()
"""What the header of each of our files begins with, behind its length in 8 bytes."""
_ALIGNMENT = 64
_BLOCK = 2**20
"""Bytes that are checked and then copied: few enough to stay in a core's cache meanwhile."""


def file_name(rank: int) -> str:
    """Name of the data file of a rank of the group that writes."""
    return f"rank-{rank:05d}.safetensors"


def may_be_head(file: BinaryIO) -> bool:
    """Whether a data file begins as some save's does, as far as it was written: it may be empty."""
    found = file.read(8 + len(_HEAD))
    is_of_version_3 = _PREFIX.encode().startswith(found[: len(_PREFIX)])
    return is_of_version_3 or (len(found) > 8 and _HEAD.startswith(found[8:]))


def write_rank_file(path: Path, save_id: str, parts: Sequence[Part]) -> None:
    """Write the parts. The file gets its name when all of its bytes are on the disk.

    Tensors on devices are copied to the host one at a time. Raises ``OSError`` with the file's name.
    """
    # Readers view the bytes of an entry as elements in place: the widest come first, so that all lie aligned.
    parts = sorted(parts, key=lambda part: -part.dtype.itemsize)
    entries, position = {}, 0
    for part in parts:
        dtype, sizes = _stored_as(part.dtype, part.data.shape)
        place = [position, position + part.data.numel() * part.dtype.itemsize]
        entries[_entry_name(part)] = {"dtype": TYPE_NAMES[dtype], "shape": sizes, "data_offsets": place}
        position = place[1]
    checksums = dict.fromkeys(entries, 0)
    staging = path.with_name(f"{path.name}.tmp")
    try:
        with staging.open("wb") as file:
            file.write(_head(_of(save_id, path), entries, checksums))
            for name, part in zip(entries, parts, strict=True):
                checksums[name] = _append(file, part.data.to(part.dtype))
            file.seek(0)
            file.write(_head(_of(save_id, path), entries, checksums))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # the error of a write does not name the file
        raise OSError(error.errno, error.strerror, str(staging)) from error
    staging.replace(path)


def _append(file: BinaryIO, tensor: Tensor) -> int:
    """Write the elements. Returns their checksum."""
    checksum, content = 0, _bytes_of(tensor)
    for at in range(0, len(content), _BLOCK):
        block = content[at : at + _BLOCK]
        checksum = zlib.crc32(block, checksum)
        file.write(block)
    return checksum


def size_of(path: Path) -> int:
    """Bytes of a data file. Raises ``ValueError`` where there is none."""
    if not path.is_file():
        raise ValueError(f"the data file '{path}' is missing (a checkpoint lies on a file system that all ranks share)")
    return path.stat().st_size


class RankFile:
    """A data file to read. Its bytes are mapped into memory: they stay those of this save when the file is replaced.

    Raises ``ValueError`` for a file that is missing, truncated, damaged or of another save.
    """

    def __init__(self, path: Path, save_id: str) -> None:
        self._path = path
        size_of(path)
        try:
            with path.open("rb") as opened:  # safe_open opens its file twice, and both must be the same one
                self._file = file = cast(Any, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt", device="cpu"))
            metadata, names = file.metadata() or {}, sorted(file.keys())
            self._checksums = dict(zip(names, metadata.get(_CHECKSUMS, "").split(), strict=True))
        except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"the data file '{path}' is truncated or damaged ({error})") from None
        found, expected = metadata.get(_OF), _of(save_id, path)
        if found != expected:
            raise ValueError(
                f"the data file '{path}' is '{found}', and the manifest beside it belongs to '{expected}': files of "
                f"two checkpoints are mixed in this folder, or have been renamed"
            )

    def elements(self, part: Part, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of the tensor of which ``part`` is wanted, on the CPU: a view of the file, which is not read yet."""
        name, stored = _entry_name(part, box), _stored_as(dtype, box.sizes)
        try:
            tensor: Tensor = self._file.get_tensor(name)
            found = tensor.dtype, tuple(tensor.shape)
            if found != stored:
                raise ValueError(f"it is {found} there, and {stored} in the manifest")
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"'{self._path}' is damaged where '{name}' lies ({error})") from None
        return tensor if dtype in TYPE_NAMES else tensor.view(dtype).view(box.sizes)

    def read(self, box: Box, elements: Tensor, parts: Sequence[Part]) -> None:
        """Copy ``elements``, which are those of ``box``, to where ``parts`` want them; values are rounded to the dtypes
        there.

        Raises ``ValueError`` unless the bytes are those that were written.
        """
        checksum = 0
        for block in box.split(max(1, _BLOCK // elements.itemsize)):
            here = box.view_of(block, elements)
            checksum = zlib.crc32(_bytes_of(here), checksum)
            for part in parts:
                both = block.intersect(part.box)
                if both is not None:
                    part.box.view_of(both, part.data).copy_(block.view_of(both, here))
        name = _entry_name(parts[0], box)
        found, written = f"{checksum:08x}", self._checksums[name]
        if found != written:
            raise ValueError(
                f"'{self._path}' is damaged where '{name}' lies: its bytes have checksum {found}, and {written} when "
                f"they were written"
            )


def _entry_name(part: Part, box: Box | None = None) -> str:
    """box  another than the part's own"""
    box = box or part.box
    name = f"{part.section}.{part.name}"
    if box.sizes == part.shape and not name.endswith("]"):
        return name
    return f"{name}[{','.join(map(str, box.offsets))}]"


def _of(save_id: str, path: Path) -> str:
    return f"{save_id} {path.name}"


def _stored_as(dtype: torch.dtype, sizes: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of an entry."""
    return (dtype, tuple(sizes)) if dtype in TYPE_NAMES else (torch.uint8, (*sizes, dtype.itemsize))


def _head(of: str, entries: dict[str, Any], checksums: dict[str, int]) -> bytes:
    """The header: as many bytes whatever the checksums are."""
    in_order = " ".join(f"{checksums[each]:08x}" for each in sorted(checksums))
    metadata = {_OF: of, _CHECKSUMS: in_order}
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _bytes_of(tensor: Tensor) -> Any:
    """The tensor's elements, row by row, as a buffer of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
