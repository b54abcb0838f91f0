"""What the user's optimizer keeps and must not: state of skipped steps, of empty shards, before the first step.

Fault 27.
"""

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from few_elements import FewElements
from loops import assert_same
from stale_memory import stale_empty
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import fully_shard, translate_state_dicts
from maingrad.launch import simulate

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "zero3": (5, {}),
    "zero2": (2, {"placements": "zero2"}),
    "hsdp_zero1": (4, {"placements": "hsdp_zero1"}),
}
HOW: dict[str, dict[str, Any]] = {
    "by default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one by one": {"fused": False, "foreach": False},
}
MOMENTA: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
}
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"SGD, {name}, {how}": (optim.SGD, {**MOMENTA[name], **HOW[how]}) for name in MOMENTA for how in HOW},
    **{f"AdamW, {how}": (optim.AdamW, HOW[how]) for how in HOW},
    **{f"Adagrad, {how}": (optim.Adagrad, {"initial_accumulator_value": 0.1, **HOW[how]}) for how in HOW},
    "Adam": (optim.Adam, {"amsgrad": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {}),
}


def build(name: str, place: str, groups: bool = False) -> tuple[Any, optim.Optimizer]:
    config = dict(PLACES[place][1])
    if place == "hsdp_zero1":
        config["mesh"] = dist.init_device_mesh("cpu", (2, 2))
    model = FewElements()
    fully_shard(model.up, **config)
    fully_shard(model, **config)
    cls, options = OPTIONS[name]
    params: Any = model.parameters()
    if groups:
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        rest = [param for name, param in model.named_parameters() if not name.endswith("bias")]
        params = [{"params": biases, "lr": 0.01}, {"params": rest}]
    optimizer = cls(params, lr=0.02, **options)
    if cls is optim.Adagrad:  # get_state_dict saves its state before the first step, from which on it is translated
        translate_state_dicts(optimizer)
    return model, optimizer


