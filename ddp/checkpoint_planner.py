"""Plans for torch.distributed.checkpoint (DCP): which rank writes and reads which elements of which tensor.

A rank offers `Piece`s, each a flat range of a tensor in that tensor's own coordinates. What several ranks hold alike is
written by one of them, the one with the least to write so far. Readers fetch what overlaps their own pieces, however
the file was cut.
"""

import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from .checkpoint_archive import OtherTensor, read_archive
from .checkpoint_boxes import Piece, check_tiling
from .checkpoint_id import check_head, head_of

__all__ = ["PieceReader", "PieceWriter", "PiecesLoadPlanner", "PiecesSavePlanner"]


def _views(pieces: Iterable[Piece]) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(piece.key, box.offsets): view for piece in pieces for box, view in piece.boxes()}


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The view of a box of ``tensor``."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor.detach()


class PiecesSavePlanner(SavePlanner):
    """Plans the writing of every rank's pieces.

    notes  what this rank has to say to the coordinator: anything that can be pickled
    """

    def __init__(self, pieces: Sequence[Piece], notes: Any = None) -> None:
        self._pieces = pieces
        self._notes = notes
        self._views: dict[MetadataIndex, Tensor] = {}
        self.all_notes: list[Any] = []
        """On the coordinator, once the plan is made: every rank's notes."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """In here, an error of one rank is every rank's."""
        self._views = _views(self._pieces)

    def create_local_plan(self) -> SavePlan:
        """All of this rank's boxes, whether or not others hold them as well."""
        items = []
        for piece in self._pieces:
            properties = TensorProperties(dtype=piece.data.dtype)
            for box, _ in piece.boxes():
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                written = TensorWriteData(chunk, properties, torch.Size(piece.shape))
                index = MetadataIndex(piece.key, box.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        paths = {piece.key: piece.path for piece in self._pieces}
        return SavePlan(items, planner_data=(paths, self._notes))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each box to one of the ranks that hold it. Raises ``ValueError`` for elements that no rank holds."""
        writers: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                writers.setdefault(item.index, []).append(rank)
        mine: list[list[WriteItem]] = [[] for _ in all_plans]
        nbytes = [0] * len(all_plans)
        tensors: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                written = item.tensor_data
                ranks = writers.pop(item.index, None)
                if ranks is None or written is None:
                    continue  # dealt out already
                rank = min(ranks, key=nbytes.__getitem__)
                mine[rank].append(item)
                nbytes[rank] += math.prod(written.chunk.sizes) * written.properties.dtype.itemsize
                tensor = tensors.setdefault(item.index.fqn, TensorStorageMetadata(written.properties, written.size, []))
                tensor.chunks.append(written.chunk)
        paths = {key: path for plan in all_plans for key, path in plan.planner_data[0].items()}
        _check_complete(paths, tensors)
        self.all_notes = [plan.planner_data[1] for plan in all_plans]
        return [SavePlan(items) for items in mine], Metadata({**tensors}, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator's word is final."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The elements of one box."""
        return _in_a_storage_of_its_size(self._views[write_item.index].detach())


def _in_a_storage_of_its_size(view: Tensor) -> Tensor:
    """The same memory. DCP copies what lies in a larger storage, since ``torch.save`` writes storages whole."""
    if not (view.is_cpu and view.is_contiguous()):
        return view
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype).set_(part, 0, view.shape, view.stride())


