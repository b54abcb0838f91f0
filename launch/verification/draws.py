"""Random draws: which modules make them, and a mode that replaces each one by its mean."""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.torch_internals import TorchDispatchMode
from .modules import RunningModules

__all__ = ["DrawnMeans", "modules_that_draw", "random_state"]


class DrawnMeans(TorchDispatchMode):
    """Every draw of torch's generators gives its mean: dropout keeps everything, noise is nothing.

    So a whole batch and its parts, whose draws have other shapes, become comparable.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        fill = _FILLS.get(func.overloadpacket.__name__)
        if fill is not None:
            fill(result, args, kwargs or {})
        return result


def random_state() -> tuple[Any, ...]:
    """The state of torch's, Python's and, where it is loaded, numpy's default generator, to compare."""
    numpy_random: Any = sys.modules.get("numpy.random")
    of_numpy = () if numpy_random is None else tuple(map(str, numpy_random.get_state()))
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), of_numpy


def modules_that_draw(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Names of the innermost modules whose code moves a default generator in ``forward``; '' is the program itself."""
    found: dict[str, None] = {}
    last = random_state()
    running: RunningModules

    def look() -> None:
        nonlocal last
        now = random_state()
        if now != last:
            found[running.innermost] = None
            last = now

    running = RunningModules(model, before_change=look)
    with running:
        last = random_state()
        forward()
        look()
    return list(found)


# torch leaves arguments out that are at their default. A name that ends with _ has the result as first argument.


def _bernoulli(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``bernoulli(input)`` has the probabilities as input."""
    _write(result, kwargs.get("p", args[1] if len(args) > 1 else args[0]))


def _bernoulli_in_place(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _write(result, kwargs.get("p", args[1] if len(args) > 1 else 0.5))


def _write(result: Tensor, p: Tensor | float) -> None:
    """The probability; where the result has no fractions, whether it is more than a half."""
    mean = torch.as_tensor(p)
    result.copy_(mean if result.is_floating_point() else mean >= 0.5)


def _normal(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    result.copy_(torch.as_tensor(kwargs.get("mean", args[0] if args else 0.0)))


def _normal_in_place(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    result.fill_(kwargs.get("mean", args[1] if len(args) > 1 else 0.0))


def _uniform(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    start = kwargs.get("from", args[1] if len(args) > 1 else 0.0)
    end = kwargs.get("to", args[2] if len(args) > 2 else 1.0)
    result.fill_((start + end) / 2)


def _exponential(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    result.fill_(1 / kwargs.get("lambd", args[1] if len(args) > 1 else 1.0))


def _randint(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    bounds = [each for each in args if isinstance(each, int)]  # [high] or [low, high]; a size is a list
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    result.fill_((low + high) // 2)


def _randperm(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    result.copy_(torch.arange(len(result)))


_FILLS: Mapping[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "normal": _normal,
    "normal_": _normal_in_place,
    "randn": lambda result, args, kwargs: result.zero_(),
    "randn_like": lambda result, args, kwargs: result.zero_(),
    "uniform_": _uniform,
    "rand": lambda result, args, kwargs: result.fill_(0.5),
    "rand_like": lambda result, args, kwargs: result.fill_(0.5),
    "exponential_": _exponential,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
}
"""Operator -> writes the mean of the draw into its result."""
