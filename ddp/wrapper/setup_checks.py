"""All checks when a model is wrapped, in the order in which they run, before gradient memory is allocated.

1. ``check_arguments``         the types of arguments
2. ``check_same_config``       ranks have one configuration, which says how process groups are made
3. ``plan_on_each_rank``       this rank's model, configuration and groups: a new refusal goes there
4. ``check_same_model``        ranks have one model and one plan; ``check_tensor_ranks`` compares the model's slices
5. ``check_undeclared_parts``  ranks hold the same experts and slices, where nobody said who does

The second and later ones raise on all ranks. ``broadcast_tensors`` then gives all ranks the values to begin with.
"""

import dataclasses
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..buckets.copy_engines import check_copy_engines
from ..buckets.replicas import find_parted
from ..collectives.failure_report import FailureReporter, gather, run_on_all_ranks
from ..collectives.rank_grid import RankGrid, Ranks, backends_of, check_member, group_or_default, own_rank
from ..config import DistributedDataParallelConfig
from ..contract.torch_wrappers import check_none_inside
from ..plan.layout import GradPlan
from ..plan.model_slice import ModelSlice
from ..plan.owned_params import (
    ModelTensor,
    OwnedParam,
    check_marks,
    check_plain,
    check_shapes,
    check_untold_parts,
    is_slice,
    plan_model,
    slices_of,
)
from ..plan.tensor_parallel.localize import localized_ranks, ranks_told

__all__ = [
    "broadcast_tensors",
    "check_arguments",
    "check_copies",
    "check_same_config",
    "check_same_model",
    "check_same_slices",
    "check_tensor_ranks",
    "check_undeclared_parts",
    "compare_between_ranks",
    "plan_on_each_rank",
]


def check_arguments(module: object, config: object) -> None:
    """Raise ``TypeError`` for what is no module or configuration."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel takes one nn.Module first, got {type(module).__name__}")
    if not isinstance(config, DistributedDataParallelConfig | None):
        raise TypeError(f"config is a maingrad.ddp.DistributedDataParallelConfig, got {type(config).__name__}")


def _groups_of(ranks: Ranks) -> list[dist.ProcessGroup]:
    """The groups that join the wrapper's ranks."""
    check_member(ranks, "process_group")
    if isinstance(ranks, DeviceMesh):
        return [ranks.get_group(axis) for axis in range(ranks.ndim)]
    default = group_or_default(ranks)
    return [] if default is None else [default]


def localize_on_each_rank(
    module: nn.Module, ranks: Ranks, tensor_ranks: Ranks, failures: FailureReporter
) -> tuple[RankGrid | None, dict[str, ModelSlice]]:
    """Make local parameters of DTensors. The tensor-parallel ranks, None where nobody has said; and ``slices_of``.

    An error on one rank is raised on all.
    """

    def make_local() -> tuple[RankGrid | None, dict[str, ModelSlice]]:
        found = localized_ranks(module, tensor_ranks)
        return found, slices_of(module, found)

    group = ranks_told(module, tensor_ranks)
    groups = [] if group is None or group.size() == 1 else [*_groups_of(ranks), group]
    axes = [each for each in groups if each.size() > 1]
    return run_on_all_ranks(make_local, axes, failures, "the making of local parameters")


def check_same_config(config: DistributedDataParallelConfig, ranks: Ranks, failures: FailureReporter) -> None:
    """Compare configs between ranks. The error shows the first field that differs."""
    lines = [f"{field.name} = {getattr(config, field.name)}" for field in dataclasses.fields(config)]
    compare_between_ranks({"config": lines}, _groups_of(ranks), failures)


def plan_on_each_rank(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    overwritten: Iterable[ModelTensor],
    config: DistributedDataParallelConfig,
    grids: Mapping[str, RankGrid],
    backward_order: Sequence[str] | None,
    failures: FailureReporter,
    tensor_ranks: RankGrid | None,
    slices: Mapping[str, ModelSlice],
    *,
    sums_embeddings: bool,
) -> tuple[torch.device, GradPlan]:
    """The model's device, and the plan of its gradients. An error on one rank is raised on all ranks.

    overwritten  tensors that training or ``init_sync`` will overwrite
    slices       what this rank has of parameters, by name
    sums_embeddings  shared embeddings are summed over stages
    """

    def plan() -> tuple[torch.device, GradPlan]:
        sharded = config.use_distributed_optimizer
        degrees = {grid_name: grid.inner_size if sharded else 1 for grid_name, grid in grids.items()}
        device = _check_setup(module, trainable, config, grids.values())
        _check_overwritten(overwritten)
        named = [(each.name, each.param) for each in trainable]
        check_marks(named, grids["dense"], config, tensor_ranks, sums_embeddings=sums_embeddings)
        check_untold_parts(module, slices)
        plan = plan_model(trainable, config, shard_degree=degrees, backward_order=backward_order, slices=slices)
        return device, plan

    return run_on_all_ranks(plan, grids["dense"].axes, failures, "the planning of gradients")


