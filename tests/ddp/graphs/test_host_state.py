"""What ``HostState`` sees: each thing that a function's Python may read, changed once.

``test_graphed_reads.py`` trains with the changes that programs make most; here every kind of them is seen at once.
"""

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from os import environ, getenv
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from maingrad.ddp.graphs.host.host_state import HostState

Case = Callable[[nn.Sequential], tuple[Callable[[], Any], Callable[[], Any]]]
"""Takes the model; returns the function of a step, and what changes after it was looked at."""
SEEN: dict[str, Case] = {}
factor = 1.0


def seen(made: Case) -> Case:
    SEEN[made.__name__] = made
    return made


def look(function: Callable[[], Any], model: nn.Module) -> HostState:
    trained = [param for param in model.parameters() if param.requires_grad]
    return HostState(function, model, trained, "cpu", lambda: ())


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    model[1].register_buffer("absent", None)
    return model


def halve() -> None:
    global factor
    factor = 0.5


def changed_item(held: Any) -> Callable[[], None]:
    return lambda: held.__setitem__(0, 0.5)


# ---- Functions. ----


def first_of(held: list[float], *, more: Any = None) -> float:
    return held[0]


@seen
def argument_of_a_partial(model: nn.Module) -> Any:
    held = [1.0]
    return functools.partial(first_of, held), changed_item(held)


@seen
def keyword_of_a_partial(model: nn.Module) -> Any:
    held = [1.0]
    return functools.partial(first_of, [2.0], more=held), changed_item(held)


@seen
def function_of_a_partial(model: nn.Module) -> Any:
    return functools.partial(lambda scale: scale * factor, 2.0), halve


@seen
def default(model: nn.Module) -> Any:
    def step(scale: float = 1.0) -> float:
        return scale

    return step, lambda: setattr(step, "__defaults__", (0.5,))


@seen
def keyword_only_default(model: nn.Module) -> Any:
    def step(*, scale: float = 1.0) -> float:
        return scale

    return step, lambda: setattr(step, "__kwdefaults__", {"scale": 0.5})


@seen
def attribute_of_a_function(model: nn.Module) -> Any:
    def step() -> Any:
        return step.scale  # type: ignore[attr-defined]

    step.scale = 1.0  # type: ignore[attr-defined]
    return step, lambda: setattr(step, "scale", 0.5)


@seen
def global_in_an_inner_function(model: nn.Module) -> Any:
    return (lambda: [scale * factor for scale in (1.0, 2.0)] and (lambda: factor)()), halve


@seen
def global_that_is_only_written(model: nn.Module) -> Any:
    return halve, halve


@functools.lru_cache
def remembered() -> float:
    return factor


@seen
def function_behind_a_cache(model: nn.Module) -> Any:
    return lambda: remembered(), halve


@torch.no_grad()
def without_gradients() -> float:
    return factor


@seen
def function_behind_a_decorator(model: nn.Module) -> Any:
    return lambda: without_gradients(), halve


@seen
def method_that_was_bound(model: nn.Module) -> Any:
    held = {"scale": 1.0}
    get = held.get
    return lambda: get("scale"), lambda: held.update(scale=0.5)


@seen
def global_in_the_body_of_a_class(model: nn.Module) -> Any:
    def step() -> Any:
        class Local:
            scale = factor

        return Local

    return step, halve


@seen
def variable_that_is_assigned_later(model: nn.Module) -> Any:
    def step() -> float:
        return scale

    def assign() -> None:
        nonlocal scale
        scale = 0.5

    if model is None:
        scale = 1.0
    return step, assign


@seen
def global_that_is_deleted(model: nn.Module) -> Any:
    names = {"__name__": __name__, "scale": 1.0}
    exec("def step(): return scale", names)
    return names["step"], lambda: names.pop("scale")


# ---- Classes and objects. ----


class Base:
    of_base = 1.0

    def plain(self) -> float:
        return factor


