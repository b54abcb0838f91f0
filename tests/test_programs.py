"""The programs of docs/programs.md train as plain PyTorch does in one process with all ranks' rows, and are refused
where the page says so."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from program_pages import WAYS, Program, lines_of, programs_of
from seeding import seed_as_in_a_new_process
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError

PAGE = Path(__file__).resolve().parents[1] / "docs/programs.md"
BEFORE_EACH, *PROGRAMS = programs_of(PAGE)
TRAINED = [(program, way) for program in PROGRAMS for way in program.ways if way != "plain"]
REFUSED = [(program, way) for program in PROGRAMS for way in program.refused_under]
ACCUMULATION = next(program for program in PROGRAMS if program.section == "Gradient accumulation")


def run(program: Program, way: str) -> dict[str, Any]:
    """Everything that the program has named; on each rank, or on none. What is wrapped to be trained is trained."""
    names: dict[str, Any] = {"__name__": "program"}
    if way != "plain":  # that program runs in the process of the tests
        seed_as_in_a_new_process()
    execute(BEFORE_EACH, way, names)
    wrapped = []
    wrap = names["wrap"]

    def remember(module: nn.Module) -> nn.Module:
        trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
        wrapped.append((module, {name: param.detach().clone() for name, param in trained.items()}))
        return wrap(module)

    names["wrap"] = remember
    execute(program, way, names)
    if way == "plain":
        assert wrapped
        for module, before in wrapped:
            after = dict(module.named_parameters())
            assert not any(torch.equal(value, after[name]) for name, value in before.items())
    return names


def execute(program: Program, way: str, names: dict[str, Any]) -> None:
    exec(compile(lines_of(program.code, way), f"{program} ({way})", "exec"), names)


def outcome(program: Program, way: str) -> dict[str, Any]:
    """Whole weights of the program's models, and its history."""
    names = run(program, way)
    seen: dict[str, Any] = {
        f"{name}.{key}": whole(tensor)
        for name, value in names.items()
        if isinstance(value, nn.Module)
        for key, tensor in (value.module if isinstance(value, DistributedDataParallel) else value).state_dict().items()
    }
    return seen | {"history": names["history"]} if "history" in names else seen


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def exactly(job: Callable[..., Any], *args: Any) -> Any:
    """In fp64, so that what differs is another program and no rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        return job(*args)
    finally:
        torch.set_default_dtype(torch.float32)


def around(program: Program, job: Callable[..., Any], *args: Any) -> Any:
    """Autocast leaves fp64 as it is: what is about it runs in fp32."""
    return job(*args) if "autocast" in program.code else exactly(job, *args)


@functools.cache
def expected_of(program: Program) -> dict[str, Any]:
    return around(program, outcome, program, "plain")


def assert_trained_alike(program: Program, results: list[dict[str, Any]]) -> None:
    expected = expected_of(program)
    # A clipping coefficient is fp32, of fp64 gradients too.
    close = {"rtol": 2e-2, "atol": 2e-2} if "autocast" in program.code else {"rtol": 1e-6, "atol": 1e-7}
    for rank, seen in enumerate(results):
        if rank > 0 and not seen.get("history", True):
            seen["history"] = expected["history"]  # kept on rank 0 alone
        torch.testing.assert_close({name: seen[name] for name in expected}, expected, **close)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("program", "way"), TRAINED, ids=str)
@pytest.mark.sampled(1)
def test_trains_as_plain_pytorch_does(program: Program, way: str) -> None:
    assert_trained_alike(program, around(program, simulate, outcome, 2, program, way))


@pytest.mark.parametrize(("program", "way"), REFUSED, ids=str)
@pytest.mark.sampled(3)
def test_is_refused_as_the_page_says(program: Program, way: str) -> None:
    with pytest.raises(SimulatedRankError) as raised:
        simulate(run, 2, program, way)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert program.message in str(raised.value.__cause__)


def outcome_in_fp64(program: Program, way: str) -> dict[str, Any]:
    return exactly(outcome, program, way)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.sampled(1)
def test_trains_in_processes(way: str) -> None:
    assert_trained_alike(ACCUMULATION, run_ranks(outcome_in_fp64, 2, ACCUMULATION, way))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torchrun_runs_what_is_pasted(way: str) -> None:
    """The page says so."""
    for program in (program for program in PROGRAMS if way in program.ways):
        text = lines_of(BEFORE_EACH.code, way) + lines_of(program.code, way)
        Path(f"{len(os.listdir())}.py").write_text(text)
    Path("all.py").write_text("import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path)\n")
    paths = [path for path in os.listdir() if path != "all.py"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*(launcher if way != "plain" else [sys.executable]), "all.py", *paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr


# ---- The page, and how it is read. ----


def test_the_page_has_its_programs_and_a_table_of_them() -> None:
    assert len({program.section for program in PROGRAMS}) >= 22
    assert all(way in program.ways for program in PROGRAMS if program.ways for way in ("plain", "DDP", "ZeRO-1"))
    text = PAGE.read_text()
    for section in {program.section for program in PROGRAMS}:
        anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
        assert f"[{section}](#{anchor})" in text


CODE = """\
one = 1  # plain: alone
two = 2  # DDP, ZeRO-1
with a:  # DDP, fsdp
    three = 3
    with b:  # ZeRO-1
        four = 4  # for all

    for x in y:  # ZeRO-1
        five = 5
six = 6
"""


@pytest.mark.parametrize(
    ("way", "lines"),
    [
        ("plain", "one = 1  # plain: alone|three = 3|four = 4  # for all||six = 6"),
        ("DDP", "two = 2  # DDP, ZeRO-1|with a:  # DDP, fsdp|    three = 3|    four = 4  # for all||six = 6"),
        (
            "ZeRO-1",
            "two = 2  # DDP, ZeRO-1|three = 3|with b:  # ZeRO-1|    four = 4  # for all||for x in y:  # ZeRO-1|"
            "    five = 5|six = 6",
        ),
    ],
)
def test_a_program_is_its_lines_without_those_of_others(way: str, lines: str) -> None:
    assert lines_of(CODE, way).rstrip("\n").split("\n") == lines.split("|")
