"""A process without a process group: it trains alone if no launcher started others or it asks to; otherwise refused."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Experts
from loops import assert_same, ddp_backward, main_grads, make_batches, make_model, plain_backward, plain_grads, weights
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
    load_checkpoint,
    recorded_backward_order,
    save_checkpoint,
)
from maingrad.ddp.collectives.rank_grid import make_grids
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

WRAPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "DistributedDataParallel": (
        "process_group",
        lambda *ranks: DistributedDataParallel(make_model(), **dict(zip(["process_group"], ranks, strict=False))),
    ),
    "fully_shard": ("mesh", lambda *ranks: fully_shard(make_model(), *ranks)),
    "recorded_backward_order": (
        "process_group",
        lambda *ranks: recorded_backward_order(make_model(), lambda model: model(make_batches(1)[0]).sum(), *ranks),
    ),
}


@pytest.mark.parametrize("name", WRAPS)
def test_ranks_that_a_launcher_started_and_no_process_group_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets WORLD_SIZE. Without init_process_group every rank would train alone, without an error."""
    option, wrap = WRAPS[name]
    monkeypatch.setenv("WORLD_SIZE", "4")
    expected = rf"WORLD_SIZE=4.*init_process_group\(\) before wrapping.*{option}=maingrad.ddp.WORLD_OF_ONE"
    with pytest.raises(ValueError, match=expected):
        wrap()
    wrap(WORLD_OF_ONE)


