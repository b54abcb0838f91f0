"""What a graphed step reads on the host, wherever the program keeps it: a change between two calls is seen.

Each program multiplies its loss by a number that changes once, and must train as it does eagerly, bit for bit.
"""

import array
import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maingrad

STEPS, CHANGED, WIDTH, VOCAB = 8, 4, 4, 8
factor = 1.0


class Job:
    """A model, its optimizer, and an iteration of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, VOCAB)
        self.net = nn.Sequential(nn.Embedding(VOCAB, WIDTH), self.layer)
        self.model: Any = maingrad.parallelize(self.net, "zero1", units=())
        self.optimizer: Any = maingrad.make_optimizer(self.model, torch.optim.SGD, lr=2**-3)
        self.seen: Callable[[], Tensor] = lambda: torch.zeros(())

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def train(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


Program = Callable[[Job], tuple[Callable[[Tensor], Tensor], Callable[[], Any]]]
"""Returns the step, and what changes between two calls."""


def train(program: Program, graphed: bool) -> tuple[list[Tensor], Any]:
    global factor
    factor = 1.0
    job = Job()
    step, change = program(job)
    if graphed:
        step = maingrad.graphed(step, job.model, job.optimizer, record_on_cpu=True)
    draws, seen = torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        seen += [step(torch.randint(VOCAB, (2, 4), generator=draws)), job.seen().clone()]
        if number == CHANGED:
            change()
    return [*seen, *(param.detach().clone() for param in job.net.parameters())], step


def check(program: Program) -> Any:
    """Train both ways; returns the graphed step."""
    (eager, _), (graphed, step) = (train(program, on) for on in (False, True))
    assert [at for at, (a, b) in enumerate(zip(eager, graphed, strict=True)) if not torch.equal(a, b)] == []
    return step


def change_factor() -> None:
    global factor
    factor = 0.5


# ---- A global that is read in another function. ----


@torch.no_grad()
def shrink(net: nn.Module) -> None:
    for param in net.parameters():
        param.mul_(factor)


@contextlib.contextmanager
def scaled(loss: Tensor) -> Iterator[Tensor]:
    yield loss * factor


@functools.lru_cache
def remembered() -> float:
    return factor


@torch.compile(backend="eager")
def compiled(loss: Tensor) -> Tensor:
    return loss * factor


class Reversed(torch.autograd.Function):
    """Its backward reads the global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * -factor


class Config:
    """Reads the global and its own attribute without naming them in the step."""

    def __init__(self) -> None:
        self._base = factor

    @property
    def scale(self) -> float:
        return self._base

    @staticmethod
    def static() -> float:
        return factor

    @classmethod
    def of_class(cls) -> float:
        return factor

    def __rmul__(self, loss: Tensor) -> Tensor:
        return loss * self._base


def decorated_function(job: Job) -> Any:
    def step(tokens: Tensor) -> Tensor:
        loss = job.train(job.loss(tokens))
        shrink(job.net)
        return loss

    return step, change_factor


def context_manager(job: Job) -> Any:
    def step(tokens: Tensor) -> Tensor:
        with scaled(job.loss(tokens)) as loss:
            return job.train(loss)

    return step, change_factor


def cached_function(job: Job) -> Any:
    def change() -> None:
        change_factor()
        remembered.cache_clear()

    remembered.cache_clear()
    return lambda tokens: job.train(job.loss(tokens) * remembered()), change


def compiled_function(job: Job) -> Any:
    return lambda tokens: job.train(compiled(job.loss(tokens))), change_factor


def autograd_function(job: Job) -> Any:
    return lambda tokens: job.train(Reversed.apply(job.loss(tokens))), change_factor


def static_method(job: Job) -> Any:
    return lambda tokens: job.train(job.loss(tokens) * Config.static()), change_factor


def class_method(job: Job) -> Any:
    return lambda tokens: job.train(job.loss(tokens) * Config.of_class()), change_factor


def constructor(job: Job) -> Any:
    return lambda tokens: job.train(job.loss(tokens) * Config()._base), change_factor


