"""The plan of a save for torch.distributed.checkpoint (DCP): which rank writes which boxes.

A rank offers ``TensorSlice``s. What several ranks hold alike is written by one of them: the one with the least to write
so far.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from .boxes import TensorSlice, check_tiling

__all__ = ["SliceSavePlanner", "page_locked"]


class SliceSavePlanner(SavePlanner):
    """Plans the writing of every rank's slices.

    notes  anything that can be pickled, for the coordinator
    """

    def __init__(self, slices: Sequence[TensorSlice], notes: Any = None) -> None:
        self._slices = slices
        self._notes = notes
        self._views: dict[MetadataIndex, Tensor] = {}
        self.all_notes: list[Any] = []
        """Every rank's notes: on the coordinator, after the global plan."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Cut the slices into boxes. An error here on one rank is raised on every rank."""
        self._views = {
            MetadataIndex(part.key, box.offsets): view for part in self._slices for box, view in part.boxes()
        }

    def create_local_plan(self) -> SavePlan:
        """All of this rank's boxes, including those that other ranks hold too."""
        items = []
        for part in self._slices:
            properties = TensorProperties(dtype=part.data.dtype)
            for box, _ in part.boxes():
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                written = TensorWriteData(chunk, properties, torch.Size(part.shape))
                index = MetadataIndex(part.key, box.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        paths = {part.key: part.path for part in self._slices}
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
                    continue  # assigned already
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
        """The coordinator's plan, unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The elements of one box, row by row: the order in which ``torch.save`` writes them, and a load reads them."""
        view = self._views[write_item.index].detach()
        return _in_a_storage_of_its_size(view.resolve_conj().resolve_neg().contiguous())

    def copy_to_host(self, plan: SavePlan) -> None:
        """Copy the boxes of ``plan`` to host memory, and refer to nothing else any more. The host waits for the device
        once, after all copies have been queued."""
        views, self._views, self._slices = self._views, {}, ()
        devices = set()
        for item in plan.items:
            view = views[item.index].detach().resolve_conj().resolve_neg()
            if view.is_cpu:
                copy = view.clone(memory_format=torch.contiguous_format)
            else:
                copy = page_locked(view.shape, view.dtype)
                copy.copy_(view, non_blocking=True)
                devices.add(view.device)
            self._views[item.index] = copy
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    def on_devices(self, plan: SavePlan) -> list[tuple[torch.Size, torch.dtype]]:
        """Of the boxes of ``plan`` that ``copy_to_host`` would copy from a device."""
        views = [self._views[item.index] for item in plan.items]
        return [(view.shape, view.dtype) for view in views if not view.is_cpu]

    def forget(self) -> None:
        """Free the copies."""
        self._views = {}


def page_locked(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Host memory that a device copies to by itself. Torch keeps it for the next tensor of its size."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _in_a_storage_of_its_size(view: Tensor) -> Tensor:
    """The same memory under a storage of its own: DCP would copy a view of a larger storage before ``torch.save``."""
    if not view.is_cpu:
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
