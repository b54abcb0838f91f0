"""Opens and checks a checkpoint's folder, and reads tensors from the files directly into the caller's memory.

Each rank reads by itself, by the manifest's index: no archive is opened and nothing is unpickled. Bytes are read once,
and their checksum is computed while they are in the cache. Where a rank needs only elements of a chunk, the other bytes
pass through a small buffer.
"""

import ctypes
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from .boxes import TensorSlice, boxes_of_range
from .folder import describe_missing, find
from .index import Chunk, Index
from .manifest import Manifest
from .save_id import check_head

__all__ = ["Stored", "check_files", "check_stored", "open_checkpoint", "read_slices"]

_BLOCK = 2**18
"""Bytes of one read: few enough to stay in a core's cache until they are checked."""


class Stored(NamedTuple):
    """An opened checkpoint: its folder and its manifest."""

    folder: Path
    """The folder to read: beside the checkpoint's path where a save died before the last rename."""
    manifest: Manifest


def open_checkpoint(path: Path, *, check_sizes: bool = True) -> Stored:
    """Open the checkpoint at ``path``. Needs no process group.

    check_sizes  check every data file's size and id

    Raises ``FileNotFoundError``, and ``ValueError`` for a folder that is no complete checkpoint.
    """
    folder = find(path)
    if not folder.exists():
        raise FileNotFoundError(describe_missing(folder))
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is a file, and a checkpoint is a folder")
    manifest = Manifest.read(folder)
    _check_told(manifest)
    if check_sizes:
        try:
            check_files(folder, manifest.index, manifest.save_id)
        except (ValueError, OSError):
            if Manifest.read(folder).save_id != manifest.save_id:
                raise ValueError(
                    f"'{folder}' was replaced by another save while it was opened: load it again"
                ) from None
            raise
    return Stored(folder, manifest)


def check_files(folder: Path, index: Index, save_id: str) -> None:
    """Raise ``ValueError`` where a data file is missing, shorter than it was written, or of another save."""
    for name, size in index.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(
                f"the data file '{path}' is missing, with elements of '{_last_in(index, name)}' (a checkpoint lies on "
                f"a file system that all ranks share)"
            )
        actual = path.stat().st_size
        if actual < size:
            raise ValueError(
                f"the data file '{path}' is truncated: {actual} of {size} bytes, '{_last_in(index, name)}' is cut off"
            )
        with path.open("rb") as file:
            check_head(file, path, save_id)


def _last_in(index: Index, file: str) -> str:
    """The last tensor in a file."""
    places = (
        (chunk.position, key) for key, tensor in index.tensors.items() for chunk in tensor.chunks if chunk.file == file
    )
    return max(places, default=(0, "nothing"))[1]


def _check_told(manifest: Manifest) -> None:
    """Raise ``ValueError`` unless the index and the rest of the manifest name the same tensors and shapes."""
    told = {f"model.{name}": entry.shape for name, entry in {**manifest.parameters, **manifest.buffers}.items()}
    for name, entry in manifest.parameters.items():
        told.update({f"optimizer.state.{name}.{key}": entry.shape for key in entry.state})
        if entry.has_master:
            told[f"master.{name}"] = entry.shape
    stored = manifest.index.tensors
    for key, shape in told.items():
        if key not in stored:
            raise ValueError(f"'{key}' is missing in the index of the checkpoint's manifest, which names it elsewhere")
        if stored[key].shape != shape:
            raise ValueError(
                f"'{key}' is {list(stored[key].shape)} in the index of the checkpoint's manifest, and {list(shape)} "
                f"elsewhere in it"
            )
    if len(stored) > len(told):
        unknown = min(set(stored) - set(told))
        raise ValueError(f"'{unknown}' is in the index of the checkpoint's manifest, and nowhere else in it")


def check_stored(index: Index, slices: Sequence[TensorSlice]) -> None:
    """Raise ``ValueError`` for a slice of a tensor that the index lacks, or has in another shape or dtype."""
    for part in slices:
        stored = index.tensors.get(part.key)
        if stored is None:
            raise ValueError(f"'{part.key}' is missing in the index of the checkpoint's manifest")
        if (stored.shape, stored.dtype) != (part.shape, part.data.dtype):
            raise ValueError(
                f"'{part.key}' is {stored.description} in the index of the checkpoint's manifest, though the rest of "
                f"it has {part.data.dtype} {list(part.shape)}"
            )