def hook_of_a_module(job: Job) -> Any:
    job.layer.register_forward_hook(lambda module, args, output: output * factor)
    return lambda tokens: job.train(job.loss(tokens)), change_factor


def hook_of_a_gradient(job: Job) -> Any:
    job.layer.weight.register_hook(lambda grad: grad * factor)
    return lambda tokens: job.train(job.loss(tokens)), change_factor


def forward_of_an_instance(job: Job) -> Any:
    layer = job.layer
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * factor  # type: ignore[method-assign]
    return lambda tokens: job.train(job.loss(tokens)), change_factor


# ---- An object. ----


def of_property(job: Job) -> Any:
    config = Config()
    return lambda tokens: job.train(job.loss(tokens) * config.scale), lambda: setattr(config, "_base", 0.5)


def of_operator(job: Job) -> Any:
    config = Config()
    return lambda tokens: job.train(job.loss(tokens) * config), lambda: setattr(config, "_base", 0.5)


class Part:
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.owner.scale


def scaled_by(trainer: Any, loss: Tensor) -> Tensor:
    return loss * trainer.scale


class Trainer:
    """Its attribute is read by others' names."""

    def __init__(self, job: Job) -> None:
        self.job, self.scale, self.part = job, 1.0, Part(self)

    def by_helper(self, tokens: Tensor) -> Tensor:
        return self.job.train(scaled_by(self, self.job.loss(tokens)))

    def by_part(self, tokens: Tensor) -> Tensor:
        return self.job.train(self.part.scaled(self.job.loss(tokens)))


def own_object_in_a_helper(job: Job) -> Any:
    trainer = Trainer(job)
    return trainer.by_helper, lambda: setattr(trainer, "scale", 0.5)


def own_object_in_a_part(job: Job) -> Any:
    trainer = Trainer(job)
    return trainer.by_part, lambda: setattr(trainer, "scale", 0.5)


@dataclasses.dataclass
class Fields:
    scale: float = 1.0


def fields_as_a_dict(job: Job) -> Any:
    fields = Fields()

    def step(tokens: Tensor) -> Tensor:
        (scale,) = dataclasses.asdict(fields).values()
        return job.train(job.loss(tokens) * scale)

    return step, lambda: setattr(fields, "scale", 0.5)


def wrapper(job: Job) -> Any:
    job.model.loss_scale = 1.0
    return lambda tokens: job.train(job.loss(tokens) * job.model.loss_scale), lambda: setattr(
        job.model, "loss_scale", 0.5
    )


class AnyName:
    """Answers with a KeyError for names that it lacks."""

    def __init__(self) -> None:
        self._items = {"scale": 1.0}

    def __getattr__(self, name: str) -> float:
        return self._items[name]


def answers_any_name(job: Job) -> Any:
    fields = AnyName()
    return lambda tokens: job.train(job.loss(tokens) * fields.scale), lambda: fields._items.update(scale=0.5)


# ---- Functions and modules of Python. ----

settings: Any = types.ModuleType("settings_of_a_test")
settings.scale, settings.debug = 1.0, False
sys.modules[settings.__name__] = settings


def outer(loss: Tensor) -> Tensor:
    return inner(loss)


def inner(loss: Tensor) -> Tensor:
    return loss * settings.scale


def module_that_a_later_function_reads(job: Job) -> Any:
    settings.scale = 1.0
    return lambda tokens: job.train(outer(job.loss(-tokens if settings.debug else tokens))), lambda: setattr(
        settings, "scale", 0.5
    )


def import_in_the_step(job: Job) -> Any:
    settings.scale = 1.0

    def step(tokens: Tensor) -> Tensor:
        from settings_of_a_test import scale

        return job.train(job.loss(tokens) * scale)

    return step, lambda: setattr(settings, "scale", 0.5)


