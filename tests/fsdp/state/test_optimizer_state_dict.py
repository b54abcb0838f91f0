"""State dicts of optimizers over shards are DTensors: torch's own functions save them for any ranks, and for FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import assert_same_files
from gloo import run_ranks
from loops import assert_same
from odd_units import Odd, mesh_for, shard, shard_by_torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import fully_shard, translate_state_dicts
from maingrad.launch import simulate

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def make(ours: bool, placement: str, kind: str = "adamw", seed: int = 0) -> tuple[Any, Optimizer]:
    mesh = mesh_for(placement)
    model = shard(Odd(seed), placement, mesh) if ours else shard_by_torch(Odd(seed), mesh)
    return model, OPTIMIZERS[kind](param for param in model.parameters() if param.requires_grad)


def take_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors, by name and key, copied."""
    return {
        f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, entries in state["state"].items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def save(folder: Path, ours: bool, placement: str) -> dict[str, Tensor]:
    model, optimizer = make(ours, placement)
    take_step(model, optimizer, 0)
    take_step(model, optimizer, 1)
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    return whole(state)


def load(folder: Path, ours: bool, placement: str) -> dict[str, Tensor]:
    model, optimizer = make(ours, placement, seed=1)
    model_state, state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    after = whole(get_state_dict(model, optimizer)[1])
    take_step(model, optimizer, 2)
    return after


@pytest.mark.in_turn
@pytest.mark.parametrize("run", [simulate, pytest.param(run_ranks, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "saving, loading",
    [
        pytest.param((True, "zero3", 3), (False, "zero3", 2), id="ours-3-theirs-2"),
        pytest.param((False, "zero3", 2), (True, "hsdp_zero1", 4), id="theirs-2-ours-hsdp-4"),
        pytest.param((True, "hsdp", 4), (True, "zero2", 3), id="ours-hsdp-4-ours-3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_torchs_functions_save_for_any_ranks_and_fsdp2(
    tmp_path: Path, run: Any, saving: tuple[bool, str, int], loading: tuple[bool, str, int]
) -> None:
    saved = run(save, saving[2], tmp_path / "c", *saving[:2])[0]
    loaded = run(load, loading[2], tmp_path / "c", *loading[:2])[0]
    assert saved["up.weight.exp_avg"].shape == (15, 7) and saved["up.weight.step"] == 2
    assert_same(loaded, saved)


def resume(placement: str, kind: str, how: str) -> None:
    model, optimizer = make(True, placement, kind)
    take_step(model, optimizer, 0)
    options = StateDictOptions(full_state_dict=how == "whole", flatten_optimizer_state_dict=how == "flat")
    if how == "plain":
        model_state, state = model.state_dict(), optimizer.state_dict()
    else:
        model_state, state = get_state_dict(model, optimizer, options=options)
    assert not any(isinstance(v, DTensor) for entry in optimizer.state.values() for v in entry.values())
    state = torch.utils._pytree.tree_map_only(Tensor, torch.clone, state)
    take_step(model, optimizer, 1)
    expected = [param.detach().clone() for param in model.parameters()]

    other, others_optimizer = make(True, placement, kind, seed=1)
    if how == "plain":  # an optimizer that nobody has seen: what it was given is translated before its first step
        other.load_state_dict(model_state)
        others_optimizer.load_state_dict(state)
    else:
        set_state_dict(other, others_optimizer, model_state_dict=model_state, optim_state_dict=state, options=options)
    take_step(other, others_optimizer, 1)
    for index, param in enumerate(other.parameters()):
        assert torch.equal(param.detach(), expected[index]), param.shard


CASES = [("zero3", 3, "adamw", how) for how in ("torch", "flat", "whole", "plain")]
CASES += [("hsdp_zero1", 4, kind, "torch") for kind in OPTIMIZERS]


@pytest.mark.parametrize("placement, ranks, kind, how", CASES)
@pytest.mark.sampled(1)
def test_what_is_loaded_goes_on_bit_for_bit(placement: str, ranks: int, kind: str, how: str) -> None:
    simulate(resume, ranks, placement, kind, how)


def test_an_optimizer_is_known_from_load_checkpoint_on(tmp_path: Path) -> None:
    def save_and_load() -> dict[str, Tensor]:
        model, optimizer = make(True, "zero3")
        take_step(model, optimizer, 0)
        save_checkpoint(tmp_path / "c", model, optimizer)
        expected = whole(get_state_dict(model, optimizer)[1])
        model, optimizer = make(True, "zero3", seed=1)
        load_checkpoint(tmp_path / "c", model, optimizer)
        assert_same(whole(get_state_dict(model, optimizer)[1]), expected)

    simulate(save_and_load, 3)


@pytest.mark.in_turn
def test_state_that_was_given_in_dtensors_is_saved_before_a_step(tmp_path: Path) -> None:
    """An optimizer that nobody has seen keeps what it was given, and saves the same; then it has this rank's shards."""

    def save_twice() -> None:
        model, optimizer = make(True, "zero3")
        take_step(model, optimizer, 0)
        save_checkpoint(tmp_path / "first", model, optimizer)
        other, fresh = make(True, "zero3", seed=1)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(optimizer.state_dict())
        assert_same(*(whole({"state": each.state_dict()["state"]}) for each in (fresh, optimizer)))
        save_checkpoint(tmp_path / "second", other, fresh)
        assert fresh.state and not any(
            isinstance(value, DTensor) for entry in fresh.state.values() for value in entry.values()
        )

    simulate(save_twice, 3)
    assert_same_files(tmp_path / "first", tmp_path / "second")


def test_groups_of_other_sizes_on_one_rank_are_refused_on_all() -> None:
    """Else the other ranks would wait for this one."""

    def load() -> None:
        model, optimizer = make(True, "zero3")
        take_step(model, optimizer, 0)
        state = optimizer.state_dict()
        if dist.get_rank() == 1:
            (group,) = state["param_groups"]
            halves = group["params"][:2], group["params"][2:]
            state = {**state, "param_groups": [{**group, "params": params} for params in halves]}
        with pytest.raises(ValueError, match=r"groups of \[2, .*\] parameters, and this optimizer .* \(on rank 1\)"):
            optimizer.load_state_dict(state)
        take_step(model, optimizer, 1)

    simulate(load, 2)


def test_numbers_and_the_state_of_plain_parameters_stay_as_they_are() -> None:
    def save_and_load() -> None:
        model, scale = fully_shard(nn.Linear(3, 4)), nn.Parameter(torch.ones(2))
        optimizer, other = (torch.optim.Adam([*model.parameters(), scale]) for _ in range(2))
        model(torch.ones(2, 3)).sum().backward()
        scale.grad = torch.ones(2)
        optimizer.step()
        optimizer.state[model.weight]["restarts"] = 3
        for param in model.parameters():  # torch's own "mu" is one number
            optimizer.state[param]["mu"] = optimizer.state[param]["exp_avg"].clone()
        state = optimizer.state_dict()
        for entry in (state["state"][0], state["state"][1]):
            assert torch.equal(entry["mu"].full_tensor(), entry["exp_avg"].full_tensor())
        translate_state_dicts(other)
        other.load_state_dict(state)
        assert other.state[model.weight].pop("restarts") == optimizer.state[model.weight].pop("restarts")
        for param in (*model.parameters(), scale):
            assert_same(dict(other.state[param]), dict(optimizer.state[param]))

        saved = {**state["state"][2], "master": scale.detach().clone()}  # by an optimizer that keeps masters
        other.load_state_dict({**state, "state": {**state["state"], 2: saved}})
        assert "master" in saved and "master" not in other.state[scale]
        weight, bias = state["state"][0], state["state"][1]
        wrong = {**state, "state": {**state["state"], 0: {**weight, "exp_avg_sq": bias["exp_avg_sq"]}}}
        with pytest.raises(ValueError, match=r"'exp_avg_sq' of 'weight': size mismatch, of shape \[4\]"):
            other.load_state_dict(wrong)

    simulate(save_and_load, 2)


def test_without_ranks_it_is_as_ever() -> None:
    model = shard(Odd())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model(torch.arange(6)).float().square().mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert not any(isinstance(value, DTensor) for entry in state["state"].values() for value in entry.values())
    optimizer.load_state_dict(state)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_names_twice_has_one_state() -> None:
    """torch numbers the others as if it were two."""

    def save_and_load() -> None:
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(3, 4))
        optimizer, other = (torch.optim.Adam([model.weight, model.weight, model.bias]) for _ in range(2))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        shapes = [entry["exp_avg"].full_tensor().shape for entry in state["state"].values()]
        assert shapes == [(4, 3), (4,)]
        translate_state_dicts(other)
        other.load_state_dict(state)
        for param in model.parameters():
            assert_same(dict(other.state[param]), dict(optimizer.state[param]))

    simulate(save_and_load, 2)


class Shifted(nn.Linear):
    """With a scalar, of which one rank has all and the others have nothing."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.shift = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


@pytest.mark.parametrize("steps_before", [0, 1])
def test_whole_tensors_are_loaded_where_one_rank_has_all_of_a_parameter(steps_before: int) -> None:
    """That rank's shard has the whole parameter's shape."""

    def make_linear() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = fully_shard(Shifted())
        return model, torch.optim.Adam(model.parameters())

    def step_of(model: nn.Module, optimizer: Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def load() -> list[int]:
        model, optimizer = make_linear()
        step_of(model, optimizer)
        state = optimizer.state_dict()
        saved = {
            index: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in entry.items()}
            for index, entry in state["state"].items()
        }
        other, loaded = make_linear()
        for _ in range(steps_before):
            step_of(other, loaded)
        loaded.load_state_dict({**state, "state": saved})
        step_of(other, loaded)
        step_of(model, optimizer)
        assert_same(whole(loaded.state_dict()), whole(optimizer.state_dict()))
        return [param.numel() for param in model.parameters()]

    assert any(4 in numels for numels in simulate(load, 2)), "a rank has all of the bias"


def test_the_step_of_a_scalar_is_a_number_where_no_other_state_tells() -> None:
    """Moments of a scalar and its step have one shape: they are told apart by their names."""

    def save() -> set[str]:
        model = fully_shard(Shifted())
        optimizer = torch.optim.Adam([model.shift])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        (entry,) = optimizer.state_dict()["state"].values()
        return {key for key, value in entry.items() if isinstance(value, DTensor)}

    assert simulate(save, 2) == [{"exp_avg", "exp_avg_sq"}] * 2
