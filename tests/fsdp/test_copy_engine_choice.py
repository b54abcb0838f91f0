"""copy_engine_gather="auto", the default, and copy_engine_param_gather="auto": when gathers run on copy engines."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from reaching_ranks import everywhere
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets import copy_engines
from maingrad.ddp.buckets.buffer import MappedPool
from maingrad.fsdp import GraphedTrainingStep, fully_shard
from maingrad.fsdp.iteration import connect
from maingrad.fsdp.module import root_of, unit_of
from maingrad.launch import simulate


def refuse(*_: object) -> NoReturn:
    raise AssertionError("a rank without copy engines exchanges nothing, and maps nothing")


# ---- Without copy engines: what a program sees. ----


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def trained(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The losses of three steps, each rank with inputs of its own."""
    losses = []
    for step in range(3):
        x = torch.full((4, 8), 0.1 * (step + 1) + dist.get_rank())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_on_cpus_auto_gathers_as_false_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engines, "_peers", refuse)
    monkeypatch.setattr(connect, "map_memory", refuse)

    def run() -> None:
        losses = []
        for options in ({}, {"copy_engine_gather": "auto"}, {"copy_engine_gather": False}):
            model: Any = blocks()
            fully_shard(model[0])
            fully_shard(model, **options)  # type: ignore[arg-type]
            losses.append(trained(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
            assert not root_of(model).copy_engines
        assert losses[0] == losses[1] == losses[2]
        for choice in ("auto", False):
            config = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                copy_engine_param_gather=choice,  # type: ignore[arg-type]
            )
            wrapped = DistributedDataParallel(blocks(), config)
            grid = wrapped.grids["dense"]
            assert grid is wrapped.grids["expert"]
            assert grid.gather is not grid.inner, "overlapped gathers have a group of their own"
            losses.append(trained(wrapped, DistributedOptimizer(wrapped, lr=0.1)))
            assert not wrapped.copy_engines
        assert losses[3] == losses[4]

    simulate(run, 2)


def test_auto_without_overlap_has_no_effect() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, copy_engine_param_gather="auto")
    assert not DistributedDataParallel(blocks(), config).copy_engines


def test_other_values_are_refused() -> None:
    bad: Any = "always"
    with pytest.raises(ValueError, match="copy_engine_gather is True, False or \"auto\", got 'always'"):
        fully_shard(blocks(), copy_engine_gather=bad)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, copy_engine_param_gather=bad
    )
    with pytest.raises(ValueError, match='copy_engine_param_gather is True, False or "auto"'):
        DistributedDataParallel(blocks(), config)


# ---- With copy engines: a stand-in for mapped memory. ----


class Pool:
    """Stands for a ``MappedPool``: memory of the CPU."""

    def __init__(self, *_: object) -> None:
        self.shared = False

    @contextmanager
    def allocating(self) -> Iterator[None]:
        yield

    def share(self) -> None:
        self.shared = True


def sharded(placements: str = "zero3", /, *, inside: Any = "auto", **options: Any) -> Any:
    model: Any = blocks()
    fully_shard(model[0], placements=placements, copy_engine_gather=inside)
    return fully_shard(model, **{"placements": placements, **options})


