"""Ties a model's parameters to buckets: who owns each one, where it lies in the plan, and whether that still holds."""

import dataclasses
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.compat import zero_cta_options
from .agreement import alike
from .bucket import Bucket
from .buffer import FlatBuffer
from .collectives import backend_of, group_or_default
from .config import DistributedDataParallelConfig
from .failure_report import FailureReporter
from .grad_record import GradRecord
from .layout import GradPlan, ParamSpec, plan_gradients
from .main_grad import check_unattached, is_delayed
from .rank_grid import RankGrid, check_member
from .torch_ddp import check_none_inside
from .torch_fsdp import is_sharded_by_torch
from .waiting_modules import registered_params
from .wgrad_module import DelayedWgradModule, FusedWgradModule
from .world import Ranks

__all__ = [
    "OwnedParam",
    "WiredParam",
    "allocate_buckets",
    "check_copy_engines",
    "check_same_config",
    "check_same_on_all_ranks",
    "check_setup",
    "compare_between_ranks",
    "find_owned_params",
    "grad_dtype_of",
    "kind_of",
    "plan_model",
    "plan_on_each_rank",
]


class OwnedParam(NamedTuple):
    """A parameter and the modules that register it. The first owner gives it its name."""

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def ours_alone(self) -> bool:
        """Whether every owner writes its gradient through a ``WgradTarget``."""
        return all(isinstance(m, FusedWgradModule) and local in m.fused_wgrad_weights() for m, local in self.owners)

    @property
    def delayed(self) -> bool:
        """Whether an owner computes its gradient after the main backward."""
        return is_delayed(self.param) or any(
            isinstance(m, DelayedWgradModule) and local in m.delayed_wgrad_weights() for m, local in self.owners
        )


class WiredParam(NamedTuple):
    """A parameter with its place, as it was when the model was wrapped."""

    owned: OwnedParam
    record: GradRecord
    bucket: Bucket
    dtype: torch.dtype
    device: torch.device

    def check(self) -> None:
        """Raise if the parameter is no longer the tensor that was wrapped."""
        name, param, owners = self.owned
        module, local = owners[0]
        found = registered_params(module).get(local)
        if found is not param and found is not None and is_sharded_by_torch(found):
            raise RuntimeError(
                f"parameter '{name}' was made a DTensor after wrapping (torch.distributed.fsdp.fully_shard, or tensor "
                f"parallelism), and its gradient would never be reduced here: use torch's fully_shard alone, "
                f"maingrad.fsdp.fully_shard in its place, or this wrapper over a model of plain parameters"
            )
        if found is not param:
            raise RuntimeError(
                f"parameter '{name}' was replaced after wrapping (load_state_dict(assign=True), a new nn.Parameter): "
                f"its gradient would never be reduced; load with assign=False, or wrap again"
            )
        if param.dtype is not self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter '{name}' is {param.dtype} on {param.device}, and was {self.dtype} on {self.device} when it "
                f"was wrapped: its main_grad did not move along; call .to() before wrapping"
            )
        if not param.requires_grad:
            raise RuntimeError(
                f"parameter '{name}' was frozen (requires_grad_(False)) after wrapping: its gradient would be reduced "
                f"as zero, and momentum or decay move it on; freeze before wrapping, or unwrap() and wrap again. "
                f"Where a backward is to go through the model without training it (a generator's, through its "
                f"discriminator), freeze all of its parameters and unfreeze them before finish_grad_sync(); or run "
                f"that backward under no_sync() of this model, then its zero_grad()"
            )


def kind_of(tensor: torch.Tensor) -> str:
    """Over which ranks it is reduced: "expert" where Megatron-core's mark says that not all have it, else "dense"."""
    return "dense" if getattr(tensor, "allreduce", True) else "expert"


def find_owned_params(module: nn.Module) -> list[OwnedParam]:
    """Every parameter of the model once, in registration order, with all modules that register it."""
    owners: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, owner in module.named_modules():
        for local, param in owner._parameters.items():
            if param is not None:
                owners[param].append((owner, local))
                names.setdefault(param, f"{prefix}.{local}" if prefix else local)
    return [OwnedParam(name, param, tuple(owners[param])) for param, name in names.items()]


