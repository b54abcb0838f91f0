"""Steps that a loss scaler skips leave no trace: values and counts are those of a run that never saw the iteration.

Fault 27. The first step is the one that makes state. Whatever torch leaves uninitialised holds NaN here.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import HostSync, NoHostSync
from loops import assert_same, weights, wrap
from stale_memory import stale_empty
from torch import Tensor, nn, optim
from watching import Watcher

from maingrad.ddp import DistributedOptimizer, GradScaler, load_checkpoint, save_checkpoint
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.torch_grads.optimizer import prepare_skippable_step
from maingrad.launch import simulate

SGD: dict[str, Any] = {"optimizer_class": optim.SGD, "momentum": 0.9}
DAMPENED: dict[str, Any] = {**SGD, "dampening": 0.3, "weight_decay": 0.1}

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD, momentum": SGD,
    "SGD, Nesterov": {**SGD, "nesterov": True},
    "SGD, dampening": DAMPENED,
    "SGD, dampening, maximize": {**DAMPENED, "maximize": True, "max_grad_norm": 0.1},
    "SGD, dampening in one group": {**SGD, "param_groups": [{"params": "*.bias", "dampening": 0.3}]},
    "SGD, momentum in one group": {**DAMPENED, "param_groups": [{"params": "*.bias", "momentum": 0.0}]},
    "SGD, one by one": {**DAMPENED, "fused": False},
    "SGD, foreach": {**DAMPENED, "foreach": True},
    "SGD, plain": {"optimizer_class": optim.SGD},
    "AdamW": {},
    "AdamW, amsgrad": {"amsgrad": True, "maximize": True},
    "AdamW, one by one": {"fused": False},
    "AdamW, foreach": {"foreach": True},
    "Adam": {"optimizer_class": optim.Adam, "weight_decay": 0.1},
    "Adadelta": {"optimizer_class": optim.Adadelta},
    "Adagrad": {"optimizer_class": optim.Adagrad, "initial_accumulator_value": 0.1},
    "Adagrad, fused": {"optimizer_class": optim.Adagrad, "fused": True},
    "Adamax": {"optimizer_class": optim.Adamax},
    "ASGD": {"optimizer_class": optim.ASGD},
    "NAdam": {"optimizer_class": optim.NAdam},
    "RAdam": {"optimizer_class": optim.RAdam},
    "RMSprop": {"optimizer_class": optim.RMSprop, "momentum": 0.9, "centered": True},
    "Rprop": {"optimizer_class": optim.Rprop},
}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "all-reduced": (2, {}),
    "ZeRO-1": (3, {"use_distributed_optimizer": True, "overlap_param_gather": True}),
    "hybrid": (4, {"use_distributed_optimizer": True, "bucket_size": 20, "num_distributed_optimizer_instances": 2}),
    "whole": (3, {"use_distributed_optimizer": True, "keep_params_whole": True}),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def make_matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))


def loss_of(model: nn.Module, step: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(batch) - 1).square().mean()


def scaler_of() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**8, growth_interval=100)


def iterate(ddp: Any, optimizer: DistributedOptimizer, scaler: GradScaler | None, step: int, *, bad: bool) -> None:
    loss = loss_of(ddp, step) * (math.inf if bad else 1.0)
    (loss if scaler is None else scaler.scale(loss)).backward()
    ddp.finish_grad_sync()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    ddp.zero_grad_buffer()


def held(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """The optimizer's state on this rank."""
    return {
        f"{piece.name}: {key}": torch.as_tensor(value).clone()
        for piece in optimizer.slices
        for key, value in (*piece.state().items(), *piece.scalars().items())
    }


