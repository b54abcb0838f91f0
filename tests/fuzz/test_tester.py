"""The tester: it uses public names alone, tells outcomes apart, makes programs simpler, and prints what it ran."""

import ast
import importlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import running
import torch
import user_checkpoints
import vocabulary
from apart import run_apart
from drawing import draw
from pipeline_programs import Pipeline, Step, valid_pipeline
from programs import (
    Block,
    Damage,
    Ddp,
    Extra,
    Fsdp,
    Iteration,
    Micro,
    Model,
    Optimizer,
    Phase,
    Program,
    Second,
    UnitOf,
)
from run_programs import Leg, Run, valid_run
from running import Outcome, run_program
from scripts import script
from shrinking import shrink, size_of
from valid import valid

HERE = Path(__file__).resolve().parent
SGD = Optimizer("SGD", (("lr", 0.01),))


# ---- Only what users have. ----


@pytest.mark.parametrize("room", vocabulary.LIBRARY)
def test_programs_use_public_names(room: str) -> None:
    assert set(vocabulary.LIBRARY[room]) <= set(importlib.import_module(room).__all__)


PUBLIC_MODULES = {
    "maingrad.ddp",
    "maingrad.fsdp",
    "maingrad.launch",
    "maingrad.kernels.quantized",  # what a recipe of one's own is made of
    "maingrad.te_integration",
    # What stands for the command: a configuration, files of data, and a signal.
    "maingrad.launch.config.file",
    "maingrad.launch.data.indexed",
    "maingrad.launch.training.signals",
    "maingrad.launch.training.train",
}


def test_the_tester_imports_the_librarys_rooms_and_no_helpers() -> None:
    support = {helper.stem for helper in (HERE.parent / "support").glob("*.py")}
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if names == ["maingrad"]:
                names = [f"maingrad.{alias.name}" for alias in node.names]
            for name in names:
                assert name not in support, path
                assert not name.startswith("maingrad") or name in PUBLIC_MODULES, path


@pytest.mark.slow
def test_a_script_stands_alone(tmp_path: Path) -> None:
    """And does what the program did."""
    block = Block("norm mlp", library=True, delayed=True)
    model = Model((block, Block("experts", library=True)), variants=2)
    damages = (Damage("another step", 1), Damage("cut", 2))
    micros = (Micro("two backwards", keep="loss", keepers=(0,)), Micro("autograd.grad"))
    extras = (Extra("failed forward", 1, (0,)), Extra("mean loss", 2), Extra("average", 3))
    phases = (
        Phase(2, Ddp(sharded=True, gather_overlap=True), (Iteration(micros, extras, see=("weights",)),), clip=1.0),
        Phase(2, Fsdp(units=(UnitOf("blocks.0"), UnitOf(""))), (Iteration(micros),), damages=damages),
    )
    other = "lr=0.02, optimizer_class"  # a learning rate that plain PyTorch does not have
    told = told_where_it_differs(valid(Program(model, SGD, phases)), tmp_path, "lr=0.01, optimizer_class", other)
    assert "Differs: rank 0: weights 0: stem.weight: off by" in told


def told_where_it_differs(program: Any, folder: Path, old: str, new: str) -> str:
    """What the script of ``program`` says with ``new`` in place of ``old``. As it is, it finds nothing."""
    assert run_program(program).kind == "fine"
    path, source = folder / "program.py", script(program, "a program")
    path.write_text(source)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path.write_text(source.replace(old, new))
    return subprocess.run([sys.executable, path], capture_output=True, text=True).stderr


@pytest.mark.slow
def test_a_script_of_a_pipeline_stands_alone(tmp_path: Path) -> None:
    block = Block("norm mlp", library=True)
    steps = (Step(evaluates=True), Step(1, rounds=2), Step(outcome="fails"), Step())
    program = Pipeline("v", 1, 2, (block, block), "zero1", whole=True, tied=True, clip=0.1, steps=steps)
    told = told_where_it_differs(valid_pipeline(program), tmp_path, "momentum=0.9)\n", "momentum=0.8)\n")
    assert "Differs: rank 0: losses 3" in told