class Config(Base):
    """Reads the global in each kind of method, and its own attribute."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale * factor

    @functools.cached_property
    def once(self) -> float:
        return factor

    @staticmethod
    def static() -> float:
        return factor

    @classmethod
    def of_class(cls) -> float:
        return factor

    @functools.lru_cache  # noqa: B019
    def cached(self) -> float:
        return factor

    def times(self, scale: float) -> float:
        return self._scale * scale

    def over(self, scale: float) -> float:
        return super().plain() * scale


class Product:
    """Nothing but its operator and its text read the global."""

    def __mul__(self, scale: float) -> float:
        return factor * scale

    def __format__(self, how: str) -> str:
        return f"{factor}"


class Made:
    """Nothing but its constructor reads the global."""

    def __init__(self) -> None:
        self.now = factor


class MadeToo(Made):
    """Has its base's constructor."""


@seen
def property_of_an_object(model: nn.Module) -> Any:
    config = Config()
    return lambda: config.scale, lambda: setattr(config, "_scale", 0.5)


@seen
def setter_of_a_property(model: nn.Module) -> Any:
    config = Config()

    def step() -> None:
        config.scale = 1.0

    return step, halve


@seen
def setter_by_a_name(model: nn.Module) -> Any:
    config = Config()
    return lambda: setattr(config, "scale", 1.0), halve


@seen
def cached_property(model: nn.Module) -> Any:
    config = Config()
    return lambda: config.once, halve


@seen
def static_method(model: nn.Module) -> Any:
    return lambda: Config.static(), halve


@seen
def class_method(model: nn.Module) -> Any:
    return lambda: Config.of_class(), halve


@seen
def method_behind_a_cache(model: nn.Module) -> Any:
    config = Config()
    return lambda: config.cached(), halve


@seen
def constructor(model: nn.Module) -> Any:
    return lambda: Made(), halve


@seen
def constructor_of_a_base(model: nn.Module) -> Any:
    return lambda: MadeToo(), halve


@seen
def method_of_a_base_by_super(model: nn.Module) -> Any:
    config = Config()
    return lambda: config.over(2.0), halve


@seen
def operator(model: nn.Module) -> Any:
    product = Product()
    return lambda: product * 2.0, halve


@seen
def method_of_pythons_that_is_named(model: nn.Module) -> Any:
    product = Product()
    return lambda: product.__format__(""), halve


class Scaling:
    """No module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * factor


class ScaledBeside(Scaling, nn.Module):
    """Has its forward from a class beside ``nn.Module``."""


class ScaledLinear(nn.Linear):
    """Nothing but its forward reads the global."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * factor


@seen
def forward_of_a_class_beside_the_librarys(model: nn.Module) -> Any:
    model.append(ScaledBeside())
    return lambda: model(torch.ones(2, 2)), halve


@seen
def forward_of_a_class_below_a_librarys(model: nn.Module) -> Any:
    """A parametrization makes a class of torch's over that of the program."""
    model.append(torch.nn.utils.parametrizations.weight_norm(ScaledLinear(2, 2)))
    return lambda: model(torch.ones(2, 2)), halve


@seen
def constructor_of_a_class_that_an_object_holds(model: nn.Module) -> Any:
    """The class was met before as that of another object."""
    held = types.SimpleNamespace(made=Made(), make=Made)
    return lambda: (held.made, held.make()), halve


@seen
def attribute_of_a_base_class(model: nn.Module) -> Any:
    Base.of_base = 1.0
    return lambda: Config.of_base, lambda: setattr(Base, "of_base", 0.5)


@seen
def function_in_an_attribute(model: nn.Module) -> Any:
    config = Config()
    config.scaled = lambda: 1.0  # type: ignore[attr-defined]
    return lambda: config.scaled(), lambda: setattr(config, "scaled", lambda: 0.5)  # type: ignore[attr-defined]


@seen
def method_of_another_object(model: nn.Module) -> Any:
    held = types.SimpleNamespace(times=Config(1.0).times)
    return lambda: held.times(2.0), lambda: setattr(held, "times", Config(0.5).times)


@seen
def another_method_of_one_object(model: nn.Module) -> Any:
    config = Config()
    held = [config.times]
    return lambda: held[0](2.0), lambda: held.__setitem__(0, config.over)


