"""Experts over ranks under each wrapper: five clipped steps have the gradients, norms and weights of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from dispatched import DIM, EXPERTS, Tokens, experts_of, number, rank_groups, routed
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from maingrad.ddp.plan.model_slice import Box, ModelSlice, set_model_slice
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear, TokenDispatcher, WgradQueue, delayed_wgrad

STEPS = 5
MAX_NORM = 0.05
LR = 0.5
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)]
WRAPPERS: dict[str, dict[str, Any] | None] = {
    "DDP": {"overlap_grad_reduce": True},
    "ZeRO-1": {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
    "ZeRO-3": None,
}
HYBRID = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}


class Block(nn.Module):
    """A dense layer, a router, and experts whose outputs are added."""

    def __init__(self, rank: int, ranks: int, dispatcher: TokenDispatcher, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = Linear(DIM, DIM, fuse_wgrad_accumulation=fused)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = experts_of(rank, ranks, fuse_wgrad_accumulation=fused)
        self.place = rank, ranks
        self.dispatcher = dispatcher
        if ranks == 1:
            for param in self.experts.parameters():
                del param.allreduce

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        probs, ids = self.router(h).softmax(-1).topk(2)
        return h + routed(Tokens(h, ids, probs), self.experts, self.dispatcher)


class Step(NamedTuple):
    """A step's gradients and norm, and the weights after it, by names that are the same in each layout."""

    grads: dict[str, Tensor]
    norm: Tensor
    weights: dict[str, Tensor]