def pools_of(model: Any) -> set[Any]:
    return {bucket.whole_params.pool for bucket in root_of(model).buckets}


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that choose copy engines for buckets of any size."""
    everywhere(monkeypatch)
    monkeypatch.setattr(copy_engines, "MIN_SHARD_NBYTES", 1)
    monkeypatch.setattr(connect, "MappedPool", Pool)
    monkeypatch.setattr(connect, "OnStream", lambda _: nullcontext())


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize(
    ("placements", "options", "chosen"),
    [
        ("zero3", {}, True),
        ("zero3", {"copy_engine_gather": False}, False),  # of the outermost unit; the others have the default
        ("zero3", {"inside": False}, True),  # the outermost unit's choice
        ("zero2", {}, False),  # the memory of all units would be mapped
        ("zero3", {"placements": "zero2"}, False),  # of the outermost unit
    ],
)
def test_who_maps_memory(placements: str, options: dict[str, Any], chosen: bool) -> None:
    def run() -> None:
        model = sharded(placements, **options)
        model(torch.ones(4, 8))
        assert root_of(model).copy_engines is chosen
        pools = pools_of(model)
        assert (None not in pools) is chosen
        assert all(pool.shared for pool in pools if pool is not None)
        model(torch.ones(4, 8))
        assert pools_of(model) == pools, "mapped once"

    simulate(run, 2)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_rank_has_alone_does_not_decide(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gathers it. A shard of the first layer is the one that is large enough for copy engines."""
    monkeypatch.setattr(copy_engines, "MIN_SHARD_NBYTES", 4096)

    def run() -> None:
        groups = [dist.new_group([rank]) for rank in (0, 1)]
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 4))
        for index in (0, 1):
            fully_shard(model[index], groups[dist.get_rank()] if alone and index == 0 else None)
        fully_shard(model)
        model(torch.ones(2, 64))
        assert root_of(model).copy_engines is not alone

    simulate(run, 2)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("after_a_forward", [False, True])
def test_a_graphed_step_gathers_by_kernels(after_a_forward: bool) -> None:
    def run() -> None:
        expected = sharded(copy_engine_gather=False)
        losses = trained(expected, torch.optim.AdamW(expected.parameters(), lr=0.1, fused=True))
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        if after_a_forward:
            with torch.no_grad():
                model(torch.ones(4, 8))
            assert None not in pools_of(model)
        else:
            assert root_of(model).copy_engines
            assert pools_of(model) == {None}, "memory is mapped by the first forward"

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graphed = GraphedTrainingStep(step, model, optimizer, num_warmup_steps=1)
        assert not root_of(model).copy_engines
        assert pools_of(model) == {None}
        found = [graphed(torch.full((4, 8), 0.1 * (index + 1) + dist.get_rank())).clone() for index in range(3)]
        assert found == losses

    simulate(run, 2)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("index", [0, 1])
def test_a_graphed_step_refuses_copy_engines_that_a_unit_asks_for(index: int) -> None:
    """The outermost unit, or the one inside. ``fully_shard`` takes ``copy_engine_gather=True`` on CUDA alone."""

    def run() -> None:
        model = sharded()
        unit_of([model, model[0]][index]).copy_engine_gather = True
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with pytest.raises(ValueError, match="gathers by copy engines take memory that all ranks map"):
            GraphedTrainingStep(lambda: None, model, optimizer)
        assert root_of(model).copy_engines

    simulate(run, 2)


def test_a_graphed_step_of_a_new_model_has_no_choice_made(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, _peers=refuse)

    def run() -> None:
        model = sharded()
        GraphedTrainingStep(lambda: None, model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        assert not root_of(model).copy_engines

    simulate(run, 2)


# ---- GPUs. ----


def on_gpus() -> dict[str, Any]:
    """Losses of a sharded model and of ZeRO-1 by each choice, and whether the second model of the process maps too."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    copy_engines.MIN_SHARD_NBYTES = 1
    MappedPool.num_made = 0  # of other tests, whose ranks ran in this process
    found: dict[str, Any] = {}
    for choice in (False, "auto", "auto"):
        model: Any = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
        model = model.cuda()
        for layer in model:
            fully_shard(layer, group)
        fully_shard(model, group, copy_engine_gather=choice)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(4):
            loss = model(torch.full((16, 1024), 0.1 * step + dist.get_rank(), device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[f"{choice}, {len(found)}"] = losses, root_of(model).copy_engines
    found["pools"] = MappedPool.num_made
    return found


@pytest.mark.gpu(2)
def test_auto_on_two_gpus() -> None:
    """The first model of a process may map memory; all losses are the same to the bit."""
    for found in run_ranks(on_gpus, 2, timeout=120.0):
        assert found.pop("pools") == 1
        losses, chosen = zip(*found.values(), strict=True)
        assert chosen == (False, True, False)
        assert losses[0] == losses[1] == losses[2]