@seen
def attribute_with_the_name_of_a_mode(model: nn.Module) -> Any:
    """Modules have modes, which are part of a call's kind; an object of the program has an attribute."""
    held = types.SimpleNamespace(training=True)
    return lambda: held.training, lambda: setattr(held, "training", False)


@seen
def attribute_by_a_name(model: nn.Module) -> Any:
    config = Config()
    return lambda: getattr(config, "_scale"), lambda: setattr(config, "_scale", 0.5)  # noqa: B009


@seen
def attribute_that_may_be_there(model: nn.Module) -> Any:
    config = Config()
    return lambda: hasattr(config, "extra"), lambda: setattr(config, "extra", 1)


@dataclasses.dataclass
class Fields:
    scale: float = 1.0


@seen
def fields_as_a_tuple(model: nn.Module) -> Any:
    fields = Fields()
    return lambda: dataclasses.astuple(fields), lambda: setattr(fields, "scale", 0.5)


@seen
def arguments_of_a_program(model: nn.Module) -> Any:
    args = argparse.Namespace(scale=1.0)
    return lambda: args.scale, lambda: setattr(args, "scale", 0.5)


class OneSlot:
    __slots__ = "scale"


@seen
def slot_that_is_named_alone(model: nn.Module) -> Any:
    held = OneSlot()
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 0.5)


class TwoSlots(OneSlot):
    __slots__ = ("more",)


@seen
def slot_of_a_base(model: nn.Module) -> Any:
    held = TwoSlots()
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 0.5)


class Private:
    __slots__ = ("_own",)
    _shared = 1.0


@seen
def private_slot(model: nn.Module) -> Any:
    held = Private()
    held._own = 1.0
    return lambda: held._own, lambda: setattr(held, "_own", 0.5)


@seen
def private_attribute_of_a_class(model: nn.Module) -> Any:
    return lambda: Private._shared, lambda: setattr(Private, "_shared", Private._shared / 2)


@seen
def attribute_that_goes(model: nn.Module) -> Any:
    held = types.SimpleNamespace(scale=1.0, more=2.0)
    return lambda: held.scale * getattr(held, "more", 1.0), lambda: delattr(held, "more")


@seen
def rate_of_a_scheduler(model: nn.Module) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    return lambda: scheduler.last_epoch, lambda: setattr(scheduler, "last_epoch", 7)


class Loss(nn.CrossEntropyLoss):
    """The library's forward reads what the program sets."""


@seen
def attribute_that_a_library_reads(model: nn.Module) -> Any:
    loss = Loss()
    return lambda: loss(torch.zeros(1, 2), torch.zeros(1)), lambda: setattr(loss, "label_smoothing", 0.5)


