"""Compares configuration, model and plan between ranks, and gives all ranks the values that a model starts with.

Each check raises ``ValueError`` on all ranks.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..collectives.failure_report import FailureReporter
from ..collectives.in_flight import group_or_default
from ..collectives.rank_grid import RankGrid, check_member
from ..collectives.world import Ranks
from ..config import DistributedDataParallelConfig
from ..plan.layout import GradPlan
from ..plan.owned_params import ModelTensor

__all__ = ["broadcast_tensors", "check_same_config", "check_same_model", "compare_between_ranks"]


def check_same_config(config: DistributedDataParallelConfig, ranks: Ranks) -> None:
    """Compare configs between ranks. The error shows the first field that differs."""
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


def check_same_model(plan: GradPlan, overwritten: Collection[ModelTensor], grids: Mapping[str, RankGrid]) -> None:
    """Compare models and plans between ranks. The error shows the first parameter, buffer or bucket that differs.

    overwritten  tensors that training or ``init_sync`` will overwrite

    Dense parameters and experts are compared over their own ranks each: inside the instances, then across.
    """
    for own in [("dense", "expert")] if grids["expert"] is grids["dense"] else [("dense",), ("expert",)]:
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
        for group in grids[own[0]].axes:
            compare_between_ranks(group, {"model": model, "gradient plan": buckets})


def compare_between_ranks(group: dist.ProcessGroup, mine: Mapping[str, list[str]]) -> None:
    """Raise ``ValueError`` on all ranks unless all have the same lines; the error shows the first line that differs.

    mine  title -> lines of this rank
    """
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


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[ModelTensor], grids: Mapping[str, RankGrid], failures: FailureReporter) -> None:
    """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
    with failures.watch("the broadcast of parameters and buffers"):
        for each in tensors:
            grids[each.grid_name].broadcast(each.tensor.detach())
            torch.autograd.graph.increment_version(each.tensor)  # collectives do not raise it, and masters follow it
