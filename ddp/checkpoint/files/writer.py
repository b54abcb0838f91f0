"""Writes a checkpoint's tensors through torch.distributed.checkpoint (DCP), and makes the index of chunks.

DCP writes one file for each rank, each chunk as an archive of ``torch.save``, and metadata for its own tools. Each rank
then finds the bytes in its archives. DCP gathers their positions on the first rank with the results of writing.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...collectives.agreement import saying
from .archive import place_in_archive
from .boxes import TensorSlice, flat_range
from .index import Chunk, Index, StoredTensor
from .planner import SliceSavePlanner
from .save_id import head_of

__all__ = ["PlacedResult", "SliceWriter", "write_slices"]


def write_slices(
    folder: Path, save_id: str, slices: Sequence[TensorSlice], notes: Any, group: dist.ProcessGroup | None
) -> tuple[list[Any], Index]:
    """Write the slices of all ranks of ``group``, each element once. Returns, on the first rank of the group, the notes
    of all ranks and the index.

    Collective over ``group``; None: this rank alone. Raises ``ValueError`` on all for elements that no rank holds.
    """
    planner = SliceSavePlanner(slices, notes)
    writer = SliceWriter(folder, save_id)
    _run(lambda **how: save({}, storage_writer=writer, planner=planner, **how), group)
    return planner.all_notes, writer.index


@dataclass(frozen=True)
class PlacedResult(WriteResult):
    """DCP's result for a chunk, and the position of the chunk's bytes."""

    chunk: Chunk
    file_bytes: int
    """Size of the whole file in bytes."""


class SliceWriter(FileSystemWriter):
    """DCP's writer of one file for each rank; leaves the path out of the metadata."""

    def __init__(self, path: Path, save_id: str) -> None:
        super().__init__(path)
        self.fs = _HeadedFiles(save_id)
        self._id = save_id
        self.index = Index({}, {})
        """Where all chunks lie: on the coordinator, after ``finish``."""

    def storage_meta(self) -> StorageMeta:
        """DCP's metadata of the storage: the id of this save, without the path."""
        return StorageMeta(save_id=self._id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's items, and find their bytes in the file."""
        items = {item.index: item for item in plan.items}
        by_file: dict[str, list[WriteResult]] = {}
        for result in super().write_data(plan, planner).value():
            by_file.setdefault(result.storage_data.relative_path, []).append(result)
        placed: list[WriteResult] = []
        for name, results in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                placed += [_placed(file, name, result, items[result.index]) for result in results]
        done: Future[list[WriteResult]] = Future()
        done.set_result(placed)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written: make the index, and write DCP's metadata."""
        self.index = _index_of(metadata, (cast(PlacedResult, result) for each in results for result in each))
        super().finish(metadata, results)


def _placed(file: BinaryIO, name: str, result: WriteResult, item: WriteItem) -> PlacedResult:
    tensor, where = item.tensor_data, result.storage_data
    assert tensor is not None
    start, end = flat_range(tensor.size, tensor.chunk.offsets, tensor.chunk.sizes)
    nbytes = (end - start) * tensor.properties.dtype.itemsize
    position, checksum = place_in_archive(file, where.offset, where.length, nbytes)
    chunk = Chunk(start, end, name, position, checksum)
    return PlacedResult(result.index, result.size_in_bytes, where, chunk, os.fstat(file.fileno()).st_size)


def _index_of(metadata: Metadata, results: Iterable[PlacedResult]) -> Index:
    files: dict[str, int] = {}
    chunks: dict[str, list[Chunk]] = {}
    for result in results:
        files[result.chunk.file] = result.file_bytes
        chunks.setdefault(result.index.fqn, []).append(result.chunk)
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[key] = StoredTensor(stored.properties.dtype, tuple(stored.size), sorted(chunks[key]))
    return Index(files, tensors)


class _NotingFile(io.FileIO):
    """Keeps the error of a failed write: torch's serialization replaces the error by one without the cause."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class _HeadedFiles(FileSystem):
    """DCP's file system, with a head in each data file, and with errors that name the file."""

    def __init__(self, save_id: str) -> None:
        self._id = save_id

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to read, or to write with a head."""
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


def _run(action: Callable[..., Any], group: dist.ProcessGroup | None) -> None:
    """Call DCP over a group. DCP collects the ranks' errors in one exception; raise the first rank's error."""
    try:
        if group is not None:
            action(process_group=group)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            action(no_dist=True)
    except CheckpointException as failure:
        first = min(failure.failures)
        error, _ = failure.failures[first]
        if group is not None and len(failure.failures) < group.size():
            error = saying(error, f" (on rank {dist.get_global_rank(group, first)})")
        raise error from None
