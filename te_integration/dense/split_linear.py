"""One linear layer whose weight may be several parameters, such as query, key and value."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .linear_module import LinearModule, reset_linear

__all__ = ["ParametersSplit", "SplitLinear"]

ParametersSplit: TypeAlias = Sequence[str] | Mapping[str, int]


class SplitLinear(LinearModule):
    """Mixin of modules with one product. The parameters are ``weight`` and ``bias``, or slices of both along N."""

    bias_names: tuple[str, ...] = ("bias",)
    weight: Tensor
    bias: Any  # Tensor | None, for which nn.Linear says Tensor

    def split_parameters(self, parameters_split: ParametersSplit | None) -> None:
        """Replace the initialised weight and bias by slices, if ``parameters_split`` is not None."""
        if parameters_split is None:
            return
        sizes = _split_sizes(parameters_split, self.weight.shape[0])
        self.weight_names = tuple(f"{name}_weight" for name in sizes)
        self.bias_names = tuple(f"{name}_bias" for name in sizes)
        for whole, names in ((self.weight, self.weight_names), (self.bias, self.bias_names)):
            slices = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(names, slices, strict=True):
                parameter = None if part is None else nn.Parameter(part.clone())
                self.register_parameter(name, parameter)  # type: ignore[attr-defined]  # nn.Module's
        del self.weight, self.bias

    def reset_parameters(self) -> None:
        """Initialise the weights and biases again, for example after ``to_empty``."""
        for weight_name, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            reset_linear(getattr(self, weight_name), getattr(self, bias_name), self.init_method)

    def linear(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., K] -> ``x W^T + b`` [..., N], and b. With ``return_bias``, b is not added."""
        if self.weight_names == ("weight",):
            weights: tuple[Tensor, ...] = (self.weight,)
            bias: Tensor | None = self.bias
        else:
            weights = tuple(getattr(self, name) for name in self.weight_names)
            parts = [getattr(self, name) for name in self.bias_names]
            bias = None if parts[0] is None else torch.cat(parts)
        return self.multiply(input, weights, None if self.return_bias else bias, self.queue_now()), bias

    def extra_repr(self) -> str:
        """The sizes, and what happens to the weight gradient."""
        return f"{super().extra_repr()}, bias={getattr(self, self.bias_names[0]) is not None}"


def _split_sizes(parameters_split: ParametersSplit, out_features: int) -> dict[str, int]:
    """Parameter name without its trailing underscores -> rows."""
    if isinstance(parameters_split, str) or not parameters_split:
        raise ValueError(f"parameters_split must name one or more slices, got {parameters_split!r}")
    if isinstance(parameters_split, Mapping):
        sizes = dict(parameters_split)
    else:
        if out_features % len(parameters_split):
            raise ValueError(
                f"parameters_split: {out_features} output features do not divide into {len(parameters_split)} slices"
            )
        sizes = dict.fromkeys(parameters_split, out_features // len(parameters_split))
    stripped = {name.rstrip("_"): size for name, size in sizes.items()}
    if len(stripped) != len(parameters_split) or "" in stripped:
        raise ValueError(f"parameters_split must name each slice differently, got {list(parameters_split)}")
    if sum(stripped.values()) != out_features or min(stripped.values()) < 1:
        raise ValueError(f"parameters_split: sizes {stripped} do not add up to {out_features} output features")
    return stripped
