"""Checks of a ``DistributedOptimizer``: classes fit the buckets, state dicts fit this rank, slices are enough."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..buckets.bucket import BucketParam
from ..collectives.reduction import placements_of
from ..plan.layout import GradPlan
from ..plan.owned_params import refuse_slices
from ..torch_internals import DisableTorchFunctionSubclass
from ..wrapper.data_parallel import DistributedDataParallel
from .flat_params import ParamSlice, Segment
from .moment_blocks import check_blocks
from .param_groups import (
    ClassGroups,
    check_matrices,
    check_optimizer_class,
    check_options,
    is_elementwise,
    is_per_matrix,
    names_of_classes,
)
from .state_forms import StateForm

__all__ = [
    "check_classes",
    "check_fits",
    "check_storage",
    "layout_key",
    "refuse_norm",
    "refuse_norm_of_stage",
    "refuse_scaler",
    "shard_of_how_many",
    "slice_of_how_many",
]


def check_classes(
    model: DistributedDataParallel, classes: Sequence[ClassGroups], assigned: Mapping[str, int], form: StateForm
) -> None:
    """Raise where a class may not update its parameters as they lie in buckets, or with these options, or in this form.

    classes   of ``groups_by_class``
    assigned  of ``assign_groups``
    """
    sharded = model.ddp_config.use_distributed_optimizer
    for cls, options, groups in classes:
        mine = [entry for entry in model.bucket_params if assigned[entry.owned.name] in groups]
        layouts = [entry.bucket.layout for entry in mine if sharded]
        whole = all(each.keeps_matrices_whole if is_per_matrix(cls) else each.keeps_params_whole for each in layouts)
        check_optimizer_class(cls, mine, whole=whole)
        _check_no_slices(model, cls, mine)
        check_options(cls, options, groups)
        check_matrices(cls, options, groups, mine, assigned)
    used = [each for each in classes if set(each.groups) & set(assigned.values())]
    _check_form(model, used, assigned, form)


def _check_form(
    model: DistributedDataParallel, classes: Sequence[ClassGroups], assigned: Mapping[str, int], form: StateForm
) -> None:
    kept = [each for each in classes if form.of(each.cls) == form] or classes
    for cls, options, groups in kept:
        mine = [entry.owned for entry in model.bucket_params if assigned[entry.owned.name] in groups]
        form.check(cls, [(owned.name, owned.param.dtype) for owned in mine], [options, *groups.values()])
    class_of = {index: each.cls for each in classes for index in each.groups}
    first: dict[int, BucketParam] = {}
    for entry in model.bucket_params:
        other = first.setdefault(entry.bucket.index, entry)
        here, there = (class_of[assigned[each.owned.name]] for each in (entry, other))
        if form.of(here) != form.of(there):
            raise ValueError(
                f"{form.name} is not for {(here if form.of(here) != form else there).__name__}, and parameters "
                f"'{other.owned.name}' of {there.__name__} and '{entry.owned.name}' of {here.__name__} lie in one "
                f"bucket, whose masters lie together: keep one class's parameters in buckets of their own, by "
                f"DistributedDataParallelConfig(use_distributed_optimizer=True, keep_matrices_whole=[their names]), or "
                f"leave {form.name} out"
            )
    if form.moment_dtype is torch.uint8:
        check_blocks(model.plan.buckets, "wrap the model with DistributedDataParallelConfig(shard_atom=256)")


def layout_key(classes: Sequence[type], plan: GradPlan, segments: Sequence[Segment]) -> str:
    """A key that is equal for two optimizers whose state dicts fit each other.

    classes  of each group
    """
    cuts = [
        (segment.flat.bucket.index, segment.flat.owned.start, segment.start, segment.end, segment.group)
        for segment in segments
    ]
    digest = hashlib.sha256(repr(cuts).encode()).hexdigest()[:16]
    return f"{names_of_classes(classes)}/{plan.fingerprint[:16]}/{digest}"


def shard_of_how_many(model: DistributedDataParallel) -> str:
    """This rank's shard in words: "2 of 4"."""
    grid = model.grids["dense"]
    first, size = (grid.inner_rank, grid.inner_size) if placements_of(model.ddp_config).inner.gathers else (0, 1)
    return f"{first + 1} of {size}{slice_of_how_many(model)}"


