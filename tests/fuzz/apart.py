"""Programs in processes of their own: each starts from the same state, and one that hangs takes nothing along.

A process is a fork of this one, which has everything imported and has run nothing but what warms it up.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mesh_programs import Meshes
from pipeline_programs import Pipeline
from programs import Program
from recipe_programs import Recipes
from run_programs import Run
from running import Outcome, run_program
from shrinking import shrink


class Child(NamedTuple):
    """A process at work."""

    pid: int
    pipe: int
    """What it writes its result to."""
    stacks: Any
    """A file that gets its stacks when it has taken too long, or raised."""
    deadline: float
    what: Any
    """What its starter knows it by."""


def start(task: Callable[[], Any], limit: float, what: Any = None) -> Child:
    """Have ``task`` called in a process of its own, for at most so many seconds."""
    reading, writing = os.pipe()
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the child's result
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_the_child(task, writing, stacks)
    os.close(writing)
    return Child(pid, reading, stacks, time.monotonic() + limit, what)


def _be_the_child(task: Callable[[], Any], writing: int, stacks: Any) -> None:
    status = 1
    try:
        warnings.simplefilter("ignore")
        # Collections are counted from here: what the starter has allocated since does not move them.
        gc.collect()
        gc.freeze()
        faulthandler.register(signal.SIGUSR1, file=stacks)
        result = pickle.dumps(task())
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(result)
        status = 0
    except BaseException:
        traceback.print_exc(file=stacks)
        stacks.flush()
    finally:
        os._exit(status)


def finished(children: list[Child]) -> Iterator[tuple[Child, Any]]:
    """Waits until some are done or over their time; takes them out of the list, and yields them with their results.

    The result of one that hung or crashed is an ``Outcome`` that says so.
    """
    timeout = max(0.0, min(child.deadline for child in children) - time.monotonic())
    ready, _, _ = select.select([child.pipe for child in children], [], [], timeout)
    for child in [child for child in children if child.pipe in ready or time.monotonic() > child.deadline]:
        children.remove(child)
        yield child, _result_of(child, child.pipe in ready)


def _result_of(child: Child, done: bool) -> Any:
    with os.fdopen(child.pipe, "rb") as pipe:
        written = pipe.read() if done else b""
    if not done:
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(1.0)  # for its stacks
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    child.stacks.seek(0)
    stacks = child.stacks.read()
    child.stacks.close()
    if written:
        return pickle.loads(written)
    if not done:
        return Outcome("hang", "the program did not end within its time", stacks)
    return Outcome("crash", f"the process ended with status {os.waitstatus_to_exitcode(status)}", stacks)


def run_apart(task: Callable[[], Any], limit: float) -> Any:
    """One task, to its end."""
    children = [start(task, limit)]
    return next(result for _, result in finished(children))


def shrink_apart(
    program: Program | Pipeline | Run | Recipes | Meshes, kind: str, limit: float, seconds: float
) -> tuple[Program, Outcome]:
    """The simplest program of the same kind of finding, and what comes of it; each try in a process of its own."""

    def same(candidate: Program) -> bool:
        return run_apart(lambda: run_program(candidate), limit).kind == kind

    small = shrink(program, same, seconds=seconds)
    return small, run_apart(lambda: run_program(small), limit)


def warm_up(program: Program | Pipeline | Run | Recipes | Meshes) -> None:
    """Import what is imported late, here instead of in every child."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        run_program(program)
    gc.collect()
    gc.freeze()  # what is there by now is touched by no collection, and so copied for no child