class Block(nn.TransformerEncoderLayer):
    """The library's forward calls what the program has put in its place."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return x * factor


@seen
def method_that_a_library_calls(model: nn.Module) -> Any:
    block = Block(4, 1, 4)
    return lambda: block(torch.ones(1, 1, 4)), halve


# ---- Containers. ----


def of(read: Callable[[Any], Any], held: Any, change: Callable[[], Any]) -> Any:
    return lambda: read(held), change


@seen
def list_in_a_frozen_set(model: nn.Module) -> Any:
    config = Config()
    return of(lambda held: [each._scale for each in held], frozenset([config]), lambda: setattr(config, "_scale", 0.5))


@seen
def deque(model: nn.Module) -> Any:
    held = collections.deque([1.0])
    return of(sum, held, changed_item(held))


@seen
def items_of_a_set(model: nn.Module) -> Any:
    held = {1.0}
    return of(sum, held, lambda: (held.clear(), held.add(0.5)))


@seen
def view_of_a_dict(model: nn.Module) -> Any:
    held = {"scale": 1.0}
    return of(sum, held.values(), lambda: held.update(scale=0.5))


@seen
def dict_that_is_shown_read_only(model: nn.Module) -> Any:
    held = {"scale": 1.0}
    return of(lambda shown: shown["scale"], types.MappingProxyType(held), lambda: held.update(scale=0.5))


@seen
def keys_of_a_dict(model: nn.Module) -> Any:
    held, value = {"plain": Config()}, Config()
    held = {"plain": value}
    return of(list, held, lambda: (held.clear(), held.update(square=value)))


@seen
def object_that_is_a_key(model: nn.Module) -> Any:
    config = Config()
    return of(lambda held: [each._scale for each in held], {config: 1.0}, lambda: setattr(config, "_scale", 0.5))


@seen
def tuple_that_grows(model: nn.Module) -> Any:
    held: list[Any] = [(1.0,)]
    return of(lambda held: sum(held[0]), held, lambda: held.__setitem__(0, (1.0, 0.5)))


@seen
def length_of_a_long_list(model: nn.Module) -> Any:
    held = [0.0] * 5000
    return of(len, held, lambda: held.append(0.5))


@seen
def array_of_numbers(model: nn.Module) -> Any:
    held = array.array("d", [1.0])
    return of(sum, held, changed_item(held))


@seen
def array_of_bytes(model: nn.Module) -> Any:
    held = bytearray(b"1")
    return of(bytes, held, lambda: held.__setitem__(0, 2))


@seen
def array_of_numpy(model: nn.Module) -> Any:
    held = np.ones(3)
    return of(sum, held, changed_item(held))


@seen
def context_variable(model: nn.Module) -> Any:
    held = contextvars.ContextVar("held", default=1.0)
    return of(lambda held: held.get(), held, lambda: held.set(0.5))


@seen
def context_variable_without_a_value(model: nn.Module) -> Any:
    held: contextvars.ContextVar[float] = contextvars.ContextVar("held")
    return of(lambda held: held.get(None), held, lambda: held.set(0.5))


@seen
def number_of_another_type(model: nn.Module) -> Any:
    held: list[Any] = [1]
    return of(first_of, held, lambda: held.__setitem__(0, True))


# ---- Python. ----


@seen
def environment(model: nn.Module) -> Any:
    os.environ["SCALE_OF_A_TEST"] = "1"
    return lambda: os.environ["SCALE_OF_A_TEST"], lambda: os.environ.update(SCALE_OF_A_TEST="0.5")


@seen
def environment_by_a_function(model: nn.Module) -> Any:
    os.environ["SCALE_OF_A_TEST"] = "1"
    return lambda: os.getenv("SCALE_OF_A_TEST"), lambda: os.environ.update(SCALE_OF_A_TEST="0.5")


@seen
def environment_by_its_own_name(model: nn.Module) -> Any:
    environ["SCALE_OF_A_TEST"] = "1"
    return lambda: environ["SCALE_OF_A_TEST"], lambda: environ.update(SCALE_OF_A_TEST="0.5")


@seen
def environment_by_the_functions_own_name(model: nn.Module) -> Any:
    environ["SCALE_OF_A_TEST"] = "1"
    return lambda: getenv("SCALE_OF_A_TEST"), lambda: environ.update(SCALE_OF_A_TEST="0.5")


def module_of(name: str, **names: Any) -> Any:
    made = types.ModuleType(name)
    vars(made).update(names)
    sys.modules[name] = made
    return made


def compiled(body: str) -> Callable[[], Any]:
    """A function of a module in the package ``package_of_a_test``."""
    names = {"__name__": "package_of_a_test.steps", "__package__": "package_of_a_test"}
    exec(f"def step():\n    {body}\n", names)
    step: Callable[[], Any] = names["step"]  # type: ignore[assignment]
    return step


@seen
def import_from_the_own_package(model: nn.Module) -> Any:
    settings = module_of("package_of_a_test.settings", scale=1.0)
    return compiled("from .settings import scale; return scale"), lambda: setattr(settings, "scale", 0.5)


@seen
def import_of_a_package(model: nn.Module) -> Any:
    package = module_of("other_package_of_a_test", scale=1.0)
    module_of("other_package_of_a_test.part")
    step = compiled("import other_package_of_a_test.part; return other_package_of_a_test.scale")
    return step, lambda: setattr(package, "scale", 0.5)


# ---- Modules. ----


@seen
def mode_of_another_module(model: nn.Module) -> Any:
    other = nn.Dropout()
    return lambda: other(torch.ones(1)), other.eval


@seen
def hook_of_another_module(model: nn.Module) -> Any:
    other = nn.Dropout()
    return lambda: other(torch.ones(1)), lambda: other.register_forward_hook(lambda *args: None)


@seen
def memory_of_another_parameter(model: nn.Module) -> Any:
    other = nn.Linear(1, 1)
    return lambda: other(torch.ones(1)), lambda: setattr(other.weight, "data", torch.full((1, 1), 0.5))


@seen
def parameter_of_another_module(model: nn.Module) -> Any:
    other = nn.Linear(1, 1)
    before = other.weight  # which stays alive
    return lambda: other(torch.ones(1)), lambda: setattr(other, "weight", nn.Parameter(before * 2))


@seen
def forward_of_one_instance(model: nn.Sequential) -> Any:
    model[0].forward = lambda x: x * factor  # type: ignore[method-assign]
    return lambda: model(torch.ones(1, 2)), halve


@seen
def global_in_a_hook(model: nn.Sequential) -> Any:
    model[0].register_forward_hook(lambda module, args, output: output * factor)
    return lambda: model(torch.ones(1, 2)), halve


class Scaled(nn.Module):
    """Reads its attribute by a name that no code has."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * float(getattr(self, "_".join(("", "scale"))))


