"""Checks of a rank's model, configuration and groups, and the plan, before memory is allocated.

``plan_on_each_rank`` runs them so that an error of one rank is raised on all ranks: a new refusal goes there.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..collectives.agreement import run_on_all_ranks
from ..collectives.failure_report import FailureReporter
from ..collectives.in_flight import backends_of
from ..collectives.mapped_memory import check_copy_engines
from ..collectives.rank_grid import RankGrid
from ..config import DistributedDataParallelConfig
from ..contract.torch_ddp import check_none_inside
from ..plan.layout import GradPlan
from ..plan.model_plan import plan_model
from ..plan.owned_params import ModelTensor, OwnedParam, check_plain, check_shapes
from ..plan.parallel_marks import check_marks

__all__ = ["check_arguments", "plan_on_each_rank"]


def check_arguments(module: object, config: object) -> None:
    """Raise ``TypeError`` for what is no module or configuration."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel takes one nn.Module first, got {type(module).__name__}")
    if not isinstance(config, DistributedDataParallelConfig | None):
        raise TypeError(f"config is a maingrad.ddp.DistributedDataParallelConfig, got {type(config).__name__}")


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
    if config.copy_engine_param_gather:
        check_copy_engines(backends, device, "copy_engine_param_gather")
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


def plan_on_each_rank(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    overwritten: Iterable[ModelTensor],
    config: DistributedDataParallelConfig,
    grids: Mapping[str, RankGrid],
    backward_order: Sequence[str] | None,
    failures: FailureReporter,
) -> tuple[torch.device, GradPlan]:
    """The model's device, and the plan of its gradients. An error on one rank is raised on all ranks.

    overwritten  tensors that training or ``init_sync`` will overwrite
    """

    def plan() -> tuple[torch.device, GradPlan]:
        sharded = config.use_distributed_optimizer
        degrees = {grid_name: grid.inner_size if sharded else 1 for grid_name, grid in grids.items()}
        device = _check_setup(module, trainable, config, grids.values())
        _check_overwritten(overwritten)
        check_marks([(each.name, each.param) for each in trainable], grids["dense"], config)
        return device, plan_model(trainable, config, shard_degree=degrees, backward_order=backward_order)

    return run_on_all_ranks(plan, grids["dense"].axes, failures, "the planning of gradients")
