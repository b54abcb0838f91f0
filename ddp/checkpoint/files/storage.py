"""A checkpoint's folder as it is read: opened, checked, and its tensors read right into the memory where they belong.

Each rank reads by itself, by the manifest's index: no archive is opened and nothing is unpickled. Bytes are read once
and compared with their checksum while they are in the cache; of a chunk of which a rank wants a part the rest passes
through a small buffer. Nothing is allocated that the caller has not asked for.
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
"""Bytes that are read and checked at a time: they stay in a core's cache."""


class Stored(NamedTuple):
    """What a checkpoint holds, without its tensors."""

    folder: Path
    """Where it lies: beside its place where a save died before it was moved."""
    manifest: Manifest


def open_checkpoint(path: Path, *, check_sizes: bool = True) -> Stored:
    """What the checkpoint at ``path`` holds. No process group is needed.

    check_sizes  look at every data file's size, and which save it is of

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
    """The tensor that lies at the end of a file."""
    places = (
        (chunk.position, key) for key, tensor in index.tensors.items() for chunk in tensor.chunks if chunk.file == file
    )
    return max(places, default=(0, "nothing"))[1]


def _check_told(manifest: Manifest) -> None:
    """Raise ``ValueError`` unless the index has the tensors that the rest of the manifest tells of, and no other."""
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
    """Raise ``ValueError`` where a each is of a tensor that is not there, or of another shape or dtype."""
    for each in slices:
        stored = index.tensors.get(each.key)
        if stored is None:
            raise ValueError(f"'{each.key}' is missing in the index of the checkpoint's manifest")
        if (stored.shape, stored.dtype) != (each.shape, each.data.dtype):
            raise ValueError(
                f"'{each.key}' is {stored.description} in the index of the checkpoint's manifest, though the rest of "
                f"it has {each.data.dtype} {list(each.shape)}"
            )


def read_slices(stored: Stored, slices: Sequence[TensorSlice]) -> None:
    """Fill the slices' memory, on any device.

    Raises ``ValueError`` for a file that does not hold what was written, and names the tensor.
    """
    index, save_id = stored.manifest.index, stored.manifest.save_id
    # As copy_ does, which most elements go without: whoever compares versions sees the change.
    torch.autograd.graph.increment_version([each.data for each in slices])
    wanted: dict[tuple[Chunk, str], list[TensorSlice]] = {}
    for each in slices:
        for chunk in index.tensors[each.key].overlapping(each.start, each.end):
            wanted.setdefault((chunk, each.key), []).append(each)
    in_order = sorted(wanted, key=lambda each: (each[0].file, each[0].position))
    scratch = memoryview(bytearray(_BLOCK))
    for name, chunks in itertools.groupby(in_order, key=lambda each: each[0].file):
        path = stored.folder / name
        with path.open("rb") as file:
            check_head(file, path, save_id)
            for chunk, key in chunks:
                parts = [_Part.of(each, chunk) for each in wanted[chunk, key]]
                try:
                    _read_chunk(file, chunk, index.tensors[key].dtype.itemsize, parts, scratch)
                except (ValueError, OSError) as error:
                    raise ValueError(
                        f"'{path}' is damaged where '{key}' lies ({type(error).__name__}: {error})"
                    ) from error
                for part in parts:
                    part.finish()


class _Part(NamedTuple):
    """Elements [start, end) of a tensor that a each wants of a chunk."""

    each: TensorSlice
    start: int
    end: int
    landing: Tensor
    """Contiguous memory on the CPU for them: the each's own where that is such."""

    @classmethod
    def of(cls, each: TensorSlice, chunk: Chunk) -> "_Part":
        start, end = max(each.start, chunk.start), min(each.end, chunk.end)
        if each.data.is_cpu and each.data.is_contiguous():
            return cls(each, start, end, each.data.view(-1)[start - each.start : end - each.start])
        return cls(each, start, end, torch.empty(end - start, dtype=each.data.dtype, device="cpu"))

    def finish(self) -> None:
        """All elements have landed: take them to the each."""
        data, start = self.each.data, self.each.start
        if data.is_cpu and data.is_contiguous():
            return
        if data.ndim == 1 or data.is_contiguous():
            data.view(-1)[self.start - start : self.end - start].copy_(self.landing)
            return
        for box in boxes_of_range(data.shape, self.start, self.end):
            target = data
            for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(dim, offset, length)
            target.copy_(self.landing[box.start - self.start : box.end - self.start].view(box.sizes))


def _read_chunk(file: BinaryIO, chunk: Chunk, itemsize: int, parts: Sequence[_Part], scratch: memoryview) -> None:
    """Read all of a chunk, of which the parts are taken. Raises ``ValueError`` where its checksum is another."""
    # In bytes of the chunk: [first, end) goes into this memory.
    places = [
        ((part.start - chunk.start) * itemsize, (part.end - chunk.start) * itemsize, _memory_of(part.landing))
        for part in parts
    ]
    nbytes = (chunk.end - chunk.start) * itemsize
    file.seek(chunk.position)
    checksum = 0
    for at in range(0, nbytes, _BLOCK):
        until = min(at + _BLOCK, nbytes)
        here = [place for place in places if place[0] < until and at < place[1]]
        first, end, memory = here[0] if len(here) == 1 else (nbytes, 0, scratch)
        right_away = first <= at and until <= end
        block = memory[at - first : until - first] if right_away else scratch[: until - at]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise ValueError("the end is missing")
        checksum = zlib.crc32(block, checksum)
        for first, end, memory in () if right_away else here:
            low, high = max(at, first), min(until, end)
            memory[low - first : high - first] = block[low - at : high - at]
    if checksum != chunk.checksum:
        raise ValueError(f"its bytes have checksum {checksum:08x}, and when they were written {chunk.checksum:08x}")


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive the view. NumPy has no view of every dtype."""
    if not tensor.is_cpu:
        raise ValueError(f"memory of {tensor.device}")
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