def check_setup(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    grids: Iterable[RankGrid],
) -> torch.device:
    """The one device of all trainable parameters of ``module``; raises for settings that cannot work there."""
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


def check_copy_engines(grids: Iterable[RankGrid], device: torch.device, option: str) -> None:
    """Raise ``ValueError`` where gathers cannot run on copy engines."""
    backends = {backend_of(group, device) for grid in grids for group in grid.axes}
    on_nccl = device.type == "cuda" and all("nccl" in backend for backend in backends)
    if not (on_nccl and zero_cta_options() is not None):
        raise ValueError(
            f"{option} needs parameters on CUDA, NCCL 2.28 or newer, and a torch that knows its zero-CTA policy; got "
            f"{device} and {', '.join(sorted(backends)) or 'no process group'}; leave it False"
        )


def plan_on_each_rank(
    module: nn.Module,
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    grids: Mapping[str, RankGrid],
    backward_order: Sequence[str] | None,
    failures: FailureReporter,
) -> tuple[torch.device, GradPlan]:
    """The device of ``check_setup``, and ``plan_model`` for these ranks. What fails on one rank is raised on all."""

    def plan() -> tuple[torch.device, GradPlan]:
        degrees = {kind: grid.inner_size if config.use_distributed_optimizer else 1 for kind, grid in grids.items()}
        device = check_setup(module, trainable, config, grids.values())
        return device, plan_model(trainable, config, shard_degree=degrees, backward_order=backward_order)

    return alike(plan, grids["dense"].axes, failures, "the planning of gradients")


def plan_model(
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    *,
    shard_degree: int | Mapping[str, int],
    backward_order: Sequence[str] | None = None,
) -> GradPlan:
    """The plan for these parameters; pure, so that it also works on the meta device for any number of ranks.

    backward_order  names in the order in which backward reaches them; None: reverse registration order
    """
    by_name = {owned.name: owned for owned in trainable}
    if backward_order is None:
        names = list(reversed(by_name))
    else:
        names = list(backward_order)
        if set(names) != set(by_name) or len(names) != len(by_name):
            missing, unknown = sorted(set(by_name) - set(names)), sorted(set(names) - set(by_name))
            raise ValueError(
                f"backward_order must name each trainable parameter once; missing {missing}, unknown {unknown}, "
                f"{len(names)} names for {len(by_name)} parameters"
            )
    specs = [
        ParamSpec(
            name=name,
            shape=tuple(by_name[name].param.shape),
            param_dtype=by_name[name].param.dtype,
            grad_dtype=grad_dtype_of(
                by_name[name].param.dtype, torch.float32 if config.grad_reduce_in_fp32 else by_name[name].param.dtype
            ),
            group=kind_of(by_name[name].param),
            delayed=by_name[name].delayed,
            own_bucket=getattr(by_name[name].param, "shared_embedding", False),  # Megatron's mark: tied across stages
        )
        for name in names
    ]
    return plan_gradients(
        specs,
        shard_degree=shard_degree,
        bucket_numel=config.bucket_size,
        num_buckets=config.num_buckets,
        keep_params_whole=config.keep_params_whole,
        pad_for_bus_bandwidth=config.pad_buckets_for_high_nccl_busbw,
    )


def grad_dtype_of(param_dtype: torch.dtype, of_half: torch.dtype) -> torch.dtype:
    """Dtype of ``main_grad``: ``of_half`` under parameters in half precision, the parameter's own otherwise."""
    return of_half if param_dtype in (torch.bfloat16, torch.float16) else param_dtype


