"""What ``HostState`` takes for no change, what is around a call, and the effects and random numbers of the host."""

import abc
import argparse
import functools
import logging
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from os import environ, getenv
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import maingrad
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.graphs.auto_step import _place_of
from maingrad.ddp.graphs.host import host_state, surroundings
from maingrad.ddp.graphs.host.host_code import is_library, package_of
from maingrad.ddp.graphs.host.host_state import HostState
from maingrad.launch import simulate
from maingrad.te_integration import Linear

T = TypeVar("T")
Case = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Returns the function of a step, and what is done after it was looked at."""
UNCHANGED: dict[str, Case] = {}
DRAWS: dict[str, Case] = {}


def case(table: dict[str, Case]) -> Callable[[Case], Case]:
    def keep(made: Case) -> Case:
        table[made.__name__] = made
        return made

    return keep


def look(function: Callable[[], Any], kind: str = "cpu") -> HostState:
    model = nn.Linear(2, 2)
    return HostState(function, model, list(model.parameters()), kind, lambda: ())


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


class Abstract(abc.ABC, Generic[T]):
    """Its bases' methods read nothing that it has."""

    scale = 1.0


@case(UNCHANGED)
def attribute_beside_bases_without_any() -> Any:
    config = Abstract[int]()
    return lambda: config.scale, lambda: setattr(config, "unheard_of", 0.5)


class Trainer(Dataset[int]):
    """A class of the library reads its attributes; but its own method is what is graphed."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        pass


@case(UNCHANGED)
def count_beside_the_method_that_is_graphed() -> Any:
    trainer = Trainer()
    return trainer.step, lambda: setattr(trainer, "count", trainer.count + 1)


@case(UNCHANGED)
def what_a_librarys_object_holds() -> Any:
    """Nobody says that it is used."""
    held = nn.Dropout()
    held.log, held.batches = logger, batches  # type: ignore[assignment]
    return lambda: held(torch.ones(1)), bool


@case(UNCHANGED)
def matrix_without_strides() -> Any:
    matrix = torch.eye(2).to_sparse()
    return lambda: matrix, lambda: matrix.mul_(2)


@case(UNCHANGED)
def function_with_the_name_of_an_effect() -> Any:
    names = {"__name__": __name__, "print": lambda text: text}
    exec("def step(): print('loss')", names)
    return names["step"], bool


@case(UNCHANGED)
def values_of_a_tensor() -> Any:
    held = {"mean": torch.zeros(2)}
    return lambda: held["mean"].sum(), lambda: held["mean"].add_(1.0)


@case(UNCHANGED)
def array_that_is_too_large_to_compare() -> Any:
    """A data set."""
    held = np.zeros(100_000)
    return lambda: held, lambda: held.fill(1.0)


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing_is_no_change(name: str) -> None:
    function, change = UNCHANGED[name]()
    state = look(function)
    assert state.lost is None
    for _ in range(2):
        change()
        assert state.change() is None


def test_an_attribute_that_a_class_loses_is_seen() -> None:
    class Made:
        scale = 1.0

    made = Made()
    state = look(lambda: made.scale)
    del Made.scale
    assert "scale" in (state.change() or "")


def test_a_function_that_reads_all_attributes_may_call_others() -> None:
    """Those read few by their names, and what the first reads counts still."""
    config = Config()
    config.unheard_of = 1.0  # type: ignore[attr-defined]

    def reads_one() -> float:
        return config.scale

    def reads_all() -> Any:
        return vars(config), reads_one()

    state = look(reads_all)
    config.unheard_of = 0.5  # type: ignore[attr-defined]
    assert "unheard_of" in (state.change() or "")


def test_what_our_modules_keep_in_private_names_is_no_change() -> None:
    """They make caches as they run. Of other modules every attribute counts, also one that is gone for another."""
    for layer, name, counts in (
        (Linear(2, 2), "_made", False),
        (Linear(2, 2), "made", True),
        (nn.Linear(2, 2), "_made", True),
    ):
        state = HostState(lambda: 1, nn.Sequential(layer), [], "cpu", lambda: ())
        setattr(layer, name, 1)
        assert (state.change() is not None) == counts
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = HostState(lambda: 1, nn.Sequential(layer, other), [], "cpu", lambda: ())
    assert state.change() is None
    del layer.in_features
    layer.features_in = 2
    assert state.change() is not None


def test_an_array_in_the_place_of_another_is_a_change() -> None:
    """Equal ones too: a function may have kept the first."""
    held = [np.ones(2)]
    state = look(lambda: held[0].sum())
    held[0] = np.ones(2)
    assert state.change() is not None


# ---- Around a call. ----


@pytest.mark.parametrize("read", [lambda: environ["SCALE_OF_A_TEST"], lambda: getenv("SCALE_OF_A_TEST")])
def test_an_environment_that_was_imported_by_name_is_read(
    read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALE_OF_A_TEST", "1")
    state = look(read)
    assert state.change() is None
    monkeypatch.setenv("SCALE_OF_A_TEST", "0.5")
    assert state.change() is not None


class Doubles:
    """One of its methods is another object's."""

    held = Config()
    scaled = held.times


