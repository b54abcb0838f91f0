"""What ``HostState`` takes for no change, the effects that it names, and the random numbers of the host."""

import argparse
import functools
import logging
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maingrad.ddp.graphs.host.host_code import is_library, package_of
from maingrad.ddp.graphs.host.host_state import HostState

Case = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Returns the function of a step, and what is done after it was looked at."""
UNCHANGED: dict[str, Case] = {}
DRAWS: dict[str, Case] = {}


def case(table: dict[str, Case]) -> Callable[[Case], Case]:
    def keep(made: Case) -> Case:
        table[made.__name__] = made
        return made

    return keep


def look(function: Callable[[], Any]) -> HostState:
    model = nn.Linear(2, 2)
    return HostState(function, model, list(model.parameters()), "cpu", lambda: ())


class Config:
    def __init__(self) -> None:
        self.scale = 1.0

    def times(self, scale: float) -> float:
        return self.scale * scale


@case(UNCHANGED)
def attribute_that_is_only_called_elsewhere() -> Any:
    counter, called = types.SimpleNamespace(step=0), types.SimpleNamespace(step=lambda: 1)
    return lambda: (called.step(), counter), lambda: setattr(counter, "step", 1)


@case(UNCHANGED)
def equal_numbers_that_were_made_anew() -> Any:
    held = [1.5, (1, (2.5,)), np.float32(3.5), "text"]
    return lambda: held, lambda: held.__setitem__(
        slice(None), [float("1.5"), (1, (float("2.5"),)), np.float32(3.5), "".join(["te", "xt"])]
    )


@case(UNCHANGED)
def attribute_that_no_code_names() -> Any:
    config = Config()
    return lambda: config.times(1.0), lambda: setattr(config, "unheard_of", 0.5)


@case(UNCHANGED)
def argument_that_no_code_names() -> Any:
    args = argparse.Namespace(scale=1.0, unheard_of=1.0)
    return lambda: args.scale, lambda: setattr(args, "unheard_of", 0.5)


@case(UNCHANGED)
def same_method_anew() -> Any:
    config = Config()
    held = [config.times]
    return lambda: held[0](1.0), lambda: held.__setitem__(0, config.times)


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing_is_no_change(name: str) -> None:
    function, change = UNCHANGED[name]()
    state = look(function)
    for _ in range(2):
        change()
        assert state.change() is None


LOST: dict[str, tuple[Callable[[], Any], str]] = {
    "print": (lambda: print("loss"), "prints, which no replay would"),
    "input": (lambda: input(), "reads the keyboard"),
    "open": (lambda: open("losses"), "opens a file"),  # noqa: SIM115
    "breakpoint": (lambda: breakpoint(), "stops in a debugger"),
    "log": (lambda: logger.info("loss"), f"writes to the log '{__name__}'"),
    "iterator": (lambda: next(batches), "reads 'batches', which gives something else each time"),
}
logger, batches = logging.getLogger(__name__), iter([1, 2])


@pytest.mark.parametrize("name", LOST)
def test_effects_that_no_replay_has_are_named(name: str) -> None:
    function, why = LOST[name]
    assert why in (look(function).lost or "")


# ---- Random numbers. ----


@case(DRAWS)
def of_python() -> Any:
    return lambda: random.random(), lambda: random.random()


@case(DRAWS)
def of_numpy() -> Any:
    return lambda: np.random.rand(), lambda: np.random.rand()


@case(DRAWS)
def of_numpy_where_a_number_was_left() -> Any:
    np.random.seed(0)
    np.random.randn()  # draws two numbers, and keeps one
    return lambda: np.random.randn(), lambda: np.random.randn()


@case(DRAWS)
def of_an_object_of_python() -> Any:
    own = random.Random(0)
    return lambda: own.random(), lambda: own.random()


@case(DRAWS)
def of_a_generator_of_numpy() -> Any:
    own = np.random.default_rng(0)
    return lambda: own.random(), lambda: own.random()


@case(DRAWS)
def of_an_old_generator_of_numpy() -> Any:
    own = np.random.RandomState(0)
    return lambda: own.rand(), lambda: own.rand()


@case(DRAWS)
def of_a_generator_of_torch() -> Any:
    own = torch.Generator()
    return lambda: torch.rand(1, generator=own), lambda: torch.rand(1, generator=own)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_count_in_a_call_and_not_between_calls(name: str) -> None:
    function, draw = DRAWS[name]()
    state = look(function)
    draw()
    assert state.change() is None
    state.begin_call()
    assert state.draws() is None
    draw()
    assert state.draws() is not None


# ---- Whose code is looked into. ----


def test_the_programs_own_code_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is, but for the package that the function is in, and for what was started."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", np.__file__, raising=False)
    is_library.cache_clear()
    for own in ("__main__", None, "numpy.random", __name__):
        assert not is_library(own, "numpy")
    for library in ("maingrad.ddp", "torch.nn", "builtins", "json", "numpy.random", "time"):
        assert is_library(library, "of_the_program")
    assert package_of(functools.partial(functools.partial(np.full), 1)) == "numpy"
    assert package_of(nn.functional.relu) == package_of(len) == "__main__"