def attribute_of_a_function(job: Job) -> Any:
    def step(tokens: Tensor) -> Tensor:
        return job.train(job.loss(tokens) * step.scale)  # type: ignore[attr-defined]

    step.scale = 1.0  # type: ignore[attr-defined]
    return step, lambda: setattr(step, "scale", 0.5)


def default_that_is_replaced(job: Job) -> Any:
    def step(tokens: Tensor, scale: float = 1.0) -> Tensor:
        return job.train(job.loss(tokens) * scale)

    return step, lambda: setattr(step, "__defaults__", (0.5,))


def environment(job: Job) -> Any:
    os.environ["SCALE_OF_A_TEST"] = "1"
    return lambda tokens: job.train(job.loss(tokens) * float(os.environ["SCALE_OF_A_TEST"])), lambda: os.environ.update(
        SCALE_OF_A_TEST="0.5"
    )


def context_variable(job: Job) -> Any:
    scale = contextvars.ContextVar("scale", default=1.0)
    return lambda tokens: job.train(job.loss(tokens) * scale.get()), lambda: scale.set(0.5)


# ---- Containers. ----


def keys_of_a_dict(job: Job) -> Any:
    weights = {"plain": 1.0}

    def step(tokens: Tensor) -> Tensor:
        loss = job.loss(tokens)
        losses = {"plain": loss, "square": loss.square()}
        (total,) = (losses[name] * weight for name, weight in weights.items())
        return job.train(total)

    return step, lambda: (weights.clear(), weights.update(square=1.0))


def set_of_objects(job: Job) -> Any:
    fields = Config()
    fields_of = {fields}
    return lambda tokens: job.train(job.loss(tokens) * sum(each._base for each in fields_of)), lambda: setattr(
        fields, "_base", 0.5
    )


CONTAINERS: dict[str, Callable[[], tuple[Any, Callable[[Any], float], Callable[[], Any]]]] = {}


def container(make: Any) -> Any:
    CONTAINERS[make.__name__] = make
    return make


@container
def view() -> Any:
    items = {"scale": 1.0}
    return types.MappingProxyType(items), lambda held: held["scale"], lambda: items.update(scale=0.5)


@container
def values() -> Any:
    items = {"scale": 1.0}
    return items.values(), lambda held: sum(held), lambda: items.update(scale=0.5)


@container
def method_of_a_dict() -> Any:
    items = {"scale": 1.0}
    return items.get, lambda held: held("scale"), lambda: items.update(scale=0.5)


@container
def numbers() -> Any:
    held = array.array("d", [1.0])
    return held, lambda held: held[0], lambda: held.__setitem__(0, 0.5)


@container
def bytes_that_change() -> Any:
    held = bytearray([1])
    return held, lambda held: held[0], lambda: held.__setitem__(0, 2)


@container
def array_that_is_replaced() -> Any:
    held = types.SimpleNamespace(weights=np.ones(3))
    return held, lambda held: float(held.weights[0]), lambda: setattr(held, "weights", np.full(3, 0.5))


@container
def list_in_a_tuple() -> Any:
    held = ("scale", [1.0])
    return held, lambda held: held[1][0], lambda: held[1].__setitem__(0, 0.5)


@container
def set_of_numbers() -> Any:
    held = {1.0}
    return held, lambda held: sum(held), lambda: (held.clear(), held.add(0.5))


class Slotted:
    __slots__ = ("scale",)


@container
def slot() -> Any:
    held = Slotted()
    held.scale = 1.0
    return held, lambda held: held.scale, lambda: setattr(held, "scale", 0.5)


def program_of(make: Callable[[], Any]) -> Program:
    def program(job: Job) -> Any:
        held, read, change = make()
        return lambda tokens: job.train(job.loss(tokens) * read(held)), change

    return program


# ---- Another module. ----


class Scale(nn.Module):
    """An untrained module of the program."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.inside = nn.Linear(1, 1, bias=False).requires_grad_(False)
        nn.init.constant_(self.inside.weight, value)

    def forward(self, loss: Tensor) -> Tensor:
        return self.inside(loss.view(1, 1)).view(())


class Criterion(nn.CrossEntropyLoss):
    """The library's forward reads what the program sets."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().forward(logits.flatten(0, 1), targets.flatten())