def slice_of_how_many(model: DistributedDataParallel) -> str:
    """Whose slices this rank has, in words: other tensor-parallel ranks' have the same shapes. Empty without slices."""
    ranks = model.tensor_ranks
    if ranks is None or ranks.size == 1:
        return ""
    return f" on tensor-parallel rank {ranks.inner_rank + 1} of {ranks.size}"


def check_fits(state_dict: Mapping[str, Any], key: str, here: str, lengths: Mapping[str, int | None]) -> None:
    """Raise ``ValueError`` for a state dict of another layout or shard, or one with missing entries.

    key      this optimizer's ``layout_key``
    here     this rank's ``shard_of_how_many``
    lengths  number of entries under each key of a state dict; None: any
    """
    if state_dict.get("layout") == key:
        for name, length in lengths.items():
            if name not in state_dict or length not in (None, len(state_dict[name])):
                raise ValueError(f"this optimizer state is not as it was saved: '{name}' is missing, or cut")
        return
    saved = state_dict.get("shard")
    if saved not in (here, None):
        raise ValueError(
            f"this optimizer state is that of shard {saved}, and this rank has shard {here}: each rank loads what it "
            f"saved itself, on as many ranks; save_checkpoint writes what fits any"
        )
    raise ValueError(
        f"this optimizer state was saved with another bucket plan, rank or number of ranks, with other parameter "
        f"groups or another class: it has layout {state_dict.get('layout')}, and this is {key}; save_checkpoint writes "
        f"what fits any"
    )


def check_storage(slices: Sequence[ParamSlice], addresses: Sequence[int]) -> None:
    """Raise ``RuntimeError`` where a parameter has another memory than the optimizer gave it at ``addresses``."""
    with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
        now = [held.bucket_param.owned.param.data_ptr() for held in slices]
    if now != addresses:
        moved = [held for held, address in zip(slices, now, strict=True) if address != held.view.data_ptr()]
        raise RuntimeError(
            f"parameter '{moved[0].name}' was given other storage (.to(), .data = ...) after the optimizer was "
            f"built: updates would not reach it; move the model before wrapping it"
        )


# ---- Models that tensor parallelism has cut: what needs a whole model would get this rank's slices. ----

_REMEDY = "give the wrapper those ranks as tensor_parallel_group"


def _check_no_slices(model: DistributedDataParallel, cls: type, bucket_params: Sequence[BucketParam]) -> None:
    """Raise ``ValueError`` for a class that updates whole parameters over slices."""
    if not is_elementwise(cls):
        name = next((each.owned.name for each in bucket_params if each.owned.grid_name == "slice"), None)
        if name is not None:
            raise ValueError(
                f"{cls.__name__} updates whole parameters, and tensor-parallel ranks have slices of '{name}': give "
                f"such parameters a group of an elementwise class of torch.optim"
            )
        _refuse(
            model,
            bucket_params,
            cls.__name__,
            "updates whole parameters, and would take slices for them",
            "use an elementwise class of torch.optim",
        )


def refuse_norm(model: DistributedDataParallel, what: str) -> None:
    """Raise ``ValueError`` for a norm over slices; ``what``: the option or function."""
    _refuse(
        model,
        model.bucket_params,
        what,
        "would cover this rank's slices alone, and differ between the ranks that hold one model together",
        _REMEDY,
    )


def refuse_norm_of_stage(model: DistributedDataParallel, what: str) -> None:
    """Raise ``ValueError`` for clipping by one stage's norm: copies of a shared embedding would part."""
    if model.shared_embedding is not None:
        raise ValueError(
            f"{what} would treat each pipeline stage by its own gradients, and the copies of the shared embedding "
            f"(embedding_group) would part: call clip_grad_norm(wrappers, max_norm, pipeline_group=...) before the "
            f"step, and use GradScaler(pipeline_group=...)"
        )


def refuse_scaler(model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for a search for Inf over slices."""
    _refuse(
        model,
        model.bucket_params,
        "GradScaler",
        "would look for Inf in this rank's slices alone, and skip other steps than the ranks with the other slices",
        _REMEDY,
    )


def _refuse(
    model: DistributedDataParallel, bucket_params: Sequence[BucketParam], what: str, consequence: str, remedy: str
) -> None:
    if model.slices:
        params = ((entry.owned.name, entry.owned.param) for entry in bucket_params)
        refuse_slices(params, what, consequence, remedy)
