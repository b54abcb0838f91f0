"""Checks of a model, its configuration and its ranks before anything is allocated; each raises ``ValueError``."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..collectives.agreement import alike, compare_between_ranks
from ..collectives.failure_report import FailureReporter
from ..collectives.in_flight import backend_of, group_or_default
from ..collectives.mapped_memory import check_copy_engines
from ..collectives.rank_grid import RankGrid, check_member
from ..collectives.world import Ranks
from ..config import DistributedDataParallelConfig
from ..contract.main_grad import check_unattached
from ..contract.torch_ddp import check_none_inside
from ..plan.layout import GradPlan
from ..plan.model_plan import plan_model
from ..plan.owned_params import OwnedParam, grid_name_of

__all__ = ["check_same_config", "check_same_on_all_ranks", "check_setup", "plan_on_each_rank"]


def check_setup(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    grids: Iterable[RankGrid],
) -> torch.device:
    """The device of all trainable parameters of ``module``. Raises ``ValueError`` for settings that cannot work."""
    check_none_inside(module)
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to reduce")
    device: torch.device = trainable[0].param.device
    for name, param, _ in trainable:
        if param.device.type == "meta":
            raise ValueError(f"parameter '{name}' is on the meta device: materialise the model before wrapping it")
        if hasattr(param, "shard"):
            raise ValueError(
                f"parameter '{name}' is sharded (maingrad.fsdp.fully_shard), and its gradient reduced, already: use "
                f"one of both over the whole model"
            )
        if hasattr(param, "to_local"):
            raise ValueError(
                f"parameter '{name}' is a DTensor (torch.distributed.fsdp.fully_shard, or tensor parallelism): its "
                f"gradient is a DTensor too, or never reaches it in backward; wrap a model of plain parameters"
            )
        if param.device != device:
            raise ValueError(
                f"parameter '{name}' is on {param.device}, '{trainable[0].name}' on {device}: one wrapper, one device"
            )
        if param.grad is not None:
            raise ValueError(
                f"parameter '{name}' already has a .grad, which the first iteration would add to main_grad: call "
                f"module.zero_grad() before wrapping"
            )
        check_unattached(param, name)
    backends = {backend_of(group, device) for grid in grids for group in grid.axes}
    if config.average_in_collective and not all("nccl" in backend for backend in backends):
        raise ValueError(
            f"average_in_collective needs NCCL, and the group's backend is {', '.join(sorted(backends))}; "
            f"leave it None, and each rank divides its gradients before the collective"
        )
    if config.copy_engine_param_gather:
        check_copy_engines(grids, device, "copy_engine_param_gather")
    if device.type == "cuda" and config.overlap_grad_reduce and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "overlap_grad_reduce with CUDA_DEVICE_MAX_CONNECTIONS=1 would queue collectives and compute behind each "
            "other; unset the variable"
        )
    return device


def plan_on_each_rank(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    grids: Mapping[str, RankGrid],
    backward_order: Sequence[str] | None,
    failures: FailureReporter,
) -> tuple[torch.device, GradPlan]:
    """The device from ``check_setup`` and the plan from ``plan_model``. An error on one rank is raised on all ranks."""

    def plan() -> tuple[torch.device, GradPlan]:
        sharded = config.use_distributed_optimizer
        degrees = {grid_name: grid.inner_size if sharded else 1 for grid_name, grid in grids.items()}
        device = check_setup(module, trainable, config, grids.values())
        return device, plan_model(trainable, config, shard_degree=degrees, backward_order=backward_order)

    return alike(plan, grids["dense"].axes, failures, "the planning of gradients")


def check_same_on_all_ranks(plan: GradPlan, grids: Mapping[str, RankGrid], broadcast: nn.Module | None) -> None:
    """Compare plans between ranks. Every rank raises ``ValueError`` with the first parameter that differs.

    broadcast  the module whose frozen parameters and buffers ``init_sync`` will overwrite: they are compared too

    Dense parameters and experts are compared over their own ranks each: inside the instances, then across.
    """
    grid_names = [("dense", "expert")] if grids["expert"] is grids["dense"] else [("dense",), ("expert",)]
    for own in grid_names:
        model = [line for grid_name in own for line in _describe_params(plan, grid_name)]
        model += [line for grid_name in own for line in _describe_rest(broadcast, grid_name)]
        buckets = [line for grid_name in own for line in _describe_buckets(plan, grid_name)]
        for group in grids[own[0]].axes:
            compare_between_ranks(group, {"model": model, "gradient plan": buckets})


def check_same_config(config: DistributedDataParallelConfig, ranks: Ranks) -> None:
    """Compare configs between ranks. Every rank raises ``ValueError`` with the first field that differs."""
    check_member(ranks, "process_group")
    if isinstance(ranks, DeviceMesh):
        groups = [ranks.get_group(axis) for axis in range(ranks.ndim)]
    else:
        default = group_or_default(ranks)
        groups = [] if default is None else [default]
    lines = [f"{field.name} = {getattr(config, field.name)}" for field in dataclasses.fields(config)]
    for group in groups:
        if group.size() > 1:
            compare_between_ranks(group, {"config": lines})


def _describe_params(plan: GradPlan, grid_name: str) -> Iterator[str]:
    for bucket in plan.buckets:
        for slot in bucket.slots if bucket.grid_name == grid_name else ():
            spec = slot.spec
            yield f"'{spec.name}' {spec.param_dtype} {list(spec.shape)} in bucket {bucket.index}"


def _describe_buckets(plan: GradPlan, grid_name: str) -> Iterator[str]:
    for bucket in plan.buckets:
        if bucket.grid_name == grid_name:
            grad_dtype = bucket.slots[0].spec.grad_dtype
            yield f"bucket {bucket.index} of {bucket.numel} elements {grad_dtype} in {bucket.shard_degree} shards"


def _describe_rest(module: nn.Module | None, grid_name: str) -> Iterator[str]:
    """Frozen parameters and buffers, which are in no plan."""
    if module is None:
        return
    for name, param in module.named_parameters():
        if not param.requires_grad and grid_name_of(param) == grid_name:
            yield f"frozen '{name}' {param.dtype} {list(param.shape)}"
    for name, buffer in module.named_buffers():
        if grid_name_of(buffer) == grid_name:
            yield f"buffer '{name}' {buffer.dtype} {list(buffer.shape)}"
