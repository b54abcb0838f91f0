"""One rank's part of a save whose writing needs no collective, and so can run in a thread beside training.

Follow a save in the background. The ranks agree on who writes what (``agree``, the only collective). Each rank copies
what it writes to host memory (``copy_to_host``). Then, in its thread, each rank writes its data file, and beside it a
note of where in the file each chunk lies (``write``). The first rank's thread waits for the notes of all ranks and
makes the index (``collect``). The notes travel through the folder, which all ranks share: collectives of a thread would
be mixed up with those of training.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ...collectives.failure_report import FailureReporter
from ...torch_internals.distributed import storage_info
from .boxes import TensorSlice
from .folder import PLACED_SUFFIX
from .index import Chunk, Index
from .planner import SliceSavePlanner
from .writer import PlacedResult, SliceWriter

__all__ = ["DeferredWrite"]

_PATIENCE = 0.02
"""Seconds between two looks into the folder."""


class DeferredWrite:
    """What one rank writes, and on the first rank of the group what all ranks write."""

    def __init__(self, folder: Path, save_id: str) -> None:
        self._folder, self._id = folder, save_id
        self._planner = SliceSavePlanner(())
        self._writer = SliceWriter(folder, save_id)
        self._plan = SavePlan([])
        self._file = ""
        self._metadata: Metadata | None = None
        self._files: list[str] = []

    def propose(self, slices: Sequence[TensorSlice], notes: Any) -> None:
        """Say what this rank holds, and ``notes`` for the first rank."""
        self._planner = SliceSavePlanner(slices, notes)
        self._planner.set_up_planner({})
        self._plan = self._planner.create_local_plan()

    def agree(self, group: dist.ProcessGroup | None, failures: FailureReporter | None) -> None:
        """Decide which rank writes what. Collective over ``group``; None: this rank alone.

        Raises ``ValueError`` on all ranks for elements that no rank holds.
        """
        if group is None:
            answer = self._decide([self._plan])[0]
        else:
            leads, first = group.rank() == 0, dist.get_global_rank(group, 0)
            plans: list[Any] = [None] * group.size()
            answers: list[Any] = [None]
            with failures.watch("the plan of a checkpoint") if failures is not None else nullcontext():
                dist.gather_object(self._plan, plans if leads else None, dst=first, group=group)
                dist.scatter_object_list(answers, self._decide(plans) if leads else None, src=first, group=group)
            answer = answers[0]
        if isinstance(answer, Exception):
            raise answer
        self._plan, self._file = self._planner.finish_plan(answer.plan), answer.file

    def copy_to_host(self) -> None:
        """Copy this rank's part to host memory: afterwards the model may change."""
        self._planner.copy_to_host(self._plan)

    def on_devices(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of what ``copy_to_host`` would copy from a device."""
        return self._planner.on_devices(self._plan)

    def write(self) -> None:
        """Write this rank's data file, and the note of what lies where."""
        results = self._writer.write_data(self._plan, self._planner).value()
        self._planner.forget()
        placed = [_Placed.of(result) for result in results]
        target = self._folder / f"{self._file}{PLACED_SUFFIX}"
        staging = target.with_suffix(f"{PLACED_SUFFIX}.tmp")
        with staging.open("w", encoding="utf-8") as file:
            json.dump({"save": self._id, "placed": placed}, file)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(target)

    def collect(self, given_up: Callable[[], bool]) -> tuple[list[Any], Index] | None:
        """On the first rank: wait for the notes of all ranks; write torch's metadata; return what the ranks told of
        their models, and the index.

        given_up  asked while a rank has not written; where it says True, the result is None
        """
        assert self._metadata is not None, "the first rank has decided"
        results: list[list[WriteResult]] = []
        for name in self._files:
            while (placed := self._read(name)) is None:
                if given_up():
                    return None
                time.sleep(_PATIENCE)
            results.append([each.result() for each in placed])
        self._writer.finish(self._metadata, results)
        for name in self._files:
            (self._folder / f"{name}{PLACED_SUFFIX}").unlink()
        return self._planner.all_notes, self._writer.index

    def _decide(self, plans: Sequence[SavePlan]) -> "list[Any]":
        """Each rank's ``_Decided``; or the error, for each."""
        try:
            parts, self._metadata = self._planner.create_global_plan(list(plans))
            self._files = [f"__{rank}_0" for rank in range(len(parts))]
            return [
                _Decided(plan, file)
                for plan, file in zip(self._writer.prepare_global_plan(parts), self._files, strict=True)
            ]
        except Exception as error:
            return [error] * len(plans)

    def _read(self, name: str) -> "list[_Placed] | None":
        try:
            said = json.loads((self._folder / f"{name}{PLACED_SUFFIX}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if said["save"] != self._id:
            raise ValueError(f"'{self._folder / name}' is of another save: two jobs write to one path")
        return [_Placed(*each) for each in said["placed"]]


class _Decided(NamedTuple):
    """What a rank is told to write."""

    plan: SavePlan
    file: str
    """Name of its data file, without the suffix."""


class _Placed(NamedTuple):
    """A chunk that was written, in values that JSON holds."""

    key: str
    offsets: Sequence[int]
    num_bytes: int
    archive: Sequence[Any]
    """File, position and length of the archive of ``torch.save``."""
    chunk: Sequence[Any]
    file_bytes: int

    @classmethod
    def of(cls, result: WriteResult) -> "_Placed":
        assert isinstance(result, PlacedResult)
        index, where = result.index, result.storage_data
        assert index.offset is not None
        archive = (where.relative_path, where.offset, where.length)
        return cls(index.fqn, list(index.offset), result.size_in_bytes, archive, result.chunk, result.file_bytes)

    def result(self) -> PlacedResult:
        """As ``SliceWriter.finish`` takes it."""
        return PlacedResult(
            MetadataIndex(self.key, torch.Size(self.offsets)),
            self.num_bytes,
            storage_info(*self.archive),
            Chunk(*self.chunk),
            self.file_bytes,
        )