def by_expert(model: Block, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' names with their number among all."""

    def name_of(name: str) -> str:
        product, weight, _ = name.rpartition("weight")
        return f"{product}{number(name, *model.place)}" if name.startswith("experts.") and weight else name

    return {name_of(name): tensor.detach().clone() for name, tensor in tensors.items()}


def batch(step: int, rank: int) -> Tensor:
    """Other numbers of tokens on each rank."""
    return torch.randn(3 + rank % 3, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


@cache
def plain(ranks: int) -> list[Step]:
    """One process has all experts, and averages the losses of all ranks."""
    model = Block(0, 1, TokenDispatcher(EXPERTS, WORLD_OF_ONE), fused=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(model, batch(step, rank)) / ranks).backward()
        grads = by_expert(model, {name: param.grad for name, param in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(grads, norm, by_expert(model, dict(model.named_parameters()))))
    return steps


def over_ranks(wrapper: str, ep: int, delayed: bool = False) -> list[Step]:
    group, edp = rank_groups(ep)
    model = Block(group.rank(), ep, TokenDispatcher(EXPERTS, group), fused=True)
    same = (edp if edp.size() > 1 else WORLD_OF_ONE) if ep > 1 else None
    options = HYBRID if wrapper == "hybrid" else WRAPPERS[wrapper]
    if options is None:
        return sharded(model, same, lambda step: loss_of(model, batch(step, dist.get_rank())))
    config = DistributedDataParallelConfig(bucket_size=200, **options)
    ddp = DistributedDataParallel(model, config, expert_process_group=same)
    return replicated(model, ddp, lambda step: loss_of(ddp, batch(step, dist.get_rank())), delayed)


def of_sequences(wrapper: str) -> list[Step]:
    """Tensor-parallel pairs of ranks, which have a part of the tokens each; the experts are spread over all four."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    model = Block(dist.get_rank(), 4, TokenDispatcher(EXPERTS), fused=True)
    for param in (*model.dense.parameters(), *model.router.parameters()):
        param.sequence_parallel = True
    for param in model.experts.parameters():
        shape = tuple(param.shape)
        set_model_slice(param, ModelSlice(shape, (Box((0,) * len(shape), shape),), 0, None, "slice"))

    def loss(wrapped: nn.Module, step: int) -> Tensor:
        x = batch(step, dp.rank())
        return wrapped(x.tensor_split(2)[tp.rank()]).square().sum() / x.numel()

    if WRAPPERS[wrapper] is None:
        return sharded(model, WORLD_OF_ONE, lambda step: loss(model, step), dp, tp)
    config = DistributedDataParallelConfig(**WRAPPERS[wrapper])
    ranks = {"process_group": dp, "tensor_parallel_group": tp, "expert_process_group": WORLD_OF_ONE}
    ddp = DistributedDataParallel(model, config, **ranks)
    return replicated(model, ddp, lambda step: loss(ddp, step))


def replicated(
    model: Block, ddp: DistributedDataParallel, loss_in: Callable[[int], Tensor], delayed: bool = False
) -> list[Step]:
    optimizer = DistributedOptimizer(ddp, LR, optimizer_class=torch.optim.SGD, max_grad_norm=MAX_NORM)
    queue = WgradQueue(fill_waits=True)
    steps = []
    for step in range(STEPS):
        with delayed_wgrad(queue) if delayed else nullcontext():
            loss = loss_in(step)
        loss.backward()
        queue.drain()
        ddp.finish_grad_sync()
        grads = {}
        if not ddp.ddp_config.use_distributed_optimizer:
            grads = by_expert(model, {name: param.main_grad for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.finish_param_sync()
        ddp.zero_grad_buffer()
        steps.append(Step(grads, optimizer.grad_norm, by_expert(model, dict(model.named_parameters()))))
    return steps


def sharded(
    model: Block, same_experts: Any, loss_in: Callable[[int], Tensor], ranks: Any = None, tensor_ranks: Any = None
) -> list[Step]:
    if same_experts is not None:
        fully_shard(model.experts, same_experts, tensor_parallel_group=tensor_ranks)
    fully_shard(model, ranks, tensor_parallel_group=tensor_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    for step in range(STEPS):
        loss_in(step).backward()
        grads = by_expert(model, {name: param.grad.full_tensor() for name, param in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        with model.unsharded(), model.experts.unsharded() if same_experts is not None else nullcontext():
            steps.append(Step(grads, norm, by_expert(model, dict(model.named_parameters()))))
    return steps


def assert_as_plain(parts: list[list[Step]], batches: int) -> None:
    for number_of_step, expected in enumerate(plain(batches)):
        assert expected.norm > 2 * MAX_NORM
        for part in parts:
            found = part[number_of_step]
            torch.testing.assert_close(found.norm, expected.norm, rtol=1e-5, atol=0.0)
            for of_found, of_plain in ((found.grads, expected.grads), (found.weights, expected.weights)):
                for name, tensor in of_found.items():
                    torch.testing.assert_close(tensor, of_plain[name], rtol=1e-4, atol=1e-6, msg=name)
        held = {name for part in parts for name in part[number_of_step].weights}
        assert held == expected.weights.keys()


@pytest.mark.in_turn
@pytest.mark.parametrize(("ranks", "ep"), LAYOUTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_five_clipped_steps_are_those_of_one_process(wrapper: str, ranks: int, ep: int) -> None:
    assert_as_plain(simulate(over_ranks, ranks, wrapper, ep), ranks)


@pytest.mark.in_turn
def test_experts_in_two_instances_of_four_ranks() -> None:
    assert_as_plain(simulate(over_ranks, 8, "hybrid", 2), 8)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_experts_may_span_tensor_parallel_ranks_with_parts_of_sequences(wrapper: str) -> None:
    assert_as_plain(simulate(of_sequences, 4, wrapper), 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("wrapper", ["DDP", "ZeRO-1"])
def test_gradients_computed_while_rows_travel_are_the_same_bit_for_bit(wrapper: str) -> None:
    at_once, delayed = (simulate(over_ranks, 4, wrapper, 2, delayed) for delayed in (False, True))
    for one, other in zip(at_once, delayed, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert torch.equal(expected.norm, found.norm)
            assert all(torch.equal(expected.weights[name], found.weights[name]) for name in expected.weights)
