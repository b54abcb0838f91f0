"""The arguments that a layer was captured with, and what each call must have in common with them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ddp.torch_internals import tree_flatten, tree_unflatten
from .captured_order import Place, ReplayError

__all__ = ["Signature", "TensorKind"]


class TensorKind(NamedTuple):
    """What a tensor argument must be. Nothing is broadcast or cast."""

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
    """Arguments of one layer and microbatch: tensors, whose content may change, and everything else, which may not."""

    def __init__(self, place: Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._place = place
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self._are_tensors = [isinstance(leaf, Tensor) for leaf in self._leaves]
        self.kinds = [TensorKind.of(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._is_plain = all(self._are_tensors) and not kwargs and len(self._leaves) == len(args)

    @staticmethod
    def leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Everything in the arguments, flat."""
        found: list[Any] = tree_flatten((tuple(args), dict(kwargs)))[0]
        return found

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
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self._spec:
            raise ReplayError(f"{self._place}: the arguments have another structure than sample_args and sample_kwargs")
        for leaf, captured, is_tensor in zip(leaves, self._leaves, self._are_tensors, strict=True):
            if not is_tensor and leaf is not captured and leaf != captured:
                raise ReplayError(f"{self._place}: the argument {captured!r} is part of the graph; got {leaf!r}")
        return [leaf for leaf, is_tensor in zip(leaves, self._are_tensors, strict=True) if is_tensor]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with these tensors."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._are_tensors, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs
