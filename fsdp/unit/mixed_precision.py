"""In which dtypes a unit computes and reduces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ddp.torch_internals import tree_map

__all__ = ["MixedPrecisionPolicy", "cast_floating", "cast_inputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit, with the field names of PyTorch's FSDP2 where it has the field.

    Sharded parameters and the optimizer's state keep the dtype that the module had when it was wrapped: fp32 parameters
    with ``param_dtype=torch.bfloat16`` are fp32 masters that are gathered and used in bf16.
    """

    param_dtype: torch.dtype | None = None
    """Of unsharded parameters and of the gather; None: the module's own."""
    grad_dtype: torch.dtype = torch.float32
    """Of ``main_grad`` and of what is summed over microbatches, under parameters in half precision; wider ones are
    summed in their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """On the wire of the reduction, which sums in ``grad_dtype`` all the same; None: ``grad_dtype``."""
    output_dtype: torch.dtype | None = None
    """What floating-point outputs of forward are cast to; None: they stay."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of forward to ``param_dtype``."""

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
        """Of the reduction, where it is not the accumulators' own."""
        return None if self.reduce_dtype is self.grad_dtype else self.reduce_dtype


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """``cast_floating`` of a forward's arguments; tensors and plain values alone are not taken for trees."""
    cast = tuple(arg if isinstance(arg, _PLAIN) else cast_floating(arg, dtype) for arg in args)
    return cast, cast_floating(kwargs, dtype) if kwargs else kwargs


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of nested tuples, lists and dicts in ``dtype``."""
    if isinstance(tree, Tensor):
        return _cast(tree, dtype)
    return tree_map(lambda leaf: _cast(leaf, dtype), tree)


_PLAIN = (int, float, str, type(None))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not dtype else leaf