def _check_complete(paths: Mapping[str, Any], tensors: Mapping[str, TensorStorageMetadata]) -> None:
    for key in paths:
        if key not in tensors:
            raise ValueError(f"no rank holds an element of '{key}'")
        size, chunks = tensors[key].size, tensors[key].chunks
        try:
            check_tiling(size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
        except ValueError as error:
            raise ValueError(f"'{key}' of shape {list(size)} is not held by all ranks together: {error}") from None


class PiecesLoadPlanner(LoadPlanner):
    """Plans the reading of this rank's pieces, in place."""

    def __init__(self, pieces: Sequence[Piece], metadata: Metadata) -> None:
        self._pieces = pieces
        self._metadata = metadata
        self._views: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """In here, an error of one rank is every rank's."""
        self._views = _views(self._pieces)

    def create_local_plan(self) -> LoadPlan:
        """Whatever overlaps this rank's pieces."""
        items = []
        for piece in self._pieces:
            wanted = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b, _ in piece.boxes()]
            stored = self._metadata.state_dict_metadata[piece.key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(piece.key, stored, wanted)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: there are only tensors."""
        raise ValueError(f"'{read_item.storage_index.fqn}' is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The view that the elements go to."""
        return _narrowed(self._views[read_item.dest_index], read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: ``tensor`` is a view of where it belongs."""


class _NotingFile(io.FileIO):
    """Notes why it could not be written: torch's serialization says at which position instead."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class _HeadedFiles(FileSystem):
    """DCP's files, but that data files begin with the id of their save and their name; errors of writing say which."""

    def __init__(self, save_id: str) -> None:
        self._id = save_id

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """As DCP's, which notes where in the stream it writes each tensor."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _NotingFile(path, "wb")
        try:
            with io.BufferedWriter(file) as written:
                if os.fspath(path).endswith(".distcp"):
                    written.write(head_of(self._id, Path(path).name))
                yield written
        except Exception as error:
            reason = file.failure or error
            if not isinstance(reason, OSError):
                raise
            raise OSError(reason.errno, reason.strerror, os.fspath(path)) from error


class PieceWriter(FileSystemWriter):
    """DCP's writer of one file for each rank. The metadata does not say on which machine's path it was written."""

    def __init__(self, path: Path, save_id: str) -> None:
        super().__init__(path)
        self.fs = _HeadedFiles(save_id)
        self._id = save_id

    def storage_meta(self) -> StorageMeta:
        """The id of this save, without the path."""
        return StorageMeta(save_id=self._id)


class PieceReader(FileSystemReader):
    """DCP's reader, with metadata that has been checked. It reads each stored chunk once, right into its place where it
    can, compares its checksum, and names it in errors."""

    def __init__(self, path: Path, metadata: Metadata, save_id: str | None) -> None:
        super().__init__(path)
        self._metadata = metadata
        self._id = save_id
        self._sizes = {
            MetadataIndex(key, chunk.offsets): chunk.sizes
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata given; nothing is unpickled."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items. Raises ``ValueError`` where the file does not hold what the metadata says."""
        by_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            by_chunk.setdefault(item.storage_index, []).append(item)
        places = self._metadata.storage_data
        in_order = sorted(by_chunk, key=lambda index: (places[index].relative_path, places[index].offset))
        for name, indices in itertools.groupby(in_order, key=lambda index: str(places[index].relative_path)):
            path = Path(self.path) / name
            with path.open("rb") as file:
                check_head(file, path, self._id)
                for index in indices:
                    self._read_chunk(file, index, [(item, planner.resolve_tensor(item)) for item in by_chunk[index]])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, file: BinaryIO, index: MetadataIndex, wanted: list[tuple[ReadItem, Tensor]]) -> None:
        """Read a chunk into all tensors that want some of it: right into the one that wants just it."""
        stored, extent = self._metadata.state_dict_metadata[index.fqn], self._metadata.storage_data[index]
        assert isinstance(stored, TensorStorageMetadata)
        sizes, dtype = self._sizes[index], stored.properties.dtype
        path = Path(self.path) / extent.relative_path
        place = wanted[0][1]
        if len(wanted) > 1 or place.shape != sizes or not place.is_cpu or not place.is_contiguous():
            place = torch.empty(sizes, dtype=dtype, device="cpu")  # whatever the default device is
        try:
            chunk = read_archive(file, extent.offset, extent.length, place)
            if not isinstance(chunk, Tensor) or (chunk.shape, chunk.dtype) != (sizes, dtype):
                kind = f"{chunk.dtype} {list(chunk.shape)}" if isinstance(chunk, Tensor) else type(chunk).__name__
                raise OtherTensor(kind)
        except OtherTensor as other:
            raise ValueError(
                f"'{path}' is damaged: it holds {other} of '{index.fqn}' where the metadata has {dtype} {list(sizes)}"
            ) from None
        except Exception as error:  # damaged bytes raise nearly anything
            raise ValueError(
                f"'{path}' is damaged where '{index.fqn}' lies ({type(error).__name__}: {error})"
            ) from error
        for item, target in wanted:
            if chunk is not target:
                target.copy_(_narrowed(chunk, item.storage_offsets, item.lengths))