def read_slices(stored: Stored, slices: Sequence[TensorSlice]) -> None:
    """Fill the slices' memory, on any device.

    Raises ``ValueError``, naming the tensor, for a file whose bytes are not those that were written.
    """
    index, save_id = stored.manifest.index, stored.manifest.save_id
    # Most elements are read without copy_, which would increment the version that optimizers compare.
    torch.autograd.graph.increment_version([part.data for part in slices])
    wanted: dict[tuple[Chunk, str], list[TensorSlice]] = {}
    for part in slices:
        for chunk in index.tensors[part.key].overlapping(part.start, part.end):
            wanted.setdefault((chunk, part.key), []).append(part)
    in_order = sorted(wanted, key=lambda each: (each[0].file, each[0].position))
    scratch = memoryview(bytearray(_BLOCK))
    for name, chunks in itertools.groupby(in_order, key=lambda each: each[0].file):
        path = stored.folder / name
        with path.open("rb") as file:
            check_head(file, path, save_id)
            for chunk, key in chunks:
                overlaps = [_Overlap.of(part, chunk) for part in wanted[chunk, key]]
                try:
                    _read_chunk(file, chunk, index.tensors[key].dtype.itemsize, overlaps, scratch)
                except (ValueError, OSError) as error:
                    raise ValueError(
                        f"'{path}' is damaged where '{key}' lies ({type(error).__name__}: {error})"
                    ) from error
                for overlap in overlaps:
                    overlap.finish()


class _Overlap(NamedTuple):
    """Elements [start, end) of a tensor that are both in a slice and in a chunk."""

    wanted: TensorSlice
    start: int
    end: int
    landing: Tensor
    """[end - start] contiguous CPU memory to read into: a view of the slice's memory where that is possible."""

    @classmethod
    def of(cls, wanted: TensorSlice, chunk: Chunk) -> "_Overlap":
        start, end = wanted.range.intersect(chunk.range)
        if wanted.data.is_cpu and wanted.data.is_contiguous():
            return cls(wanted, start, end, wanted.data.view(-1)[start - wanted.start : end - wanted.start])
        return cls(wanted, start, end, torch.empty(end - start, dtype=wanted.data.dtype, device="cpu"))

    def finish(self) -> None:
        """All elements are read: copy them to the slice, unless they were read into it."""
        data, first = self.wanted.data, self.wanted.start
        if data.is_cpu and data.is_contiguous():
            return
        if data.ndim == 1 or data.is_contiguous():
            data.view(-1)[self.start - first : self.end - first].copy_(self.landing)
            return
        for box in boxes_of_range(data.shape, self.start, self.end):
            target = data
            for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(dim, offset, length)
            target.copy_(self.landing[box.start - self.start : box.end - self.start].view(box.sizes))


def _read_chunk(file: BinaryIO, chunk: Chunk, itemsize: int, overlaps: Sequence[_Overlap], scratch: memoryview) -> None:
    """Read all of a chunk, keep the overlaps. Raises ``ValueError`` where the checksum differs."""
    # (first, end, memory): bytes [first, end) of the chunk go into this memory.
    places = [
        ((each.start - chunk.start) * itemsize, (each.end - chunk.start) * itemsize, _memory_of(each.landing))
        for each in overlaps
    ]
    nbytes = (chunk.end - chunk.start) * itemsize
    file.seek(chunk.position)
    checksum = 0
    for at in range(0, nbytes, _BLOCK):
        until = min(at + _BLOCK, nbytes)
        here = [place for place in places if place[0] < until and at < place[1]]
        first, end, memory = here[0] if len(here) == 1 else (nbytes, 0, scratch)
        in_place = first <= at and until <= end
        block = memory[at - first : until - first] if in_place else scratch[: until - at]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise ValueError("the end is missing")
        checksum = zlib.crc32(block, checksum)
        for first, end, memory in () if in_place else here:
            low, high = max(at, first), min(until, end)
            memory[low - first : high - first] = block[low - at : high - at]
    if checksum != chunk.checksum:
        raise ValueError(f"its bytes have checksum {checksum:08x}, and when they were written {chunk.checksum:08x}")


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive the view. NumPy cannot view every dtype."""
    if not tensor.is_cpu:
        raise ValueError(f"memory of {tensor.device}")
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
