"""Data parallelism without a wrapper's collectives: every rank's gradients are fetched and added up in the open."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from parity_models import STEPS, Everything, Piece, Trained, backward, expert_group
from torch import Tensor

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

__all__ = ["alone", "everyones_grads", "train_by_hand", "tree_sum"]


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Pairwise, neighbours first; an odd one moves up: the order in which simulated ranks add."""
    level = list(terms)
    while len(level) > 1:
        level = [level[i] + level[i + 1] if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def alone(model: torch.nn.Module, **config: Any) -> DistributedDataParallel:
    """Wrapped for this rank alone: gradients accumulate, and nothing is reduced."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DistributedDataParallel(model, DistributedDataParallelConfig(**config), process_group=group)


def everyones_grads(ddp: DistributedDataParallel) -> dict[str, list[Tensor]]:
    """What every rank has accumulated, by name and then by rank."""
    grads: dict[str, list[Tensor]] = {record.name: [] for record in ddp.records}
    for bucket in ddp.buckets:
        gathered = [torch.empty_like(bucket.grad_data) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, bucket.grad_data)
        for slot, record in zip(bucket.layout.slots, bucket.records, strict=True):
            start = slot.start - bucket.layout.start
            end = start + slot.spec.numel
            grads[record.name] = [flat[start:end].view(slot.spec.shape) for flat in gathered]
    return grads


def train_by_hand(
    *,
    fused: bool,
    delayed: bool,
    microbatches: int,
    num_instances: int,
    num_variants: int,
    steps: int = STEPS,
    add: Callable[[Sequence[Tensor]], Tensor] = tree_sum,
) -> Trained:
    """``parity_models.train`` of everything, but gradients are scaled, added inside each instance, then across."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = alone(Everything(fused=fused, delayed=delayed, variant=rank % num_variants))
    optimizer = DistributedOptimizer(ddp, lr=3e-2, weight_decay=0.1)
    group = expert_group(num_variants)
    expert_ranks = list(range(size)) if group is None else dist.get_process_group_ranks(group)
    trained = Trained([], [], [])
    for step in range(steps):
        trained.losses.extend(backward(ddp, step, microbatches))
        grads = {}
        by_name = everyones_grads(ddp)
        for record in ddp.records:
            ranks = expert_ranks if record.name.startswith("experts") else list(range(size))
            scaled = [by_name[record.name][r] * (1.0 / size) for r in ranks]
            per_instance = len(ranks) // num_instances
            instances = [add(scaled[i : i + per_instance]) for i in range(0, len(ranks), per_instance)]
            record.view.copy_(add(instances))
            grads[record.name] = Piece(0, record.view.flatten().clone())
        trained.grads.append(grads)
        optimizer.step()
        trained.weights.append({name: weight.detach().clone() for name, weight in ddp.module.named_parameters()})
        ddp.zero_grad_buffer()
    return trained