def _check_setup(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    grids: Iterable[RankGrid],
) -> torch.device:
    """The device of all trainable parameters of ``module``. Raises ``ValueError`` for settings that cannot work."""
    check_shapes(module, "DistributedDataParallel")
    check_none_inside(module)
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to reduce")
    device: torch.device = trainable[0].param.device
    for name, param in ((each.name, each.param) for each in trainable):
        if param.device.type == "meta":
            raise ValueError(f"parameter '{name}' is on the meta device: materialise the model before wrapping it")
        if hasattr(param, "shard"):
            raise ValueError(
                f"parameter '{name}' is sharded (maingrad.fsdp.fully_shard), and its gradient reduced, already: use "
                f"one of both over the whole model"
            )
        if param.device != device:
            raise ValueError(
                f"parameter '{name}' is on {param.device}, '{trainable[0].name}' on {device}: one wrapper, one device"
            )
        check_plain(name, param, "DistributedDataParallel")
    backends = backends_of((group for grid in grids for group in grid.axes), device)
    if config.average_in_collective and not all("nccl" in backend for backend in backends):
        raise ValueError(
            f"average_in_collective needs NCCL, and the group's backend is {', '.join(sorted(backends))}; "
            f"leave it None, and each rank divides its gradients before the collective"
        )
    check_copy_engines(config.copy_engine_param_gather, backends, device, "copy_engine_param_gather")
    if device.type == "cuda" and config.overlap_grad_reduce and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "overlap_grad_reduce with CUDA_DEVICE_MAX_CONNECTIONS=1 would queue collectives and compute behind each "
            "other; unset the variable"
        )
    return device


def _check_overwritten(tensors: Iterable[ModelTensor]) -> None:
    """Raise ``ValueError`` for frozen parameters and buffers that ``init_sync`` cannot copy between ranks."""
    for each in tensors:
        tensor, what = each.tensor, f"{'buffer' if each.is_buffer else 'frozen parameter'} '{each.name}'"
        if tensor.is_meta:
            raise ValueError(f"{what} is on the meta device, which keeps no values: give it some before wrapping")
        if hasattr(tensor, "to_local"):
            raise ValueError(
                f"{what} is a DTensor, whose slices are other ranks' too: init_sync=True cannot give all ranks the "
                f"first rank's; pass init_sync=False, if plain parameters begin alike on all ranks"
            )


def check_same_model(
    plan: GradPlan, overwritten: Collection[ModelTensor], grids: Mapping[str, RankGrid], failures: FailureReporter
) -> None:
    """Compare models and plans between ranks. The error shows the first parameter, buffer or bucket that differs.

    overwritten  tensors that training or ``init_sync`` will overwrite

    Each kind of parameters is compared over its own ranks.
    """
    kinds: dict[int, list[str]] = {}
    for kind, grid in grids.items():
        kinds.setdefault(id(grid), []).append(kind)
    for own in kinds.values():
        model, buckets = [], []
        for bucket in plan.buckets:
            if bucket.grid_name in own:
                specs = [slot.spec for slot in bucket.slots]
                model += [f"'{s.name}' {s.param_dtype} {list(s.shape)} in bucket {bucket.index}" for s in specs]
                buckets.append(
                    f"bucket {bucket.index} of {bucket.numel} elements {specs[0].grad_dtype} in "
                    f"{bucket.shard_degree} shards"
                )
        model += [
            f"{'buffer' if each.is_buffer else 'frozen'} '{each.name}' {each.tensor.dtype} {list(each.tensor.shape)}"
            for each in overwritten
            if each.grid_name in own and not each.trained
        ]
        compare_between_ranks({"model": model, "gradient plan": buckets}, grids[own[0]].axes, failures)


def check_tensor_ranks(
    plan: GradPlan,
    overwritten: Iterable[ModelTensor],
    slices: Mapping[str, ModelSlice],
    grid: RankGrid,
    tensor_ranks: RankGrid,
    failures: FailureReporter,
    *,
    compare: bool,
) -> None:
    """Compare what tensor-parallel ranks hold together: parameters' names and whole shapes, and when each is reduced;
    and which slices data-parallel ranks hold.

    grid     the data-parallel ranks
    compare  compare values of copies too. ``init_sync`` gives all ranks the first one's, and would overwrite slices
             that nobody has marked
    """
    reduced = {slot.spec.name: bucket.index for bucket in plan.buckets for slot in bucket.slots}
    model = [
        f"'{name}' {list(each.shape)} with a {each.grad} gradient in bucket {reduced.get(name)}"
        for name, each in slices.items()
    ]
    compare_between_ranks({"cut model": model}, tensor_ranks.axes, failures)
    everyone = grid._replace(tensor=tensor_ranks.inner)
    check_same_slices(slices, grid, everyone, failures)
    copies = [(each.name, each.tensor) for each in overwritten if each.name in slices and each.grid_name != "slice"]
    check_copies(copies if compare else (), tensor_ranks, failures)


