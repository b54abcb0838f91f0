"""The dtypes in which a unit computes and reduces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ddp.torch_internals import tree_map

__all__ = ["MixedPrecisionPolicy", "cast_floating", "cast_inputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. Field names are those of PyTorch's FSDP2 if it has the field.

    Sharded parameters and the optimizer's state keep the module's dtype: with ``param_dtype=torch.bfloat16``, fp32
    parameters are fp32 masters, which are gathered and used in bf16.

    Raises ``ValueError`` for a dtype that is not floating-point, and for a ``reduce_dtype`` wider than ``grad_dtype``.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of whole parameters and of their gather; None: the module's dtype."""
    grad_dtype: torch.dtype = torch.float32
    """The dtype of ``main_grad``, and of sums over microbatches and ranks, for parameters computed in half precision.
    Gradients of wider parameters have the parameter's dtype."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which the reduction sends; sums are in ``grad_dtype`` all the same. None: ``grad_dtype``."""
    output_dtype: torch.dtype | None = None
    """Forward's floating-point outputs are cast to it; None: no cast."""
    cast_forward_inputs: bool = True
    """Forward's floating-point inputs are cast to ``param_dtype``."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}")
        if self.reduce_dtype is not None and self.reduce_dtype.itemsize > self.grad_dtype.itemsize:
            raise ValueError(
                f"MixedPrecisionPolicy.reduce_dtype {self.reduce_dtype} is wider than grad_dtype {self.grad_dtype}: "
                f"gradients have no more bits than grad_dtype; widen that"
            )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """``reduce_dtype``; None if it is ``grad_dtype``."""
        return None if self.reduce_dtype is self.grad_dtype else self.reduce_dtype


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """``cast_floating`` of a forward's arguments. Tensors and numbers skip the walk over a tree, for speed."""
    cast = tuple(arg if isinstance(arg, _PLAIN) else cast_floating(arg, dtype) for arg in args)
    return cast, cast_floating(kwargs, dtype) if kwargs else kwargs


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` (nested tuples, lists and dicts) with every floating-point tensor cast to ``dtype``."""
    if isinstance(tree, Tensor):
        return _cast(tree, dtype)
    return tree_map(lambda leaf: _cast(leaf, dtype), tree)


_PLAIN = (int, float, str, type(None))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not dtype else leaf