def test_a_method_of_another_object_in_a_class_is_looked_into() -> None:
    doubles = Doubles()
    state = look(lambda: doubles.scaled(2.0))
    Doubles.held.scale = 0.5
    assert "scale" in (state.change() or "")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_looked_into_and_missed(register: str) -> None:
    config, model = Config(), nn.Linear(2, 2)
    handle = getattr(model.weight, register)(lambda _: config.scale and None)
    made = [HostState(lambda: 1, model, list(model.parameters()), "cpu", lambda: ()) for _ in range(2)]
    assert [state.change() for state in made] == [None, None]
    config.scale = 0.5
    assert "scale" in (made[0].change() or "")
    config.scale = 1.0
    handle.remove()
    assert made[1].change() == "a hook of the model"


def test_a_program_of_very_many_values_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [[number] for number in range(20)]
    assert look(lambda: held).lost is None
    monkeypatch.setattr(host_state, "_MOST_PLACES", 20)
    assert look(lambda: held).lost == "reads more than 20 values and objects, too many to compare before each call"


def test_a_look_waits_for_no_gather() -> None:
    """Of parameters their places and hooks count, and no value."""

    def on_each_rank() -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=1)
        model = DistributedDataParallel(nn.Linear(4, 4), config)
        optimizer = DistributedOptimizer(model)
        params, gathers = list(model.parameters()), optimizer.param_sync.gathers
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert len(gathers) == 2
        around = surroundings.Surroundings(model, params, "cpu", lambda: ())
        assert (around.change(), around.hooks()) == (None, around.hooks())
        assert HostState(lambda: params, model, params, "cpu", lambda: ()).change() is None
        assert all(gather.under_way for gather in gathers)

    simulate(on_each_rank, 2)


def test_an_environment_that_no_code_reads_is_none_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    state = look(lambda: torch.ones(1))
    monkeypatch.setenv("MAINGRAD_UNHEARD_OF", "1")
    assert state.change() is None