@seen
def attribute_of_a_trained_module(model: nn.Sequential) -> Any:
    model.append(Scaled())
    return lambda: model(torch.ones(1, 2)), lambda: setattr(model[3], "_scale", 0.5)


@seen
def attribute_that_a_trained_module_loses(model: nn.Sequential) -> Any:
    model.append(Scaled())
    return lambda: model(torch.ones(1, 2)), lambda: delattr(model[3], "_scale")


@seen
def attribute_that_a_trained_module_gains(model: nn.Sequential) -> Any:
    model.append(Scaled())
    return lambda: model(torch.ones(1, 2)), lambda: setattr(model[3], "more", 0.5)


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@seen
def attribute_of_another_module(model: nn.Module) -> Any:
    other = Factor()
    return lambda: other(torch.ones(1)), lambda: setattr(other, "factor", 0.5)


@seen
def object_that_a_librarys_object_holds(model: nn.Module) -> Any:
    other, config = nn.Dropout(), Config()
    other.config = config
    return lambda: other(torch.ones(1)), lambda: setattr(config, "unheard_of", 0.5)


class OfALibrary(torch.utils.data.Dataset[int]):
    """Methods that it has from the library may read any attribute, by names that no code here has."""


@seen
def attribute_that_a_librarys_method_may_read(model: nn.Module) -> Any:
    held = OfALibrary()
    held.unheard_of = 1.0  # type: ignore[attr-defined]
    return lambda: held, lambda: setattr(held, "unheard_of", 0.5)


@seen
def frozen_parameter(model: nn.Sequential) -> Any:
    return lambda: model, lambda: model[0].weight.requires_grad_(False)


@seen
def memory_of_a_parameter(model: nn.Sequential) -> Any:
    return lambda: model, lambda: setattr(model[0].weight, "data", torch.zeros(2, 2))


@seen
def memory_of_a_buffer(model: nn.Sequential) -> Any:
    return lambda: model, lambda: setattr(model[1].running_mean, "data", torch.zeros(2))


@seen
def module_in_one_without(model: nn.Sequential) -> Any:
    return lambda: model, lambda: model[2].add_module("inside", nn.ReLU())


@seen
def last_parameter_that_comes(model: nn.Sequential) -> Any:
    return lambda: model, lambda: model[1].register_parameter("more", nn.Parameter(torch.ones(2)))


@seen
def last_parameter_that_goes(model: nn.Sequential) -> Any:
    return lambda: model, lambda: delattr(model[1], "bias")


@seen
def hook_of_a_gradient(model: nn.Sequential) -> Any:
    return lambda: model, lambda: model[0].weight.register_hook(lambda grad: None)


