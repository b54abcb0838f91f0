"""Random draws: whether there are any, and a mode that replaces each one by its mean."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...ddp.torch_internals import TorchDispatchMode
from ..simulation.state import ProcessState

__all__ = ["DrawnMeans", "random_state"]


_MEANS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "bernoulli": lambda given: given["self"],
    "bernoulli_": lambda given: given["p"],
    "normal": lambda given: given["mean"],
    "normal_": lambda given: given["mean"],
    "randn": lambda given: 0.0,
    "rand": lambda given: 0.5,
    "uniform_": lambda given: (given["from"] + given["to"]) / 2,
    "exponential_": lambda given: 1 / given["lambd"],
    "randint": lambda given: (given.get("low", 0) + given["high"]) // 2,
    "randperm": lambda given: torch.arange(given["n"]),
}
"""Operator, without ``_like`` -> the mean of its draws, from its arguments by name."""


class DrawnMeans(TorchDispatchMode):
    """Every draw of torch's generators gives its mean: dropout keeps everything, noise is nothing.

    So a whole batch and its parts, whose draws have other shapes, become comparable.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # The mean comes first: an operator in place writes over its arguments.
        mean_of = _MEANS.get(func.overloadpacket.__name__.removesuffix("_like"))
        if mean_of is None:
            return func(*args, **(kwargs or {}))
        schema = func._schema.arguments
        defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
        by_position = {each.name: value for each, value in zip(schema, args, strict=False)}
        mean = torch.as_tensor(mean_of({**defaults, **by_position}))
        result = func(*args, **(kwargs or {}))
        # What has no fractions gets the nearest number, and 1 for a half.
        return result.copy_(mean if result.is_floating_point() else (mean + 0.5).floor())


def random_state() -> tuple[Any, ...]:
    """The state of torch's, Python's and, where it is loaded, numpy's default generator, to compare."""
    state = ProcessState.capture()
    return state.torch_cpu.tolist(), state.python, state.numpy and str(state.numpy.state)
