"""Hybrid sharding is bitwise the test's own sum of gradients: inside each instance first, then across."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_models import BUCKET_SIZE, STEPS, Everything, Trained, assert_bitwise, expert_group, run_steps, train
from summed_by_hand import train_by_hand
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate

SHAPES = [(2, 2), (2, 4), pytest.param((4, 2), marks=pytest.mark.slow)]  # instances, ranks in each


@functools.lru_cache(maxsize=2)
def by_hand(
    shape: tuple[int, int], microbatches: int, fused: bool, delayed: bool, variants: int, steps: int
) -> list[Trained]:
    instances, inner = shape
    return simulate(
        train_by_hand,
        instances * inner,
        fused=fused,
        delayed=delayed,
        microbatches=microbatches,
        num_instances=instances,
        num_variants=variants,
        steps=steps,
    )


def check(
    shape: tuple[int, int],
    *,
    microbatches: int,
    fused: bool,
    delayed: bool,
    variants: int,
    overlap: tuple[bool, bool],
    steps: int = STEPS,
) -> None:
    """overlap: (reductions, gathers)"""
    instances, inner = shape
    hybrid = simulate(
        train,
        instances * inner,
        "everything",
        fused=fused,
        delayed=delayed,
        microbatches=microbatches,
        num_variants=variants,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=instances,
        steps=steps,
        seed=7,
        overlap_grad_reduce=overlap[0],
        overlap_param_gather=overlap[1],
    )
    for ours, theirs in zip(hybrid, by_hand(shape, microbatches, fused, delayed, variants, steps), strict=True):
        assert_bitwise(ours, theirs)


OVERLAPS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("fused", "delayed"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_hybrid_adds_inside_first_then_across_everywhere(
    shape: tuple[int, int], microbatches: int, fused: bool, delayed: bool, overlap: tuple[bool, bool]
) -> None:
    check(shape, microbatches=microbatches, fused=fused, delayed=delayed, variants=2, overlap=overlap)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("shape", "microbatches", "fused", "delayed", "overlap", "variants"),
    [
        ((2, 2), 3, True, True, (True, True), 2),
        ((2, 2), 1, False, False, (False, False), 1),
        ((2, 4), 1, True, False, (True, True), 2),
    ],
)
@pytest.mark.sampled(1)
def test_hybrid_adds_inside_first_then_across(
    shape: tuple[int, int],
    microbatches: int,
    fused: bool,
    delayed: bool,
    overlap: tuple[bool, bool],
    variants: int,
) -> None:
    """A sample of the matrix above: both shapes, with all options on and with all off; five steps."""
    check(shape, microbatches=microbatches, fused=fused, delayed=delayed, variants=variants, overlap=overlap, steps=5)


VALUES = [1e8, 1.0, -1e8, 1.0]  # in fp32, 1e8 + 1 = 1e8


def summed(instances: int) -> list[float]:
    """The sum of one gradient over four ranks, on the rank that owns it."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=instances, calculate_per_token_loss=True
    )
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), config)
    ddp(torch.tensor([[VALUES[dist.get_rank()]]])).sum().backward()
    ddp.finish_grad_sync(num_tokens=torch.tensor(0.25))
    (bucket,) = ddp.buckets
    first = ddp.owned_range(bucket.layout)[0]
    return ddp.reduced_grads()[0][:1].tolist() if first == 0 else []


def test_the_order_matters() -> None:
    """Inside first: (1e8 + 1) + (-1e8 + 1) = 0. Across first it would be (1e8 - 1e8) + (1 + 1) = 2."""
    across_first = (torch.tensor(VALUES[0]) + VALUES[2]) + (torch.tensor(VALUES[1]) + VALUES[3])
    assert across_first == 2
    assert simulate(summed, 4, 2) == [[0.0], [], [0.0], []]


def train_on_a_mesh(two_dims: bool) -> Trained:
    rank = dist.get_rank()
    ddp_config: dict[str, Any] = {} if two_dims else {"num_distributed_optimizer_instances": 2}
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=BUCKET_SIZE,
        **ddp_config,
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if two_dims else None
    # Experts of rank 0 and 2, of 1 and 3: instances of one rank each, also as a mesh.
    experts = expert_group(2)
    if two_dims:
        experts = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("out", "variant", "in"))["out", "in"]
    model = Everything(fused=True, delayed=False, variant=rank % 2)
    ddp = DistributedDataParallel(model, config, process_group=mesh, expert_process_group=experts)
    return run_steps(ddp, DistributedOptimizer(ddp, lr=3e-2, weight_decay=0.1), 1, steps=5)


@pytest.mark.in_turn
def test_a_mesh_is_the_same_as_a_number_of_instances() -> None:
    for ours, theirs in zip(simulate(train_on_a_mesh, 4, True), simulate(train_on_a_mesh, 4, False), strict=True):
        assert_bitwise(ours, theirs)


def test_a_rank_may_finish_the_reductions_itself_and_the_others_leave_that_to_the_step() -> None:
    """On CPUs a wait begins the collective across instances: all ranks wait in the order of launches."""

    def on_rank(*, by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, num_distributed_optimizer_instances=2, bucket_size=1,
                overlap_grad_reduce=True, overlap_param_gather=True,
            ),
        )  # fmt: skip
        optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
        for step in range(2):
            model(torch.full((2, 16), 1.0 + dist.get_rank() + step)).sum().backward()
            if by_hand and dist.get_rank() == 3:
                model.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish_param_sync()
        return [param.detach().clone() for param in model.parameters()]

    expected = simulate(lambda: on_rank(by_hand=False), 4)
    for found in simulate(lambda: on_rank(by_hand=True), 4):
        assert all(map(torch.equal, found, expected[0]))