@pytest.mark.parametrize("said", ["1", "", "many"])
@pytest.mark.parametrize("name", WRAPS)
def test_a_launcher_of_one_rank_is_as_good_as_none(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    WRAPS[name][1]()


def test_simulated_ranks_have_a_group_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert simulate(lambda: DistributedDataParallel(make_model()).grids["dense"].size, 2) == [2, 2]


# ---- A group that comes later. ----


def leave_all() -> int:
    """Leave the process group, as in a new process; returns the rank."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


def join_all(rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size)


def step_of(model: nn.Module) -> None:
    model(make_batches(1)[0]).sum().backward()
    model.finish_grad_sync()


def wrapped_first(name: str, size: int, *ranks: Any) -> None:
    """A program that wraps its model before a trainer initialises the process group."""
    rank = leave_all()
    model = WRAPS[name][1](*ranks)
    step_of(model)
    if isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    join_all(rank, size)
    with torch.no_grad():
        model(make_batches(1)[0])
    if size == 1 or ranks:
        step_of(model)
        return
    with pytest.raises(RuntimeError, match=rf"{name}.*before torch.distributed.init_process_group.* {size} ranks now"):
        step_of(model)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["DistributedDataParallel", "fully_shard"])
def test_a_group_made_after_wrapping_is_refused_at_the_next_forward(name: str, size: int) -> None:
    simulate(wrapped_first, size, name, size)


def captured_first(size: int) -> None:
    """The same of a program that has captured its step before."""
    rank = leave_all()
    model = DistributedDataParallel(make_model())
    optimizer = DistributedOptimizer(model, lr=0.1)

    def train_step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = GraphedTrainingStep(train_step, model, optimizer)
    for _ in range(4):
        step(make_batches(1)[0])
    join_all(rank, size)
    if size == 1:
        step(make_batches(1)[0])
        return
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*before torch.distributed.init_process_group"):
        step(make_batches(1)[0])
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_made_after_a_capture_is_refused_at_the_next_replay(size: int) -> None:
    simulate(captured_first, size, size)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "fully_shard"])
def test_a_world_of_one_that_was_asked_for_stays_one(name: str) -> None:
    simulate(wrapped_first, 2, name, 2, WORLD_OF_ONE)


def gradients_past_the_wrapper() -> None:
    """Backwards of the inner module, which the wrapper's forward does not see."""
    rank = leave_all()
    ddp = DistributedDataParallel(make_model())
    join_all(rank, 2)
    ddp.module(make_batches(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"made before torch.distributed.init_process_group"):
        ddp.finish_grad_sync()


def test_without_a_forward_of_the_wrapper_it_is_refused_at_the_reduction() -> None:
    simulate(gradients_past_the_wrapper, 2)


# ---- Alone among others. ----


def alone_beside_another() -> None:
    batches = make_batches(3, seed=dist.get_rank())
    plain = make_model(fuse=False)
    plain_backward(plain, batches)
    ddp = DistributedDataParallel(
        make_model(),
        DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
        process_group=WORLD_OF_ONE,
    )
    ddp_backward(ddp, batches)
    assert_same(main_grads(ddp), plain_grads(plain))


def test_a_world_of_one_hears_of_nobody() -> None:
    simulate(alone_beside_another, 2)


def dense_and_experts(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = DistributedOptimizer(ddp, lr=0.1, max_grad_norm=1.0)
    for step in range(2):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    optimizer.finish_param_sync()


def experts_of_their_own(sharded: bool, group: Callable[[], Any]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_param_gather=sharded)
    ddp = DistributedDataParallel(Experts(0, rank, marked=True), config, expert_process_group=group())
    dense_and_experts(ddp, rank)
    return weights(ddp)


def a_group_of_one() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_experts_alone_train_as_in_a_group_of_one_rank(sharded: bool) -> None:
    first, second = simulate(experts_of_their_own, 2, sharded, lambda: WORLD_OF_ONE)
    for ours, theirs in zip((first, second), simulate(experts_of_their_own, 2, sharded, a_group_of_one), strict=True):
        assert_same(ours, theirs)
    assert torch.equal(first["dense.weight"], second["dense.weight"])
    assert not torch.equal(first["expert.weight"], second["expert.weight"])


def sharded_around_experts(path: str, mesh: Callable[[], Any]) -> dict[str, Tensor]:
    """Units over all ranks around a unit of one rank; saved, and loaded into other experts."""
    rank = dist.get_rank()

    def build(seed: int) -> Any:
        model = Experts(seed, rank)
        fully_shard(model.expert, mesh=mesh())
        return fully_shard(model)

    model: Any = build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(path, model)
    read = build(1)
    load_checkpoint(path, read)
    found = []
    for each in (model, read):
        with each.unsharded():
            found.append({name: param.detach().clone() for name, param in each.named_parameters()})
    assert_same(*found)
    return found[0]


def test_a_unit_of_one_rank_inside_units_of_all(tmp_path: Path) -> None:
    first, second = simulate(sharded_around_experts, 2, str(tmp_path / "ours"), lambda: WORLD_OF_ONE)
    twins = simulate(sharded_around_experts, 2, str(tmp_path / "theirs"), a_group_of_one)
    for ours, theirs in zip((first, second), twins, strict=True):
        assert_same(ours, theirs)
    assert torch.equal(first["dense.weight"], second["dense.weight"])
    assert not torch.equal(first["expert.weight"], second["expert.weight"])


def saved_by_each(path: str) -> None:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Experts(0, rank, marked=True), expert_process_group=WORLD_OF_ONE)
    save_checkpoint(path, ddp)
    other = DistributedDataParallel(Experts(1, rank, marked=True), expert_process_group=WORLD_OF_ONE)
    load_checkpoint(path, other)
    assert_same(weights(other), weights(ddp))


def test_a_checkpoint_keeps_each_ranks_experts(tmp_path: Path) -> None:
    simulate(saved_by_each, 2, str(tmp_path / "step"))


def test_the_world_of_one_is_one_object() -> None:
    assert type(WORLD_OF_ONE)() is WORLD_OF_ONE
    assert copy.deepcopy(WORLD_OF_ONE) is WORLD_OF_ONE
    assert pickle.loads(pickle.dumps(WORLD_OF_ONE)) is WORLD_OF_ONE
    assert repr(WORLD_OF_ONE) == "maingrad.ddp.WORLD_OF_ONE"


def test_alone_experts_have_the_grid_of_all_parameters() -> None:
    grids = make_grids(WORLD_OF_ONE, WORLD_OF_ONE, has_experts=True, num_instances=1, separate_gather=False)
    assert grids["expert"] is grids["dense"]