def allocate_buckets(
    plan: GradPlan, trainable: Sequence[OwnedParam], device: torch.device
) -> tuple[list[Bucket], list[WiredParam]]:
    """Allocate the plan's buffers and cut them into buckets (in launch order) and records (in backward order)."""
    by_name = {owned.name: owned for owned in trainable}
    buckets, wired = [], []
    for buffer_layout in plan.buffers:
        buffer = FlatBuffer(buffer_layout, buffer_layout.grad_dtype, device)
        for layout in buffer_layout.buckets:
            owned_here = [by_name[slot.spec.name] for slot in layout.slots]
            records = [
                GradRecord(
                    owned.name,
                    buffer.param_view(slot),
                    first_write_overwrites=owned.ours_alone,
                    shared=len(owned.owners) > 1,
                    bucket_index=layout.index,
                )
                for owned, slot in zip(owned_here, layout.slots, strict=True)
            ]
            bucket = Bucket(layout, buffer.bucket_view(layout), records)
            buckets.append(bucket)
            wired += [
                WiredParam(owned, record, bucket, owned.param.dtype, device)
                for owned, record in zip(owned_here, records, strict=True)
            ]
    return sorted(buckets, key=lambda bucket: bucket.index), wired


def check_same_on_all_ranks(plan: GradPlan, grids: Mapping[str, RankGrid], broadcast: nn.Module | None) -> None:
    """Compare plans across ranks; every rank raises ``ValueError`` with the first parameter that differs.

    broadcast  a module whose frozen parameters and buffers are about to be overwritten by the first rank's, and must
               fit them

    Each kind of parameters is compared over its own ranks: inside the instances, then across.
    """
    kinds = [("dense", "expert")] if grids["expert"] is grids["dense"] else [("dense",), ("expert",)]
    for own in kinds:
        model = [line for kind in own for line in _describe_params(plan, kind)]
        model += [line for kind in own for line in _describe_rest(broadcast, kind)]
        buckets = [line for kind in own for line in _describe_buckets(plan, kind)]
        for group in grids[own[0]].axes:
            compare_between_ranks(group, {"model": model, "gradient plan": buckets})


def check_same_config(config: DistributedDataParallelConfig, ranks: Ranks) -> None:
    """Compare configs before a collective depends on them; every rank raises ``ValueError`` with what differs."""
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


def compare_between_ranks(group: dist.ProcessGroup, mine: Mapping[str, list[str]]) -> None:
    """Compare this rank's lines with the others'; raises ``ValueError`` with the first that differs, and its title."""
    fingerprint = hashlib.sha256(repr(mine).encode()).hexdigest()
    fingerprints: list[str] = [""] * group.size()
    dist.all_gather_object(fingerprints, fingerprint, group=group)
    if len(set(fingerprints)) == 1:
        return
    all_lines: list[Mapping[str, list[str]]] = [mine] * group.size()
    dist.all_gather_object(all_lines, mine, group=group)
    other = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
    first_name, other_name = (f"rank {dist.get_global_rank(group, rank)}" for rank in (0, other))
    for title, ours in all_lines[0].items():
        for first, second in zip_longest(ours, all_lines[other][title], fillvalue="nothing"):
            if first != second:
                raise ValueError(
                    f"the {title} differs between ranks (this is rank {dist.get_rank()}): {first_name} has {first} "
                    f"where {other_name} has {second}"
                )


def _describe_params(plan: GradPlan, kind: str) -> Iterator[str]:
    for bucket in plan.buckets:
        for slot in bucket.slots if bucket.group == kind else ():
            spec = slot.spec
            yield f"'{spec.name}' {spec.param_dtype} {list(spec.shape)} in bucket {bucket.index}"


def _describe_buckets(plan: GradPlan, kind: str) -> Iterator[str]:
    for bucket in plan.buckets:
        if bucket.group == kind:
            grad_dtype = bucket.slots[0].spec.grad_dtype
            yield f"bucket {bucket.index} of {bucket.numel} elements {grad_dtype} in {bucket.shard_degree} shards"


def _describe_rest(module: nn.Module | None, kind: str) -> Iterator[str]:
    """What the plan does not know of."""
    if module is None:
        return
    for name, param in module.named_parameters():
        if not param.requires_grad and kind_of(param) == kind:
            yield f"frozen '{name}' {param.dtype} {list(param.shape)}"
    for name, buffer in module.named_buffers():
        if kind_of(buffer) == kind:
            yield f"buffer '{name}' {buffer.dtype} {list(buffer.shape)}"