@pytest.mark.in_turn
def test_a_script_of_several_models_stands_alone(tmp_path: Path) -> None:
    """One comes out of its wrapper, another one judges it, and gradients are projected and put by hand."""
    extras = (Extra("put by hand"), Extra("attribute set"))
    judged = Iteration((Micro("judged"), Micro("judged")), extras, alternates=True)
    by_hand = Iteration(extras=(Extra("unwrapped"), Extra("attributes")), way="projected")
    model = Model((Block("mlp", library=True), Block()))
    phase = Phase(2, Fsdp(), (by_hand, judged), second=Second("zero1", library=True))
    program = valid(Program(model, SGD, (phase,)))
    assert [each.way for each in program.phases[0].iterations] == ["projected", "plain"]
    assert run_program(program).kind == "fine"
    path = tmp_path / "program.py"
    source = script(program, "a program")
    assert source.count("param.grad = grad") == 2  # and in plain PyTorch
    path.write_text(source.replace("param.grad = grad", "param.grad = 2 * grad", 1))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode and "Differs: rank 0" in done.stderr


@pytest.mark.slow
def test_a_script_of_what_is_saved_beside_training_stands_alone(tmp_path: Path) -> None:
    """Training goes back to a save in the background, and other ranks load another one; with transformers' experts."""
    model = Model((Block("mixtral experts", library=True, padded=True), Block("gpt-oss experts", library=True)))
    first = Iteration(extras=(Extra("saved beside", where=1),))
    back = Iteration(extras=(Extra("gone back to", where=1),))
    optimizer = Optimizer("AdamW", (("lr", 0.01),), schedule="steps")
    phases = (Phase(2, Ddp(sharded=True), (first, back), saves="beside"), Phase(3, Fsdp()))
    program = valid(Program(model, optimizer, phases))
    assert program.phases[0].saves == "beside"
    assert run_program(program).kind == "fine"
    path = tmp_path / "program.py"
    source = script(program, "a program")
    assert source.count("background=True") == 2 and source.count("converted(TopExperts(") == 2
    for changed, finding in (
        (source, ""),
        (source.replace("drops=True", "drops=False", 1), "Differs: rank 0: loss 0"),
        (source.replace('    load_checkpoint(f"{folder}/beside", model, optimizer)\n', ""), "Differs: rank 0: weights"),
    ):
        path.write_text(changed)
        found = run_apart(lambda: runpy.run_path(str(path), run_name="__main__") and None, limit=60.0)
        assert (found is None) if not finding else finding in found.details, found


@pytest.mark.slow
def test_a_script_of_a_run_stands_alone(tmp_path: Path) -> None:
    legs = (Leg(2, 2, "zero1"), Leg(1, 3, "fsdp", recompute="blocks"), Leg(2, 2, "ddp", 2, older=True))
    run = valid_run(Run("megatron", 2, weighted=True, documents="mask", clip=True, legs=legs))
    assert run.ranges == [(0, 2), (2, 3), (2, 6)]
    path = tmp_path / "program.py"
    source = script(run, "a run")
    assert source.count("'lr': 0.003") == 4
    for changed, finding in (
        (source, ""),
        (source.replace("'lr': 0.003", "'lr': 0.006", 3), "Differs: rank 0: losses"),
    ):
        path.write_text(changed)
        found = run_apart(lambda: runpy.run_path(str(path), run_name="__main__") and None, limit=60.0)
        assert (found is None) if not finding else finding in found.details, found


@pytest.mark.parametrize("loads, finding", [("nothing", "no file is named"), ("a part", "something was changed")])
def test_a_load_of_damage_that_is_not_as_promised_is_a_finding(loads: str, finding: str, tmp_path: Path) -> None:
    """A stand-in for the library's load is refused without a name, or after it has changed the model."""
    model = torch.nn.Linear(2, 2)

    def load(path: str, model: torch.nn.Linear, optimizer: object) -> None:
        with torch.no_grad():
            model.weight[0] += 1.0 if loads == "a part" else 0.0
        if not path.endswith("saved"):  # the copy
            raise ValueError("damaged" if loads == "nothing" else f"{path} is damaged")

    def train(rank: int) -> None:
        (tmp_path / "saved").mkdir(exist_ok=True)
        (tmp_path / "saved" / "file").write_text("tensors")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(user_checkpoints, "load_checkpoint", load)
            user_checkpoints.load_damaged("flipped", 1, str(tmp_path / "saved"), model)

    found = outcome_of(train, ranks=1)
    assert found.kind == "raised NotAsPromised" and finding in found.message


# ---- Outcomes. ----


