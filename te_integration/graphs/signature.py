"""The arguments that a layer was captured with, and what each call must have in common with them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...ddp.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from .captured_order import ReplayError

__all__ = ["Sample", "Signature", "Structure", "tensors_in"]

Sample: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments, and keyword arguments."""

_A_TENSOR = object()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Structure:
    """Nested tuples, lists and dicts without the tensors in them."""

    def __init__(self, value: Any) -> None:
        leaves, self.spec = tree_flatten(value)
        self.leaves = [_A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors in it."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _A_TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class TensorKind(NamedTuple):
    """A tensor argument must be of this kind. Nothing is broadcast or cast."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        """The kind of ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    def __str__(self) -> str:
        grad = "requires a gradient" if self.requires_grad else "requires no gradient"
        return f"{tuple(self.shape)}, {self.dtype} on {self.device}, which {grad}"


class Signature:
    """Arguments of one layer and microbatch: tensors, whose content may change, and everything else, which may not.

    place  the layer and microbatch, for errors
    """

    def __init__(self, place: str, sample: Sample) -> None:
        self._place = place
        self._structure = Structure(sample)
        self.kinds = [TensorKind.of(tensor) for tensor in tensors_in(sample)]
        self._is_plain = all(isinstance(arg, Tensor) for arg in sample[0]) and not sample[1]

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """The tensors of a call, checked. Raises ``ReplayError`` that names the argument."""
        if self._is_plain and not kwargs and len(args) == len(self.kinds):
            found: Sequence[Any] = args
        else:
            found = self._among(args, kwargs)
        for number, (tensor, kind) in enumerate(zip(found, self.kinds, strict=True)):
            if not isinstance(tensor, Tensor) or TensorKind.of(tensor) != kind:
                got = TensorKind.of(tensor) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise ReplayError(
                    f"{self._place}: tensor {number} of the arguments must be {kind}, as in sample_args; got {got}"
                )
        return found

    def _among(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._structure.spec:
            raise ReplayError(f"{self._place}: the arguments have another structure than sample_args and sample_kwargs")
        found = []
        for leaf, captured in zip(leaves, self._structure.leaves, strict=True):
            if captured is _A_TENSOR:
                found.append(leaf)
            elif leaf is not captured and leaf != captured:
                raise ReplayError(f"{self._place}: the argument {captured!r} is part of the graph; got {leaf!r}")
        return found

    def arguments(self, tensors: Sequence[Tensor]) -> Sample:
        """The arguments of a call with these tensors."""
        sample: Sample = self._structure.fill(tensors)
        return sample
