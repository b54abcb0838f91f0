"""Buffers of experts' modules stay each rank's own, under every wrapper, and move with checkpoints between wrappers.

Nobody marks the buffers: the parameters of their module decide, as they do in Megatron-core.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.plan.owned_params import find_tensors
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

WAYS = ("ddp", "zero1", "fully_shard")


class Expert(nn.Module):
    """Buffers beside parameters, in a module inside with parameters, and in one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.up.register_buffer("load", torch.rand(3))
        self.limits = nn.Module()
        self.limits.register_buffer("range", torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.limits.range.sum()


class Layer(nn.Module):
    """A router that all ranks hold alike, and experts, whose container has a buffer and no parameter."""

    def __init__(self, variant: int, *, marked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4)
        self.router.register_buffer("bias_of_experts", torch.rand(4))
        self.register_buffer("seen", torch.rand(2))
        torch.manual_seed(100 + variant)
        self.experts = nn.ModuleList([Expert(), Expert()])
        self.experts.register_buffer("tokens", torch.rand(2))
        for param in self.experts.parameters() if marked else ():
            param.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x + self.router(x)


def own(name: str) -> bool:
    return name.startswith("experts.")


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): buffer.clone() for name, buffer in model.named_buffers()}


def wrapped(way: str, variant: int) -> tuple[Any, Any]:
    model = Layer(variant, marked=way != "fully_shard")
    if way == "fully_shard":
        for expert in model.experts:
            fully_shard(expert, WORLD_OF_ONE)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    config = DistributedDataParallelConfig(use_distributed_optimizer=way == "zero1")
    ddp = DistributedDataParallel(model, config, expert_process_group=WORLD_OF_ONE)
    return ddp, DistributedOptimizer(ddp, lr=0.1)


def after_wrapping(way: str) -> dict[str, Tensor]:
    return buffers_of(wrapped(way, dist.get_rank())[0])


@pytest.mark.parametrize("way", WAYS)
def test_wrapping_leaves_them_each_ranks_own(way: str) -> None:
    for rank, found in enumerate(simulate(after_wrapping, 2, way)):
        for name, buffer in Layer(rank, marked=False).named_buffers():
            assert torch.equal(found[name], buffer), name


def saved(way: str, path: Path) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model, optimizer = wrapped(way, rank)
    model((1 + rank) * torch.randn(8, 4)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    return buffers_of(model)


def loaded(way: str, path: Path) -> dict[str, Tensor]:
    model, optimizer = wrapped(way, 10 + dist.get_rank())
    load_checkpoint(path, model, optimizer)
    return buffers_of(model)


@pytest.mark.parametrize(("one", "other"), [("zero1", "fully_shard"), ("fully_shard", "zero1"), ("ddp", "fully_shard")])
@pytest.mark.sampled(1)
def test_a_checkpoint_of_one_wrapper_is_read_under_another(one: str, other: str, tmp_path: Path) -> None:
    written = simulate(saved, 2, one, tmp_path / "saved")
    read = simulate(loaded, 2, other, tmp_path / "saved")
    assert not torch.equal(written[0]["experts.1.up.load"], written[1]["experts.1.up.load"])
    for theirs, ours in zip(written, read, strict=True):
        for name, buffer in theirs.items():
            assert torch.equal(ours[name], buffer), name


def test_which_buffers_are_experts() -> None:
    model = Layer(0, marked=True)
    found = {each.name: each.grid_name for each in find_tensors(model) if each.is_buffer}
    assert found == {name: "expert" if own(name) else "dense" for name, _ in model.named_buffers()}
    model.experts[0].up.load.allreduce = True  # somebody knows better
    model.seen.allreduce = False
    found = {each.name: each.grid_name for each in find_tensors(model) if each.is_buffer}
    assert (found["experts.0.up.load"], found["experts.1.up.load"], found["seen"]) == ("dense", "expert", "expert")


def saved_once(path: Path) -> None:
    model, _ = wrapped("ddp", dist.get_rank())
    for name, buffer in model.module.named_buffers():
        if own(name):
            buffer.allreduce = True
    save_checkpoint(path, model)


def test_a_checkpoint_that_has_them_once_is_still_read(tmp_path: Path) -> None:
    """Before, unmarked buffers were stored once for all sets."""
    simulate(saved_once, 2, tmp_path / "saved")
    first = dict(Layer(0, marked=False).named_buffers())

    for found in simulate(loaded_weights, 2, tmp_path / "saved"):
        for name, buffer in found.items():
            assert torch.equal(buffer, first[name]), name


def loaded_weights(path: Path) -> dict[str, Tensor]:
    model, _ = wrapped("zero1", 10 + dist.get_rank())
    load_checkpoint(path, model)
    return buffers_of(model)