def train(
    options: dict[str, Any], config: dict[str, Any], skipped: Iterable[int], scaler: GradScaler | None, make: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and state after three steps; before those in ``skipped`` there is one that overflows."""
    ddp = wrap(make(), **config)
    optimizer = DistributedOptimizer(ddp, lr=0.02, **options)
    for step in range(3):
        if step in skipped:
            iterate(ddp, optimizer, scaler, 100, bad=True)
            assert all(value.isfinite().all() for value in held(optimizer).values())
        iterate(ddp, optimizer, scaler, step, bad=False)
    return weights(ddp), held(optimizer)


def check(options: dict[str, Any], config: dict[str, Any], skipped: Iterable[int], make: Any = make_net) -> None:
    """Scales are powers of two, which are exact: bitwise the run without a scaler."""
    expected = train(options, config, (), None, make)
    for each in (skipped, ()):
        for ours, theirs in zip(train(options, config, each, scaler_of(), make), expected, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize(
    "skipped",
    [
        pytest.param((0,), id="first"),
        pytest.param((0, 1), id="first two", marks=pytest.mark.slow),
        pytest.param((2,), id="third", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(3)
def test_a_skipped_step_leaves_no_trace(name: str, skipped: tuple[int, ...]) -> None:
    with stale_empty():
        simulate(check, 2, OPTIONS[name], {"use_distributed_optimizer": True}, skipped)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["SGD, momentum", "SGD, dampening", "SGD, dampening in one group"])
def test_under_every_placement(name: str, place: str) -> None:
    ranks, config = PLACES[place]
    with stale_empty():
        simulate(check, ranks, OPTIONS[name], config, (0,))


def test_muon_over_whole_parameters() -> None:
    config = {"use_distributed_optimizer": True, "keep_params_whole": True}
    with stale_empty():
        simulate(check, 3, {"optimizer_class": optim.Muon}, config, (0,), make_matrices)


def check_stale(name: str) -> None:
    with stale_empty():
        check(OPTIONS[name], {"use_distributed_optimizer": True}, (0,))


@pytest.mark.parametrize("name", ["SGD, momentum", "SGD, dampening"])
def test_processes_agree(name: str) -> None:
    """Over gloo."""
    run_ranks(check_stale, 2, name)


# ---- The host waits for nothing. ----


def skip_without_sync(options: dict[str, Any], steps: int) -> None:
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    optimizer, scaler = DistributedOptimizer(ddp, lr=0.02, **options), scaler_of()
    for step in range(steps):
        scaler.scale(loss_of(ddp, step) * (math.inf if step == 0 else 1.0)).backward()
        with NoHostSync():
            ddp.finish_grad_sync()
            scaler.step(optimizer)
            scaler.update()
            ddp.zero_grad_buffer()


@pytest.mark.parametrize("name", ["SGD, momentum", "SGD, Nesterov", "AdamW"])
def test_fused_classes_skip_their_first_step_without_a_read(name: str) -> None:
    simulate(skip_without_sync, 2, OPTIONS[name], 3)


def test_with_dampening_the_host_reads_until_a_step_is_taken() -> None:
    ddp = wrap(make_net())
    optimizer, scaler = DistributedOptimizer(ddp, lr=0.02, **DAMPENED), scaler_of()

    def scaled(step: int, factor: float) -> None:
        scaler.scale(loss_of(ddp, step) * factor).backward()
        ddp.finish_grad_sync()

    for step, factor in ((0, math.inf), (1, 1.0)):
        scaled(step, factor)
        with pytest.raises(HostSync), NoHostSync():
            scaler.step(optimizer)
        ddp.zero_grad_buffer()
        optimizer.forget_step()
        scaler.update()
        scaled(step, factor)
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad_buffer()
    scaled(2, 1.0)
    with NoHostSync():
        scaler.step(optimizer)


# ---- What comes after the skipped step. ----


def go_on(how: str, folder: Path) -> None:
    """After a first step that was skipped the run is that of steps 0 and 1."""
    runs = []
    for skips in (True, False):
        ddp = wrap(make_net(), use_distributed_optimizer=True)
        optimizer, scaler = DistributedOptimizer(ddp, lr=0.02, **DAMPENED), scaler_of()
        if skips:
            iterate(ddp, optimizer, scaler, 100, bad=True)
            if how == "a state dict":
                state = optimizer.state_dict()
                ddp = wrap(make_net(), use_distributed_optimizer=True)
                optimizer = DistributedOptimizer(ddp, lr=0.02, **DAMPENED)
                optimizer.load_state_dict(state)
            elif how == "another state":
                ddp_before, before = wrap(make_net(), use_distributed_optimizer=True), optimizer
                optimizer.load_state_dict(DistributedOptimizer(ddp_before, lr=0.02, **DAMPENED).state_dict())
                assert optimizer is before
            elif how == "a checkpoint":
                save_checkpoint(folder, ddp, optimizer)
                ddp = wrap(make_net(), use_distributed_optimizer=True)
                optimizer = DistributedOptimizer(ddp, lr=0.02, **DAMPENED)
                load_checkpoint(folder, ddp, optimizer)
            elif how == "no fused kernel":
                optimizer.param_groups[0]["fused"] = False
        elif how == "no fused kernel":
            optimizer.param_groups[0]["fused"] = False
        for step in range(2):
            iterate(ddp, optimizer, scaler if skips and how != "no scaler" else None, step, bad=False)
        runs.append((weights(ddp), held(optimizer)))
    for ours, expected in zip(*runs, strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("how", ["a state dict", "another state", "a checkpoint", "no fused kernel", "no scaler"])
def test_the_next_step_is_the_first(how: str, tmp_path: Path) -> None:
    """Dampening spares the first gradient that is not skipped."""
    with stale_empty():
        simulate(go_on, 2, how, tmp_path / "c")


def momentum_later(skips: bool) -> dict[str, Tensor]:
    """One group has momentum from its second step on, as cyclic schedules may have it."""
    ddp = wrap(make_net())
    options = {**DAMPENED, "param_groups": [{"params": "*.bias", "momentum": 0.0}]}
    optimizer, scaler = DistributedOptimizer(ddp, lr=0.02, **options), scaler_of()
    for step in range(3):
        if step == 1:
            optimizer.param_groups[0]["momentum"] = 0.9
        if skips:
            iterate(ddp, optimizer, scaler, 100, bad=True)
        iterate(ddp, optimizer, scaler if skips else None, step, bad=False)
    return weights(ddp)


def test_momentum_that_begins_later_begins_with_a_step_that_is_taken() -> None:
    with stale_empty():
        assert_same(momentum_later(True), momentum_later(False))


# ---- Stock optimizers, on gradients that were exposed. ----


def train_stock(options: dict[str, Any], skipped: bool) -> dict[str, Tensor]:
    ddp = wrap(make_net())
    optimizer = optim.SGD(ddp.parameters(), lr=0.02, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100, enabled=skipped)
    for step, bad in (*([(100, True)] if skipped else []), (0, False), (1, False)):
        scaler.scale(loss_of(ddp, step) * (math.inf if bad else 1.0)).backward()
        ddp.finish_grad_sync()
        ddp.expose_grads()
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad_buffer()
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}
    return weights(ddp)


def check_stock(options: dict[str, Any]) -> None:
    assert_same(train_stock(options, True), train_stock(options, False))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.sampled(3)
def test_a_stock_optimizers_first_step_is_skipped_without_a_trace(dampening: float, fused: bool) -> None:
    with stale_empty():
        simulate(check_stock, 2, {"momentum": 0.9, "dampening": dampening, "fused": fused})


def test_watchers_of_iterations_hear_of_a_stock_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher := Watcher()])
    ddp = wrap(nn.Linear(2, 1))
    optimizer, scaler = optim.SGD(ddp.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    for value in (math.inf, 1.0):
        scaler.scale(ddp(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [bool(found) for kind, _, found in watcher.told if kind == "stepped"] == [True, False]


def test_momentum_that_is_there_stays_where_another_parameter_has_none() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, fused=True)
    params[0].grad = torch.ones(2)
    optimizer.step()
    params[1].grad = torch.ones(2)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    prepare_skippable_step(optimizer)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], torch.ones(2))
