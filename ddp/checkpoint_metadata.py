"""Reads the ``.metadata`` file of torch.distributed.checkpoint (DCP) without trusting it.

The file is a pickle, and unpickling runs whatever a pickle names. Here it may name DCP's own record classes, dtypes and
sizes, and gets inert stand-ins for them (``checkpoint_pickle.py``); any other name is refused. What comes out is
checked field by field before DCP's real classes are built from it.
"""

import itertools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .checkpoint_boxes import check_tiling
from .checkpoint_id import check_head, known_id
from .checkpoint_manifest import METADATA_FILE
from .checkpoint_pickle import ForbiddenName, Record, read_pickle

__all__ = ["Extent", "check_files", "read_metadata"]

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
_VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}
_MOST_BYTES = 2**28
"""Of the file: that is some million chunks."""
_MORE_BYTES = 2**20
"""What a file may have more than it was written with, to be read for the error that says what it is."""
_LARGEST = 2**62
"""Sizes and offsets beyond it are none."""


@dataclass(frozen=True)
class Extent:
    """Where the bytes of one chunk lie. The names of the fields are those that DCP's readers ask for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(folder: Path, written_bytes: int | None = None) -> Metadata:
    """The metadata of a DCP checkpoint of tensors, in DCP's classes.

    written_bytes  the file's size when it was written: one that is far larger is not read

    Raises ``ValueError`` where the file names anything but metadata (a pickle that would run code), where it is
    missing or damaged, and where a tensor is not stored exactly once.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        raise ValueError(f"'{path}' is missing: where the tensors of this checkpoint lie is not known")
    most = _MOST_BYTES if written_bytes is None else min(_MOST_BYTES, written_bytes + _MORE_BYTES)
    if path.stat().st_size > most:
        raise ValueError(f"'{path}' is damaged: it has {path.stat().st_size} bytes, more than this metadata can have")
    data = path.read_bytes()
    try:
        return _rebuild(read_pickle(data, _RECORDS, _VALUES))
    except ForbiddenName as error:
        raise ValueError(
            f"'{path}' is no checkpoint metadata: it asks for {error}, which could run anything; nothing of it was "
            f"run. Do not load checkpoints from this source"
        ) from None
    except Exception as error:
        # Bytes that are no metadata raise nearly anything.
        raise ValueError(f"'{path}' is truncated or damaged ({type(error).__name__}: {error})") from error


def check_files(folder: Path, metadata: Metadata, save_id: str | None) -> None:
    """Raise ``ValueError`` where a data file is missing, shorter than the metadata says, or of another save."""
    needed: dict[str, tuple[int, str]] = {}
    for index, extent in metadata.storage_data.items():
        end = extent.offset + extent.length
        if end > needed.get(extent.relative_path, (-1, ""))[0]:
            needed[extent.relative_path] = (end, index.fqn)
    for name, (size, key) in needed.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(
                f"the data file '{path}' is missing, with elements of '{key}' (a checkpoint lies on a file system that "
                f"all ranks share)"
            )
        actual = path.stat().st_size
        if actual < size:
            raise ValueError(f"the data file '{path}' is truncated: {actual} of {size} bytes, '{key}' is cut off")
        with path.open("rb") as file:
            check_head(file, path, save_id)


def _rebuild(root: Any) -> Metadata:
    _expect(root, "Metadata")
    storage_data: dict[MetadataIndex, Any] = {}
    for index, info in root.field("storage_data").items():
        _expect(index, "MetadataIndex")
        _expect(info, "_StorageInfo")
        storage_data[MetadataIndex(_text(index.field("fqn")), _sizes(index.field("offset")))] = _extent(info)
    tensors: dict[str, Any] = {}
    num_chunks = 0
    for key, entry in root.field("state_dict_metadata").items():
        _expect(entry, "TensorStorageMetadata")
        dtype, size = entry.field("properties").state[0], torch.Size(_sizes(entry.field("size")))
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"'{key}' has no dtype")
        num_chunks += len(entry.field("chunks"))
        if num_chunks > len(storage_data):
            raise ValueError(f"more chunks than the {len(storage_data)} places")
        chunks = [_chunk(chunk) for chunk in entry.field("chunks")]
        try:
            check_tiling(size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
        except ValueError as error:
            raise ValueError(f"'{key}' of shape {list(size)}: {error}") from None
        for chunk in chunks:
            extent = storage_data.get(MetadataIndex(key, chunk.offsets))
            if extent is None:
                raise ValueError(f"a chunk of '{key}' lies nowhere")
            if math.prod(chunk.sizes) * dtype.itemsize > extent.length:
                raise ValueError(f"a chunk of '{key}' of sizes {list(chunk.sizes)} in {extent.length} bytes")
        tensors[_text(key)] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    if num_chunks != len(storage_data):
        raise ValueError(f"{num_chunks} chunks in {len(storage_data)} places")
    _check_apart(storage_data)
    storage_meta = root.state.get("storage_meta")
    if storage_meta is not None:
        _expect(storage_meta, "StorageMeta")
        storage_meta = StorageMeta(save_id=known_id(storage_meta.field("save_id")))
    return Metadata(tensors, storage_data=storage_data, storage_meta=storage_meta)


def _check_apart(storage_data: Mapping[MetadataIndex, Extent]) -> None:
    """Raise ``ValueError`` where one piece of a file is to be several chunks: few bytes would be many tensors."""
    by_place = sorted(storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    for (_, before), (index, after) in itertools.pairwise(by_place):
        if before.relative_path == after.relative_path and before.offset + before.length > after.offset:
            raise ValueError(f"'{index.fqn}' lies where another chunk does")


def _expect(value: Any, kind: str) -> None:
    if not isinstance(value, Record) or value.kind != kind:
        raise TypeError(f"a {getattr(value, 'kind', type(value).__name__)} where a {kind} belongs")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} where a name belongs")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise TypeError(f"{reprlib.repr(value)} where a size belongs")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"{reprlib.repr(value)} where sizes belong")
    return tuple(_natural(size) for size in value)


def _chunk(record: Any) -> ChunkStorageMetadata:
    _expect(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(torch.Size(_sizes(record.field("offsets"))), torch.Size(_sizes(record.field("sizes"))))


def _extent(record: Record) -> Extent:
    name = _text(record.field("relative_path"))
    if Path(name).name != name or name.startswith("."):
        raise ValueError(f"data in {name!r}, outside the checkpoint")
    return Extent(name, _natural(record.field("offset")), _natural(record.field("length")))