def check_same_slices(
    slices: Mapping[str, ModelSlice], grid: RankGrid, everyone: RankGrid, failures: FailureReporter
) -> None:
    """Raise ``ValueError`` on all ranks of ``everyone`` where ranks of ``grid`` have other slices of a parameter: they
    would be averaged. Their shapes may be equal, and no collective would notice."""
    cut = [
        f"'{name}' at {[(box.offsets[each.dim], box.ends[each.dim]) for box in each.boxes]} of dim {each.dim}"
        for name, each in slices.items()
        if each.dim is not None
    ]
    if cut:
        compare = partial(compare_between_ranks, {"slice of data-parallel ranks": cut}, grid.axes, failures)
        run_on_all_ranks(compare, everyone.axes, failures, "the comparison of slices")


def check_copies(copies: Iterable[tuple[str, Tensor]], tensor_ranks: RankGrid, failures: FailureReporter) -> None:
    """Raise ``ValueError`` on all tensor-parallel ranks for a copy of which they have different values.

    copies  parameters with names that have no mark of a slice
    """
    name = next(iter(find_parted(copies, tensor_ranks.axes, failures)), None)
    if name is not None:
        raise ValueError(
            f"parameter '{name}' has no mark of a slice (tensor_model_parallel = True), and other values on other "
            f"tensor-parallel ranks, of which init_sync would keep the first one's: mark it, with its partition_dim; "
            f"if it is no slice, give all ranks one seed for such parameters, or pass init_sync=False and load weights"
        )


def compare_between_ranks(
    mine: Mapping[str, list[str]], axes: Iterable[dist.ProcessGroup], failures: FailureReporter
) -> None:
    """Raise ``ValueError`` on all ranks unless all have the same lines; the error shows the first line that differs.

    mine  title -> lines of this rank
    axes  as in ``gather``
    """
    axes, what = [group for group in axes if group.size() > 1], f"the comparison of {next(iter(mine))}s between ranks"
    fingerprint = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather(fingerprint, axes, failures, what).values())) == 1:
        return
    (first, ours), *others = gather(mine, axes, failures, what).items()
    for other, theirs in others:
        for title, lines in ours.items():
            for here, there in zip_longest(lines, theirs[title], fillvalue="nothing"):
                if here != there:
                    raise ValueError(
                        f"the {title} differs between ranks (this is rank {own_rank()}): rank {first} has {here} "
                        f"where rank {other} has {there}"
                    )


_WHOSE_EXPERTS = (
    "say it by expert_process_group, maingrad.ddp.WORLD_OF_ONE where each has its own, or the ranks of process_group, "
    "torch.distributed.group.WORLD as a rule, where all are to have the same"
)


def check_undeclared_parts(
    slices: Iterable[tuple[str, Tensor]],
    experts: Iterable[tuple[str, Tensor]],
    grid: RankGrid,
    failures: FailureReporter,
    *,
    option: str = "process_group",
    remedy: str = _WHOSE_EXPERTS,
) -> None:
    """Raise ``ValueError`` on all ranks for slices or experts that differ, where nobody said which ranks hold the same.

    slices   tensors, with names, of which those that are slices of tensor parallelism are compared
    experts  tensors of experts, with names
    option   by which the user says which ranks hold the same slices
    remedy   for the error: how the user says which ranks hold the same experts

    Without the check, ``init_sync`` would give all ranks the first one's values, and gradients would be averaged.
    Collective over the grid.
    """
    parts = [(name, tensor) for name, tensor in slices if is_slice(tensor)]
    cut = {name for name, _ in parts}
    name = next(iter(find_parted([*parts, *experts], grid.axes, failures)), None)
    if name in cut:
        raise ValueError(
            f"parameter '{name}' is a slice of tensor parallelism (tensor_model_parallel = True) and "
            f"differs between ranks, and nobody said which ranks hold the same slices: pass the data-parallel group as "
            f"{option}, or torch.distributed.group.WORLD where all are to have the first rank's"
        )
    if name is not None:
        raise ValueError(
            f"'{name}' is an expert's (allreduce = False) and differs between ranks, and nobody said "
            f"which ranks hold the same experts: {remedy}"
        )


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[ModelTensor], grids: Mapping[str, RankGrid], failures: FailureReporter) -> None:
    """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
    with failures.watch("the broadcast of parameters and buffers"):
        for each in tensors:
            grids[each.grid_name].broadcast(each.tensor.detach())
            torch.autograd.graph.increment_version(each.tensor)  # collectives do not raise it, and masters follow it