@pytest.mark.parametrize(
    ("before", "now"), [(None, torch.float16), (None, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_autocast_is_seen_and_so_is_its_dtype(before: torch.dtype | None, now: torch.dtype) -> None:
    with torch.autocast("cpu", before, enabled=before is not None):
        state = look(lambda: 1)
        assert state.change() is None
        with torch.autocast("cpu", now):
            assert "autocast" in (state.change() or "")


class Switched(nn.Linear):
    way = "fast"


def test_what_other_rooms_say_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes of a thread, switches of modules, hooks of a wrapper, and parameters that the model does not register."""
    mode, beside, outside = ["a recipe"], [1], nn.Parameter(torch.zeros(1))
    monkeypatch.setattr(surroundings, "modes", [lambda: mode[0]])
    monkeypatch.setattr(surroundings, "switches", ["way"])
    model = nn.Sequential(Switched(1, 1))
    changes: list[Callable[[], Any]] = [
        lambda: mode.__setitem__(0, "another recipe"),
        lambda: setattr(model[0], "way", "slow"),
        lambda: beside.append(2),
        lambda: outside.register_hook(lambda grad: None),
        lambda: model[0].weight.register_hook(lambda grad: None),
    ]
    for change in changes:
        state = surroundings.Surroundings(model, [outside], "cpu", lambda: tuple(beside))
        assert state.change() is None
        change()
        assert state.change() is not None


# ---- Effects. ----

LOST: dict[str, tuple[Callable[[], Any], str]] = {
    "print": (lambda: print("loss"), "prints, which no replay would"),
    "print among others": (lambda: (abs(1), max(1, 2), len(""), sum([1]), print("loss")), "prints, which no replay"),
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


def test_the_first_effect_is_named() -> None:
    """That of the function, before those of functions that it calls."""

    def called() -> str:
        return input()

    def step() -> None:
        print(called())

    assert "prints, which no replay would" in (look(step).lost or "")


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
def of_numpy_that_begins_anew() -> Any:
    """With another seed, and before any draw."""
    seeds = iter(range(10))
    np.random.seed(next(seeds))
    return lambda: np.random.rand(), lambda: np.random.seed(next(seeds))


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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_beside_a_gpu_tensors_and_numbers_of_the_cpu_are_the_hosts(kind: str) -> None:
    """Graphs hold their values. Without one they are the device's, which replays read, write and draw."""
    table, of_device = torch.ones(2), torch.ones(2, device="meta")
    with torch.inference_mode():
        frozen = torch.ones(2)
    state = look(lambda: (table, frozen, of_device), kind)
    state.begin_call()
    of_device.add_(1)
    assert (state.change(), state.draws()) == (None, None)
    table.add_(1)
    torch.rand(1)
    assert (state.change() is None, state.draws() is None) == ((kind == "cpu",) * 2)


def test_a_generator_of_the_device_is_none_of_the_hosts() -> None:
    """Replays draw from it."""
    own = type("OnDevice", (torch.Generator,), {"device": torch.device("cuda")})()
    state = look(lambda: own)
    state.begin_call()
    torch.rand(1, generator=own)
    assert (state.change(), state.draws()) == (None, None)


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
    for ours in (nn.functional.relu, len, maingrad.graphed):
        assert package_of(ours) == "__main__"


def test_an_installed_program_is_looked_into_and_what_it_imports_is_not() -> None:
    found = {}
    for name in ("installed_program", "installed_library"):
        found[name] = sys.modules[f"{name}.part"] = types.ModuleType(f"{name}.part")
        found[name].scale, found[name].__file__ = 1.0, f"/usr/lib/python3/dist-packages/{name}/part.py"  # type: ignore[attr-defined]
    names = {"__name__": "installed_program.steps"}
    imports = "from installed_program.part import scale; from installed_library.part import scale"
    exec(f"def step(): {imports}", names)
    state = look(names["step"])  # type: ignore[arg-type]
    found["installed_library"].scale = 0.5  # type: ignore[attr-defined]
    assert state.change() is None
    found["installed_program"].scale = 0.5  # type: ignore[attr-defined]
    assert state.change() is not None


def test_switches_of_modules_and_what_a_wrapper_adds_are_around_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Switched(nn.Linear):
        fast = exact = False

    monkeypatch.setattr(surroundings, "switches", ["fast", "exact"])
    model, beside = nn.Sequential(nn.Linear(2, 2), Switched(2, 2), Switched(2, 2)), [1]
    state = surroundings.Surroundings(model, list(model.parameters()), "cpu", lambda: tuple(beside))
    assert state.change() is None
    for change, back in (
        (lambda: setattr(model[1], "fast", True), lambda: setattr(model[1], "fast", False)),
        (lambda: setattr(model[2], "exact", True), lambda: setattr(model[2], "exact", False)),
        (lambda: beside.append(2), beside.pop),
    ):
        change()
        assert state.change() == "autocast, a switch, what is frozen, or the memory of a parameter or buffer"
        back()
        assert state.change() is None


def called_from(file: str, function: Callable[..., Any]) -> Callable[[], Any]:
    """A function in a source file that calls another one."""
    names: dict[str, Any] = {"function": function}
    exec(compile("def call():\n    return function()", file, "exec"), names)
    return names["call"]  # type: ignore[no-any-return]


def test_an_error_is_placed_in_the_program_and_in_a_models_library_behind_it() -> None:
    """Not in a library that calls the program, nor in torch."""
    program = partial(called_from, "/home/me/train.py")
    models = partial(called_from, "/opt/site-packages/models/model.py")
    ours = partial(called_from, torch.nn.modules.linear.__file__)
    in_program, in_models = "/home/me/train.py:2: ", "/opt/site-packages/models/model.py:2: "
    for function, expected in (
        (program(models(ours(models(len)))), in_program + in_models),
        (models(program(ours(len))), in_program),
        (models(program(models(len))), in_program + in_models),
    ):
        with pytest.raises(TypeError) as raised:
            function()
        traceback: Any = raised.value.__traceback__
        assert _place_of(raised.value.with_traceback(traceback.tb_next)) == expected