def scaler_of(*, enabled: bool = True) -> torch.amp.GradScaler:
    """A scaler whose scale is a power of two, so that scaling is exact."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100, enabled=enabled)


def iterate(model: Any, optimizer: Any, scaler: torch.amp.GradScaler, step: int, *, bad: bool = False) -> None:
    """The same batch on all ranks."""
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - 1).square().mean()
    scaler.scale(loss * math.inf if bad else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def whole(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


# ---- A first step that is skipped. ----


def train(name: str, place: str, skipped: Iterable[int], scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    model, optimizer = build(name, place)
    for step in range(3):
        if step in skipped:
            iterate(model, optimizer, scaler, 100, bad=True)
        iterate(model, optimizer, scaler, step)
    return whole(model)


def check_skips(name: str, place: str, skipped: Iterable[int]) -> None:
    expected = train(name, place, (), scaler_of(enabled=False))
    for each in (skipped, ()):
        assert_same(train(name, place, each, scaler_of()), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [f"SGD, {name}, fused" for name in MOMENTA])
def test_a_first_step_that_is_skipped_leaves_no_trace(name: str, place: str) -> None:
    with stale_empty():
        simulate(check_skips, PLACES[place][0], name, place, (0, 1))


@pytest.mark.parametrize("name", [name for name in OPTIONS if not name.endswith(", fused")])
@pytest.mark.sampled(1)
def test_nor_does_any_other_class(name: str) -> None:
    with stale_empty():
        simulate(check_skips, 5, name, "zero3", (0,))


def saved_after_a_skip(folder: Path, how: str) -> None:
    """Dampening does not apply to the first gradient that a step uses, also in the resumed run."""
    name = "SGD, dampening, fused"
    expected = train(name, "zero3", (), scaler_of(enabled=False))
    model, optimizer = build(name, "zero3")
    iterate(model, optimizer, scaler_of(), 100, bad=True)
    if how == "save_checkpoint":
        save_checkpoint(folder, model, optimizer)
        model, optimizer = build(name, "zero3")
        load_checkpoint(folder, model, optimizer)
    else:
        state = optimizer.state_dict()
        assert not any(state["state"].values()), "no step was taken"
        model, optimizer = build(name, "zero3")
        optimizer.load_state_dict(state)
    for step in range(3):
        iterate(model, optimizer, scaler_of(), step)
    assert_same(whole(model), expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["save_checkpoint", "state_dict"])
@pytest.mark.sampled(1)
def test_a_run_that_was_saved_after_a_skipped_step_goes_on(how: str, tmp_path: Path) -> None:
    with stale_empty():
        simulate(saved_after_a_skip, 5, tmp_path / "c", how)


# ---- Empty shards, and state before the first step. ----


def run(
    name: str, place: str, groups: bool, steps: range, how: str, load: Path | None, save: Path | None
) -> dict[str, Tensor]:
    model, optimizer = build(name, place, groups)
    if load is not None and how == "save_checkpoint":
        load_checkpoint(load, model, optimizer)
    elif load is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in steps:
        iterate(model, optimizer, scaler_of(), step)
    if save is not None and how == "save_checkpoint":
        save_checkpoint(save, model, optimizer)
    elif save is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=save)
    return whole(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@functools.cache
def saved(name: str, place: str, groups: bool, how: str, folder: Path) -> Path:
    """After two steps."""
    path = folder / f"{name}-{place}-{groups}-{how}"
    simulate(run, PLACES[place][0], name, place, groups, range(2), how, None, path)
    return path


def check_resumes(name: str, before: str, after: str, groups: bool, how: str, folder: Path) -> None:
    (expected,) = simulate(run, 1, name, "alone", groups, range(4), how, None, None)
    path = saved(name, before, groups, how, folder)
    for ours in simulate(run, PLACES[after][0], name, after, groups, range(2, 4), how, path, None):
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["save_checkpoint", "get_state_dict"])
@pytest.mark.parametrize(
    "name", ["SGD, momentum, fused", "SGD, dampening, fused", "Adagrad, by default", "Adagrad, fused"]
)
@pytest.mark.sampled(1)
def test_empty_shards_go_on(name: str, how: str, folder: Path) -> None:
    check_resumes(name, "alone", "zero3", False, how, folder)


@pytest.mark.parametrize("how", ["save_checkpoint", "get_state_dict"])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", ["zero3", "hsdp_zero1"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(1)
def test_every_class_goes_on_everywhere(
    name: str, before: str, after: str, groups: bool, how: str, folder: Path
) -> None:
    check_resumes(name, before, after, groups, how, folder)


def state_before_the_first_step() -> None:
    """Adagrad makes its state when it is built."""
    model, optimizer = build("Adagrad, by default", "zero3")
    for state in (optimizer.state_dict()["state"], get_state_dict(model, optimizer)[1]["state"]):
        assert {len(state), *(type(entry["sum"]) for entry in state.values())} == {6, DTensor}
        assert all((entry["sum"].full_tensor() == 0.1).all() for entry in state.values())
    shapes = [tuple(entry["sum"].shape) for entry in get_state_dict(model, optimizer)[1]["state"].values()]
    assert sorted(shapes) == sorted(tuple(param.shape) for param in FewElements().parameters())


def test_state_before_the_first_step_is_of_whole_parameters() -> None:
    simulate(state_before_the_first_step, 3)


def test_optimizers_over_other_parameters_save_and_load_as_torchs_do() -> None:
    """Although hooks of every optimizer's step know sharded parameters."""
    fully_shard(nn.Linear(3, 2))
    plain = nn.Linear(3, 2)
    optimizer = optim.Adagrad(plain.parameters())
    state = optimizer.state_dict()
    assert state["state"][0]["sum"] is optimizer.state[plain.weight]["sum"]
    optimizer.load_state_dict(state)
    optimizer.step()
    assert not optimizer._optimizer_state_dict_post_hooks


@pytest.mark.parametrize("placements", ["zero1", "zero2"])
def test_ranks_without_elements_gather_what_the_others_have_updated(placements: str) -> None:
    """The program updates by hand, and leaves out shards without elements: their ranks see no write."""

    def trained() -> list[float]:
        model: Any = fully_shard(nn.Linear(1, 1, bias=False), placements=placements)
        nn.init.ones_(model.weight)
        outputs = []
        for _ in range(3):
            output = model(torch.ones(1, 1))
            output.sum().backward()
            for param in filter(torch.Tensor.numel, model.parameters()):
                param.detach().sub_(param.grad.to_local(), alpha=0.25)
            model.zero_grad()
            outputs.append(output.item())
        return outputs

    assert simulate(trained, 2) == [[1.0, 0.75, 0.5]] * 2
