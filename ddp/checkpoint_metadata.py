"""Reads the ``.metadata`` file of torch.distributed.checkpoint (DCP) without trusting it.

The file is a pickle, and unpickling runs whatever a pickle names. Here it may name DCP's own record classes, dtypes and
sizes, and gets inert stand-ins for them; any other name is refused before anything of it has run. What comes out is
checked field by field before DCP's real classes are built from it.
"""

import pickle
from collections.abc import Callable, Mapping
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
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
}


@dataclass(frozen=True)
class Extent:
    """Where the bytes of one chunk lie. The names of the fields are those that DCP's readers ask for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """Stands in for an object of one of DCP's classes: its class's name and its pickled state."""

    kind: str
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of the state; raises ``KeyError`` where it is missing."""
        if not isinstance(self.state, Mapping):
            raise TypeError(f"a {self.kind} without fields")
        return self.state[name]


class _Unpickler(pickle.Unpickler):
    """Knows the names of ``_RECORDS``, of ``_VALUES``, and the dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            # A class of its own for each file, so that a file can change nothing that outlives it.
            return type(name, (_Record,), {"kind": name})
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise _ForbiddenName(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _ForbiddenName("a persistent id")


class _ForbiddenName(Exception):
    """A pickle asks for something that metadata never needs."""


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a DCP checkpoint of tensors, in DCP's classes.

    Raises ``ValueError`` where the file names anything but metadata (a pickle that would run code), where it is
    missing or damaged, and where a tensor is not stored exactly once.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        raise ValueError(f"'{path}' is missing: where the tensors of this checkpoint lie is not known")
    with path.open("rb") as file:
        try:
            return _rebuild(_Unpickler(file).load())
        except _ForbiddenName as error:
            raise ValueError(
                f"'{path}' is no checkpoint metadata: it asks for {error}, which could run anything; nothing of it was "
                f"run. Do not load checkpoints from this source"
            ) from None
        except Exception as error:
            # Unpickling bytes that are not a pickle raises nearly anything.
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
    storage_data = {}
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
        chunks = [_chunk(chunk) for chunk in entry.field("chunks")]
        try:
            check_tiling(size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
        except ValueError as error:
            raise ValueError(f"'{key}' of shape {list(size)}: {error}") from None
        for chunk in chunks:
            if MetadataIndex(key, chunk.offsets) not in storage_data:
                raise ValueError(f"a chunk of '{key}' lies nowhere")
        num_chunks += len(chunks)
        tensors[_text(key)] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    if num_chunks != len(storage_data):
        raise ValueError(f"{num_chunks} chunks in {len(storage_data)} places")
    storage_meta = root.state.get("storage_meta")
    if storage_meta is not None:
        _expect(storage_meta, "StorageMeta")
        storage_meta = StorageMeta(save_id=known_id(storage_meta.field("save_id")))
    return Metadata(tensors, storage_data=storage_data, storage_meta=storage_meta)


def _expect(value: Any, kind: str) -> None:
    if not isinstance(value, _Record) or value.kind != kind:
        raise TypeError(f"a {getattr(value, 'kind', type(value).__name__)} where a {kind} belongs")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a name belongs")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} where a size belongs")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} where sizes belong")
    return tuple(_natural(size) for size in value)


def _chunk(record: Any) -> ChunkStorageMetadata:
    _expect(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(torch.Size(_sizes(record.field("offsets"))), torch.Size(_sizes(record.field("sizes"))))


def _extent(record: _Record) -> Extent:
    name = _text(record.field("relative_path"))
    if Path(name).name != name or name.startswith("."):
        raise ValueError(f"data in {name!r}, outside the checkpoint")
    return Extent(name, _natural(record.field("offset")), _natural(record.field("length")))