OTHER_MODULES: dict[str, Callable[[Scale], Any]] = {
    "child": lambda other: setattr(other, "inside", Scale(0.5).inside),
    "data": lambda other: setattr(other.inside.weight, "data", torch.full((1, 1), 0.5)),
    "hook": lambda other: other.register_forward_hook(lambda module, args, output: output * 0.5),
}


def of_other_module(change: Callable[[Scale], Any]) -> Program:
    def program(job: Job) -> Any:
        other = Scale()
        return lambda tokens: job.train(other(job.loss(tokens))), lambda: change(other)

    return program


def criterion(job: Job) -> Any:
    loss = Criterion()
    return lambda tokens: job.train(loss(job.model(tokens), tokens)), lambda: setattr(loss, "label_smoothing", 0.5)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(decorated_function, context_manager, cached_function, compiled_function, autograd_function, static_method),
        *(class_method, constructor, hook_of_a_module, hook_of_a_gradient, forward_of_an_instance, of_property),
        *(of_operator, own_object_in_a_helper, own_object_in_a_part, wrapper, answers_any_name, fields_as_a_dict),
        *(module_that_a_later_function_reads, import_in_the_step, attribute_of_a_function, default_that_is_replaced),
        *(environment, context_variable, keys_of_a_dict, set_of_objects, criterion),
    )
}
PROGRAMS |= {name: program_of(make) for name, make in CONTAINERS.items()}
PROGRAMS |= {f"{name} of another module": of_other_module(change) for name, change in OTHER_MODULES.items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(len(PROGRAMS))
def test_a_number_that_changes_is_seen_wherever_it_is(name: str) -> None:
    step = check(PROGRAMS[name])
    assert (step.why_eager, step.num_graphs) == (None, 2)


# ---- What a step leaves on the host, in places that its own code does not name. ----


def counting_hook(job: Job) -> Any:
    counts = {"calls": 0}
    job.layer.register_forward_hook(lambda module, args, output: counts.update(calls=counts["calls"] + 1))
    job.seen = lambda: torch.tensor(counts["calls"])
    return lambda tokens: job.train(job.loss(tokens)), bool


def hook_that_comes_later(job: Job) -> Any:
    counts = {"calls": 0}
    hook = lambda module, args, output: counts.update(calls=counts["calls"] + 1)  # noqa: E731
    job.seen = lambda: torch.tensor(counts["calls"])
    return lambda tokens: job.train(job.loss(tokens)), lambda: job.layer.register_forward_hook(hook)


def bound_append(job: Job) -> Any:
    losses: list[Tensor] = []
    add = losses.append
    job.seen = lambda: torch.tensor(len(losses))

    def step(tokens: Tensor) -> Tensor:
        loss = job.train(job.loss(tokens))
        add(loss)
        return loss

    return step, bool


def attribute_of_the_wrapper(job: Job) -> Any:
    job.model.last = torch.zeros(())
    job.seen = lambda: job.model.last

    def step(tokens: Tensor) -> Tensor:
        job.model.last = job.train(job.loss(tokens))
        return torch.zeros(())

    return step, bool


@pytest.mark.parametrize("program", [counting_hook, hook_that_comes_later, bound_append, attribute_of_the_wrapper])
@pytest.mark.sampled(4)
def test_what_a_step_leaves_is_left_by_every_call(program: Program) -> None:
    assert check(program).num_graphs == (1 if program is hook_that_comes_later else 0)


@pytest.mark.in_turn
def test_more_values_than_can_be_compared() -> None:
    def program(job: Job) -> Any:
        data, scale = [[[at] for at in range(15)] for _ in range(4000)], [[[1.0]]]
        return lambda tokens: job.train(job.loss(tokens) * scale[0][0][0] * len(data)), lambda: scale[0][0].__setitem__(
            0, 0.5
        )

    assert "too many to compare" in check(program).why_eager
