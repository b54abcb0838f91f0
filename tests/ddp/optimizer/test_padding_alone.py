"""Ranks whose shard of a bucket is only padding, or without a parameter of a group: every class resumes.

Fault 27: such a rank's optimizer lacked state of what no checkpoint holds.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from few_elements import FewElements
from loops import weights, wrap
from torch import Tensor, nn, optim

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.launch import simulate

SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "all-reduced": (2, {}),
    "ZeRO-1": (8, {**SHARDED, "bucket_size": 1}),
    "hybrid": (4, {**SHARDED, "bucket_size": 20, "num_distributed_optimizer_instances": 2}),
    "whole": (4, {**SHARDED, "keep_params_whole": True}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD, momentum": {"optimizer_class": optim.SGD, "momentum": 0.9},
    "SGD, dampening": {"optimizer_class": optim.SGD, "momentum": 0.9, "dampening": 0.3},
    "SGD, foreach": {"optimizer_class": optim.SGD, "momentum": 0.9, "foreach": True},
    "SGD, plain": {"optimizer_class": optim.SGD},
    "AdamW": {"amsgrad": True},
    "AdamW, one by one": {"fused": False, "foreach": False},
    "Adam, foreach": {"optimizer_class": optim.Adam, "foreach": True},
    "Adadelta": {"optimizer_class": optim.Adadelta},
    "Adagrad": {"optimizer_class": optim.Adagrad, "fused": True},
    "Adamax": {"optimizer_class": optim.Adamax},
    "ASGD": {"optimizer_class": optim.ASGD},
    "NAdam": {"optimizer_class": optim.NAdam},
    "RAdam": {"optimizer_class": optim.RAdam},
    "RMSprop": {"optimizer_class": optim.RMSprop, "momentum": 0.9, "centered": True},
    "Rprop": {"optimizer_class": optim.Rprop},
}
GROUPS: dict[str, list[dict[str, Any]]] = {"one group": [], "two groups": [{"params": "*.bias", "lr": 0.01}]}


def run(
    options: dict[str, Any],
    config: dict[str, Any],
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
    make: Any = FewElements,
) -> dict[str, Tensor]:
    """The same batches on all ranks."""
    ddp = wrap(make(), **config)
    optimizer = DistributedOptimizer(ddp, lr=0.02, **options)
    if load is not None:
        load_checkpoint(load, ddp, optimizer)
    for step in steps:
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        (ddp(batch) - 1).square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    if save is not None:
        save_checkpoint(save, ddp, optimizer)
    return weights(ddp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@functools.cache
def saved(name: str, groups: str, place: str, folder: Path) -> Path:
    """After two steps."""
    ranks, config = PLACES[place]
    path = folder / f"{name}-{groups}-{place}"
    simulate(run, ranks, {**OPTIONS[name], "param_groups": GROUPS[groups]}, config, range(2), None, path)
    return path


def check(name: str, groups: str, before: str, after: str, folder: Path) -> None:
    path, (ranks, config) = saved(name, groups, before, folder), PLACES[after]
    options = {**OPTIONS[name], "param_groups": GROUPS[groups]}
    expected = run(options, {}, range(4))
    for ours in simulate(run, ranks, options, config, range(2, 4), path):
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("after", ["ZeRO-1", "hybrid"])
@pytest.mark.parametrize("name", ["SGD, momentum", "SGD, dampening"])
@pytest.mark.sampled(1)
def test_momentum_goes_on(name: str, after: str, groups: str, folder: Path) -> None:
    check(name, groups, "alone", after, folder)


@pytest.mark.in_turn
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", ["alone", "ZeRO-1", "whole"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_class_goes_on_everywhere(name: str, groups: str, before: str, after: str, folder: Path) -> None:
    check(name, groups, before, after, folder)


def make_matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))


def test_muon_goes_on_where_ranks_have_no_matrix(tmp_path: Path) -> None:
    options = {"optimizer_class": optim.Muon, "param_groups": [{"params": "0.*", "lr": 0.01}]}
    config = {**SHARDED, "keep_params_whole": True}
    simulate(run, 2, options, config, range(2), None, tmp_path / "c", make_matrices)
    expected = run(options, {**config, "use_distributed_optimizer": True}, range(4), make=make_matrices)
    for ours in simulate(run, 4, options, config, range(2, 4), tmp_path / "c", None, make_matrices):
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


def padding_has_no_state() -> tuple[int, int]:
    ddp = wrap(FewElements(), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, lr=0.02, optimizer_class=optim.SGD, momentum=0.9)
    (ddp(torch.ones(3, 4)) - 1).square().mean().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return sum(held.end - held.start for held in optimizer.slices), len(optimizer.state)


def test_a_rank_without_a_parameter_has_no_state() -> None:
    found = simulate(padding_has_no_state, 8)
    assert sum(numel for numel, _ in found) == sum(param.numel() for param in FewElements().parameters())
    assert any(numel == 0 for numel, _ in found), "no rank has padding alone"
    assert all((numel == 0) == (states == 0) for numel, states in found)


def test_gradients_of_slices_have_one_dtype_on_all_ranks() -> None:
    """Programs reduce what they make of them: a rank that updates nothing joins in with the dtype of ``main_grad``."""

    def squares() -> Tensor:
        model = DistributedDataParallel(
            nn.Linear(2, 2).bfloat16(), DistributedDataParallelConfig(use_distributed_optimizer=True)
        )
        optimizer = DistributedOptimizer(model)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).float().square().sum().backward()
        model.finish_grad_sync()
        assert {part.grad.dtype for part in optimizer.slices} == {torch.float32}
        sums = torch.stack([part.grad.square().sum() for part in optimizer.slices])
        dist.all_reduce(sums)
        return sums

    first, *others = simulate(squares, 4)
    assert all(torch.equal(first, other) for other in others)
    assert all(first > 0)