def outcome_of(train: Callable[[int], None], ranks: int = 2) -> Outcome:
    """Of ranks that run this, instead of what the program says."""
    names = {"plain": lambda everyones: None}
    names["train_0"] = lambda records, folder: train(torch.distributed.get_rank())
    return running._run_both(Program(phases=(Phase(ranks),)), names)


def test_ranks_that_wait_for_each_other_are_stuck() -> None:
    def train(rank: int) -> None:
        if rank == 0:
            torch.distributed.barrier()

    assert outcome_of(train).kind == "stuck: SimulatedDeadlockError"


def test_ranks_that_do_different_things_are_a_finding() -> None:
    def train(rank: int) -> None:
        torch.distributed.all_reduce(torch.zeros(rank + 1))

    assert outcome_of(train).kind == "raised CollectiveMismatchError"


def test_an_error_of_torch_is_obscure() -> None:
    def train(rank: int) -> None:
        torch.zeros(2).view(3)

    found = outcome_of(train)
    assert found.kind == "raised RuntimeError" and "is invalid for input of size" in found.message


def test_an_error_of_the_library_that_is_no_refusal_is_obscure() -> None:
    """torch raises, where the library called it."""
    from maingrad.ddp import DistributedDataParallel

    assert outcome_of(lambda rank: DistributedDataParallel(None)).kind.startswith("raised ")  # type: ignore[arg-type]


def wrapped(net: torch.nn.Module) -> torch.nn.Module:
    from maingrad.ddp import DistributedDataParallel

    return DistributedDataParallel(net)


def test_a_refusal_is_of_all_ranks_and_by_name() -> None:
    def train(rank: int) -> None:
        wrapped(torch.nn.Linear(2, 2)).expose_grads()

    assert outcome_of(train).kind == "refused"


def test_a_refusal_of_some_ranks_is_a_finding() -> None:
    def train(rank: int) -> None:
        model = wrapped(torch.nn.Linear(2, 2))
        if rank == 0:
            model.expose_grads()

    assert outcome_of(train).kind == "refused by some"


def test_a_wrong_number_is_a_finding() -> None:
    names = {"plain": lambda everyones: [seen.update(loss=1.0) for seen in everyones[0]]}
    names["train_0"] = lambda records, folder: [seen.update(loss=1.0 + 1e-8) for seen in records]
    found = running._run_both(Program(phases=(Phase(2),)), names)
    assert found.kind == "differs: loss" and "off by 1.0e-08" in found.message
    names["train_0"] = lambda records, folder: [seen.update(loss=float("nan")) for seen in records]
    assert running._run_both(Program(phases=(Phase(2),)), names).kind == "differs: loss"
    names["train_0"] = lambda records, folder: [seen.update(loss=1.0 + 1e-12) for seen in records]
    assert running._run_both(Program(phases=(Phase(2),)), names).kind == "fine"


@pytest.mark.in_turn
def test_a_program_that_hangs_is_ended() -> None:
    found = run_apart(lambda: time.sleep(60), limit=5.0)
    assert found.kind == "hang" and "time.sleep" not in found.message and "test_tester" in found.details


@pytest.mark.in_turn
def test_a_process_that_dies_is_a_finding() -> None:
    assert run_apart(lambda: os._exit(3), limit=30.0) == Outcome("crash", "the process ended with status 3")


# ---- Shrinking. ----


@pytest.mark.in_turn
def test_what_does_not_matter_goes() -> None:
    """All that a finding needs stays, and nothing else."""

    def shows(program: Program) -> bool:
        kinds = {block.kind for block in program.model.blocks}
        return any(
            "branch" in kinds
            and isinstance(phase.wrapper, Fsdp)
            and any(len(each.micros) > 1 for each in phase.iterations)
            for phase in program.phases
        )

    seeds = [seed for seed in range(200) if shows(draw(seed))][:5]
    assert seeds
    for seed in seeds:
        program = draw(seed)
        small = shrink(program, shows)
        assert shows(small) and valid(small) == small
        (phase,), (block,) = small.phases, small.model.blocks
        assert block == Block("branch", library=block.library)
        assert phase.ranks <= 2 and len(phase.iterations) == 1
        assert phase.wrapper == replace(Fsdp(), units=(UnitOf(""),))
        assert phase.iterations[0] == Iteration((Micro(), Micro()))
        assert size_of(small) < size_of(program)
