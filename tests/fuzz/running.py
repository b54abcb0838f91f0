"""Runs a program, here, and says what came of it."""

import gc
import logging
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vocabulary
from comparison import Differs, compare
from mesh_programs import Meshes
from pipeline_programs import Pipeline
from programs import Phase, Program
from recipe_programs import Recipes
from run_programs import Run
from scripts import default_dtype, garbage_lines
from sources import program_source, tolerance_of

import maingrad.ddp as library
from maingrad.launch import simulate

logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
"""What a schedule says of an exception that its caller catches."""

LIBRARY = str(Path(library.__file__).parent.parent)


@dataclass(frozen=True)
class Outcome:
    """What came of a program."""

    kind: str
    """ "fine", "refused", or what was found: "differs ...", "deadlock", "raised ...", "refused by some", "hang", ..."""
    message: str = ""
    details: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether something is wrong with the library, or with this tester."""
        return self.kind not in ("fine", "refused")


def run_program(program: Program | Pipeline | Run | Recipes | Meshes) -> Outcome:
    """Both ways, and compared."""
    names = vocabulary.namespace()
    source = program_source(program)
    exec(compile(source, "<program>", "exec"), names)
    before = torch.get_default_dtype(), gc.get_threshold(), gc.isenabled()
    torch.set_default_dtype(getattr(torch, default_dtype(program)))
    try:
        return _run_both(program, names)
    finally:
        torch.set_default_dtype(before[0])
        gc.set_threshold(*before[1])
        (gc.enable if before[2] else gc.disable)()
        gc.unfreeze()


def _run_both(program: Program | Pipeline | Run | Recipes | Meshes, names: dict[str, Any]) -> Outcome:
    expected = [[{} for _ in range(phase.ranks)] for phase in program.phases]
    try:
        names["plain"](expected)
    except Exception as error:
        return Outcome("broken in plain PyTorch", repr(error), traceback.format_exc())
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for index in range(len(program.phases)):
            outcome = _run_phase(program, index, names[f"train_{index}"], expected[index], folder)
            if outcome.kind != "fine":
                return outcome
    return Outcome("fine")


def _run_phase(
    program: Program | Pipeline | Run | Recipes | Meshes,
    index: int,
    train: Callable[..., None],
    expected: list[dict[str, Any]],
    folder: str,
) -> Outcome:
    phase: Phase = program.phases[index]
    found: list[dict[str, Any]] = [{} for _ in range(phase.ranks)]
    raised: dict[int, Exception] = {}

    def on_each_rank() -> None:
        try:
            train(found, folder)
        except Exception as error:
            raised[torch.distributed.get_rank()] = error

    for line in garbage_lines(phase.garbage):
        exec(line)
    stuck = None
    try:
        simulate(on_each_rank, phase.ranks, seed=program.order)
    except Exception as error:
        stuck = error
    if raised:
        return _judge_raised(phase.ranks, raised, stuck)
    if stuck is not None:
        return Outcome(f"stuck: {type(stuck).__name__}", str(stuck))
    try:
        try:
            compare(found, expected, tolerance_of(program))
        except Differs:
            if program.dtype not in ("bfloat16", "autocast"):
                raise
            compare(found, expected, tolerance_of(program), _in_fp32(program)[index])
    except Differs as error:
        what = re.sub(r"rank \d+: ([a-z' ]*[a-z']).*", r"\1", str(error), flags=re.DOTALL)
        return Outcome(f"differs: {what}", str(error))
    return Outcome("fine")


def _in_fp32(program: Program) -> list[list[dict[str, Any]]]:
    """What plain PyTorch computes where the program has fp32 in place of bf16."""
    names, exact = vocabulary.namespace(), [[{} for _ in range(phase.ranks)] for phase in program.phases]
    exec(compile(program_source(replace(program, dtype="float32")), "<program in fp32>", "exec"), names)
    names["plain"](exact)
    return exact


def _judge_raised(ranks: int, raised: dict[int, Exception], stuck: Exception | None) -> Outcome:
    """A refusal is raised by the library itself, alike on all ranks, and by name."""
    rank, error = next(iter(raised.items()))
    details = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    if not is_refusal(error):
        return Outcome(f"raised {type(error).__name__}", message, details)
    spelt = {_without_numbers(str(each)) for each in raised.values()}
    if len(raised) < ranks or stuck is not None or len(spelt) > 1:
        others = f"; {type(stuck).__name__}: {stuck}" if stuck is not None else ""
        return Outcome("refused by some", f"rank {rank} of {ranks}, with {len(raised)}: {message}{others}", details)
    return Outcome("refused", message, details)


def is_refusal(error: Exception) -> bool:
    """Whether the library said no by itself, by a ``raise`` of its own, and by the name of something.

    torch's own errors (shapes, versions, autograd's) are obscure to a user of the library.
    """
    if type(error).__name__ in ("CollectiveError", "CollectiveMismatchError", "SimulatedDeadlockError"):
        return False
    if not isinstance(error, (ValueError, TypeError, RuntimeError, FloatingPointError)):
        return False
    if re.search(r"cannot go from \w+ to \w+", str(error)):  # a checked phase: a program must not get that far
        return False
    frames = traceback.extract_tb(error.__traceback__)
    raised_there = (
        bool(frames) and frames[-1].filename.startswith(LIBRARY) and (frames[-1].line or "").startswith("raise")
    )
    return raised_there and _names_something(str(error))


def _names_something(message: str) -> bool:
    """A quoted name, a call, or an option."""
    return re.search(r"'[^']+'|\w\(|\w_\w", message) is not None


def _without_numbers(message: str) -> str:
    return re.sub(r"\d+", "N", message)
