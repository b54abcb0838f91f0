"""Weights exported from a checkpoint and from a model give the same safetensors bytes, and load again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, model_state, take_steps
from gloo import run_ranks
from loops import assert_same, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors, load_safetensors, save_safetensors

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}
WRAPPERS = {
    "zero1": (3, ZERO1),
    "overlapping": (2, {**ZERO1, "overlap_param_gather": True}),
    "hybrid": (4, {**ZERO1, "num_distributed_optimizer_instances": 2}),
    "all-reduce": (2, {}),
    "whole": (3, {"use_distributed_optimizer": True, "keep_params_whole": True}),
}
DTYPES = [None, torch.float32, torch.bfloat16, torch.float16]


def save_both_ways(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    ddp, optimizer = build(torch.bfloat16, **config)
    take_steps(ddp, optimizer, range(2), dist.get_rank())
    for dtype in DTYPES:
        save_safetensors(folder / f"{dtype}-live", ddp, optimizer, dtype=dtype)
    save_checkpoint(folder / "checkpoint", ddp, optimizer)
    return model_state(ddp)


@pytest.mark.parametrize(
    "wrapper", [pytest.param(n, marks=pytest.mark.slow if n in ("overlapping", "whole") else ()) for n in WRAPPERS]
)
@pytest.mark.sampled(1)
def test_from_a_checkpoint_and_from_a_model_it_is_one_file(tmp_path: Path, wrapper: str) -> None:
    ranks, config = WRAPPERS[wrapper]
    state = simulate(save_both_ways, ranks, tmp_path, config)[0]
    halves = {name for name, tensor in state.items() if tensor.dtype is torch.bfloat16}
    masters = load_file(tmp_path / "torch.float32-live")
    for dtype in DTYPES:
        live, exported = tmp_path / f"{dtype}-live", tmp_path / f"{dtype}-exported"
        export_safetensors(tmp_path / "checkpoint", exported, dtype=dtype)
        tensors = load_file(exported)
        assert_same(tensors, load_file(live))
        assert set(tensors) == set(state) - {"scratch"}
        assert tensors["seen"].dtype is torch.int64
        for name in halves:
            assert tensors[name].dtype is (dtype or torch.bfloat16)
            if name != "fixed":  # frozen parameters have no master
                assert torch.equal(tensors[name], masters[name].to(dtype or torch.bfloat16)), name
        assert_same(
            {n: tensors[n].to(state[n].dtype) for n in ("seen", "fixed")}, {n: state[n] for n in ("seen", "fixed")}
        )
    moved = [name for name in halves if not torch.equal(masters[name], masters[name].bfloat16().float())]
    assert len(moved) > 4, "masters hold bits that parameters do not"
    with safe_open(tmp_path / "None-live", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["maingrad.tied"]) == {"head.weight": "embed.weight"}
    assert not list(tmp_path.glob("*.incomplete"))


@pytest.mark.slow
def test_real_ranks_write_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    run_ranks(save_both_ways, 2, tmp_path / "real", ZERO1)
    simulate(save_both_ways, 2, tmp_path / "simulated", ZERO1)
    for name in ("None-live", "torch.float32-live"):
        assert_same(load_file(tmp_path / "real" / name), load_file(tmp_path / "simulated" / name))


def load_and_step(source: Path, config: dict[str, Any], with_optimizer: bool) -> dict[str, Tensor]:
    ddp, optimizer = build(torch.bfloat16, seed=1, optimizer={"lr": 0.0}, **config)
    load_safetensors(source, ddp, optimizer if with_optimizer else None)
    loaded = model_state(ddp)
    ddp.finish_grad_sync()
    optimizer.step()
    save_safetensors(source.with_name("again"), ddp, optimizer, dtype=torch.float32)
    assert_same(model_state(ddp), loaded)
    return loaded


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("wrapper", ["zero1", "all-reduce", "overlapping"])
@pytest.mark.sampled(1)
def test_masters_come_in_as_they_went_out(tmp_path: Path, wrapper: str, with_optimizer: bool) -> None:
    state = simulate(save_both_ways, 3, tmp_path, ZERO1)[0]
    ranks, config = WRAPPERS[wrapper]
    source = tmp_path / "torch.float32-live"
    for loaded in simulate(load_and_step, ranks, source, config, with_optimizer):
        assert_same({**loaded, "scratch": state["scratch"]}, state)
    # Without the optimizer, new masters are copies of the parameters, which are rounded.
    masters, again = load_file(source), load_file(tmp_path / "again")
    assert torch.equal(again["up.weight"], masters["up.weight"]) == with_optimizer
    assert torch.equal(again["up.weight"].bfloat16(), masters["up.weight"].bfloat16())


def change_and_save(file: Path) -> Tensor:
    ddp, optimizer = build(torch.bfloat16, **ZERO1)
    take_steps(ddp, optimizer, [0], dist.get_rank())
    with torch.no_grad():
        ddp.module.up.weight.fill_(3.0)
    save_safetensors(file, ddp, optimizer, dtype=torch.float32)
    return ddp.module.up.weight.detach().float()


def test_weights_that_the_program_has_changed_after_the_step_are_saved(tmp_path: Path) -> None:
    changed = simulate(change_and_save, 2, tmp_path / "file")[0]
    assert torch.equal(load_file(tmp_path / "file")["up.weight"], changed)


def test_a_module_alone_goes_out_and_in(tmp_path: Path) -> None:
    model, other = Everything(torch.bfloat16), Everything(torch.bfloat16, seed=1)
    save_safetensors(tmp_path / "sub" / "model.safetensors", model)
    load_safetensors(tmp_path / "sub" / "model.safetensors", other)
    assert_same(weights(other), weights(model))
    save_checkpoint(tmp_path / "c", model)
    export_safetensors(tmp_path / "c", tmp_path / "wide", dtype=torch.float32)
    assert load_file(tmp_path / "wide")["up.weight"].dtype is torch.float32


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    model = Everything()
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    both, last = tmp_path / "both", tmp_path / "last"
    save_file(state, both)
    save_file({name: tensor for name, tensor in state.items() if name != "embed.weight"}, last)
    for path in (both, last):
        other = Everything(seed=1)
        load_safetensors(path, other)
        assert_same(weights(other), weights(model))
    save_file({**state, "head.weight": state["head.weight"] + 1}, both)
    with pytest.raises(ValueError, match=r"'embed\.weight' and 'head.weight' are one parameter here and differ"):
        load_safetensors(both, Everything())


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {each: tensor for each, tensor in state.items() if each != name}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (without("cube"), "'cube' of the model is not in"),
    "buffer": (without("seen"), "'seen' of the model is not in"),
    "unknown": (
        lambda s: {**s, "more": torch.zeros(1)},
        r"has 1 tensor\(s\) that the model does not have, such as 'more'",
    ),
    "shape": (lambda s: {**s, "cube": torch.zeros(3)}, r"'cube' has shape \[3\] in .* and \[3, 5, 2, 7\] in the model"),
    "kind": (lambda s: {**s, "seen": torch.zeros(())}, "'seen' is F32 in .* and torch.int64 in the model"),
}


def load_and_say(path: Path) -> str:
    ddp, optimizer = build(seed=1, **ZERO1)
    before = model_state(ddp)
    with pytest.raises(ValueError, match="safetensors") as error:
        load_safetensors(path, ddp, optimizer)
    assert_same(model_state(ddp), before)
    return str(error.value)


@pytest.mark.parametrize("name", MISFITS)
def test_a_file_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path, name: str) -> None:
    change, message = MISFITS[name]
    path = tmp_path / "model.safetensors"
    state = {key: tensor.contiguous() for key, tensor in Everything().state_dict().items() if key != "head.weight"}
    save_file(change(state), path)
    errors = simulate(load_and_say, 2, path)
    assert errors[0] == errors[1]
    with pytest.raises(ValueError, match=message):
        load_safetensors(path, Everything())


@pytest.mark.parametrize(
    "stored, kept",
    [("int64", "uint8"), ("complex64", "uint8"), ("int32", "int64"), ("float32", "bool"), ("bool", "float32")],
)
def test_numbers_of_another_kind_are_not_cast(tmp_path: Path, stored: str, kept: str) -> None:
    def holding(dtype: str) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.full((3,), 1, dtype=getattr(torch, dtype)))
        return model

    save_safetensors(tmp_path / "file", holding(stored))
    with pytest.raises(ValueError, match=rf"'table' is \w+ in '{tmp_path}/file' and torch\.{kept} in the model"):
        load_safetensors(tmp_path / "file", holding(kept))
    load_safetensors(tmp_path / "file", holding(stored))


@pytest.mark.parametrize("name", ["maingrad.json", "rank-00000.safetensors"])
def test_a_checkpoint_is_not_exported_onto_itself(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "c", Everything(), extra=1)
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for target in (tmp_path / "c" / name, tmp_path / "link" / name):
        with pytest.raises(ValueError, match=rf"{name}' is a file of a checkpoint: write to another"):
            export_safetensors(tmp_path / "c", target)
        with pytest.raises(ValueError, match=rf"{name}' is a file of a checkpoint: write to another"):
            save_safetensors(target, Everything())
    assert load_checkpoint(tmp_path / "c", Everything()) == 1


def test_targets_and_dtypes_that_are_none_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Everything())
    for target in ("", tmp_path):
        with pytest.raises(ValueError, match="is no file to write weights to"):
            export_safetensors(tmp_path / "c", target)
    with pytest.raises(ValueError, match=r"dtype = torch\.int8: weights are rounded to a floating-point type"):
        export_safetensors(tmp_path / "c", tmp_path / "file", dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype = torch\.int8: weights are rounded to a floating-point type"):
        save_safetensors(tmp_path / "file", Everything(), dtype=torch.int8)


def test_an_expanded_buffer_is_as_large_in_files_as_it_is_and_takes_none(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(26.0).view(26, 1).expand(26, 100))
    save_checkpoint(tmp_path / "c", model)
    export_safetensors(tmp_path / "c", tmp_path / "file")
    assert 26 * 100 * 4 < (tmp_path / "file").stat().st_size < 26 * 100 * 4 + 2000
    with pytest.raises(ValueError, match="'table' is expanded: several of its elements are one place"):
        load_checkpoint(tmp_path / "c", model)
    model.table = torch.zeros(26, 100)
    load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.table, torch.arange(26.0).view(26, 1).expand(26, 100))


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(path, Everything())
    os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model\.safetensors' is truncated, damaged or no safetensors file"):
        load_safetensors(path, Everything())


def test_a_missing_file_and_a_missing_checkpoint_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file '.*/nothing'"):
        load_safetensors(tmp_path / "nothing", Everything())
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at '.*/nothing'"):
        export_safetensors(tmp_path / "nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_file_loads_into_what_a_checkpoint_loads_into(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Everything(torch.bfloat16))
    export_safetensors(tmp_path / "c", tmp_path / "file")
    one, other = Everything(torch.bfloat16, seed=1), nn.ModuleDict({"x": Everything(torch.bfloat16, seed=2)})["x"]
    load_checkpoint(tmp_path / "c", one)
    load_safetensors(tmp_path / "file", other)
    assert_same(weights(one), weights(other))