@seen
def hook_behind_a_gradient(model: nn.Sequential) -> Any:
    return lambda: model, lambda: model[0].weight.register_post_accumulate_grad_hook(lambda param: None)


@seen
def hook_that_is_removed(model: nn.Sequential) -> Any:
    return lambda: model, model[0].weight.register_post_accumulate_grad_hook(lambda param: None).remove


@seen
def hook_of_a_module_that_is_removed(model: nn.Sequential) -> Any:
    return lambda: model, model[0].register_forward_hook(lambda *args: None).remove


@seen
def hook_of_all_modules_that_is_removed(model: nn.Sequential) -> Any:
    return lambda: model, register_module_forward_hook(lambda *args: None).remove


# ---- Where there are several. ----


class Other:
    of_other = 1.0


class Both(Base, Other):
    """A class of two bases, whose objects have two attributes."""

    def __init__(self) -> None:
        self.one, self.two = [1.0], [1.0]


def of_several(name: str, make: Callable[[Any], tuple[Any, list[Callable[[], Any]]]]) -> None:
    """Each of the changes is seen by itself."""
    for number in range(2):

        def one(model: nn.Module, number: int = number) -> Any:
            function, changes = make(model)
            return function, changes[number]

        SEEN[f"{name}, {number}"] = one


def objects(model: nn.Module) -> Any:
    first, second = Both(), Both()
    return lambda: (first.one, second), [changed_item(each.one) for each in (first, second)]


def bases(model: nn.Module) -> Any:
    made = Both()
    changes = [
        lambda: setattr(Base, "of_base", Base.of_base + 1),
        lambda: setattr(Other, "of_other", Other.of_other + 1),
    ]
    return lambda: (made, made.of_base, made.of_other), changes


def attributes(model: nn.Module) -> Any:
    made = Both()
    return lambda: (made.one, made.two), [changed_item(made.one), changed_item(made.two)]


def items_of_a_tuple(model: nn.Module) -> Any:
    held = ([1.0], [2.0])
    return lambda: held, [changed_item(each) for each in held]


def attributes_of_a_module(model: nn.Sequential) -> Any:
    model[0].lists, model[0].more = [1.0], [2.0]  # type: ignore[assignment]
    return lambda: model, [changed_item(model[0].lists), changed_item(model[0].more)]  # type: ignore[arg-type]


def hooks(model: nn.Sequential) -> Any:
    held = [1.0], [2.0]
    for each in held:
        model[0].register_forward_hook(lambda module, args, output, each=each: output * each[0])
    return lambda: model(torch.ones(1, 2)), [changed_item(each) for each in held]


def tables_of_another_module(model: nn.Module) -> Any:
    other = nn.Sequential(nn.BatchNorm1d(2))
    changes = [lambda: setattr(other[0], "running_mean", torch.ones(2)), lambda: other.add_module("more", nn.ReLU())]
    return lambda: other(torch.ones(2, 2)), changes


class Slotted:
    __slots__ = ("one", "two")


def slots(model: nn.Module) -> Any:
    made = Slotted()
    made.one = made.two = 1.0
    return lambda: (made.one, made.two), [lambda: setattr(made, "one", 0.5), lambda: setattr(made, "two", 0.5)]


def items_of_a_dict(model: nn.Module) -> Any:
    held = {"one": [1.0], "two": [1.0]}
    return lambda: held, [changed_item(each) for each in held.values()]


_SEVERAL = (objects, bases, attributes, slots, items_of_a_tuple, items_of_a_dict, attributes_of_a_module, hooks)
for each in (*_SEVERAL, tables_of_another_module):
    of_several(each.__name__, each)


@pytest.fixture(autouse=True)
def _start() -> Iterator[None]:
    global factor
    factor = 1.0
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize("name", SEEN)
def test_a_change_is_seen(name: str) -> None:
    model = make_model()
    function, change = SEEN[name](model)
    state = look(function, model)
    assert (state.lost, state.change()) == (None, None)
    change()
    for _ in range(2):
        assert state.change() is not None
