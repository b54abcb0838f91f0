"""The three products of a linear layer, of tensors: the output, the input's gradient and the weight's.

Eager and compiled layers share this algebra. Legend: T rows, K input features, N output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ...ddp.torch_internals import are_transforms_active
from ...kernels.wgrad import wgrad_accumulate

__all__ = [
    "DenseWgrad",
    "cast",
    "dtype_of_products",
    "in_transform",
    "input_grad",
    "linear_product",
    "refuse_in_transform",
    "rows_of",
]


# ``to`` and ``reshape`` cost host time even if they change nothing, and a forward and backward have seven of them. On a
# CPU, skipping these calls saves a tiny layer (64 x 64, 16 rows) 9 % of its forward and backward.
def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def rows_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def dtype_of_products(input: Tensor) -> torch.dtype:
    """The dtype that a product of ``input`` is computed in: autocast's under autocast, but for fp64, else its own."""
    dtype, device_type = input.dtype, input.device.type
    if torch.is_autocast_enabled(device_type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return dtype


def linear_product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, *, transposed: bool) -> Tensor:
    """``x W^T + b`` in the dtype of x, to which autocast has weights and bias cast: see ``ProductUse``."""
    weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
    if weight.dtype is not x.dtype and torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.t() if transposed else weight, bias)


def input_grad(dy: Tensor, weights: Sequence[Tensor], *, transposed: bool) -> Tensor:
    """``dy W`` [..., K] in the dtype of dy [..., N]."""
    weight = cast(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), dy.dtype)
    return dy @ (weight.t() if transposed else weight)


class DenseWgrad:
    """``dW = dy^T x``; of several weights, which are slices of one along N, each takes its columns of ``dy``."""

    rows_apart = False

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.features = [weight.shape[0] for weight in weights]

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """See ``WgradProduct``: slices may get other sizes, when heads are pruned."""
        return len(weights) == 1 or [weight.shape[0] for weight in weights] == self.features

    def accumulate(self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], dy: Any, x: Any) -> None:
        """See ``WgradProduct``: one GEMM for each weight."""
        for part, main_grad, over in zip(self.parts(dy), main_grads, overwrite, strict=True):
            if main_grad is not None:
                self.add(part, x, main_grad, overwrite=over)

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, dy: Any, x: Any) -> list[Tensor | None]:
        """See ``WgradProduct``."""
        parts = zip(self.parts(dy), wanted, strict=True)
        return [self.multiply(part, x, dtype) if want else None for part, want in parts]

    def parts(self, dy: Any) -> Sequence[Any]:
        """The columns of ``dy`` for each weight."""
        return (dy,) if len(self.features) == 1 else dy.split(self.features, dim=1)

    def add(self, dy: Any, x: Any, main_grad: Tensor, *, overwrite: bool) -> None:
        """``main_grad (+)= dy^T x`` for the columns of one weight."""
        wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)

    def multiply(self, dy: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """``dy^T x`` in ``dtype`` for the columns of one weight."""
        product: Tensor = dy.t() @ x
        return product.to(dtype)


def in_transform() -> bool:
    """Whether a transform or forward-mode AD is active, for any tensor."""
    return are_transforms_active() or forward_ad._current_level >= 0


def refuse_in_transform(owner: str) -> None:
    """Raise ``RuntimeError`` if a transform is active: ``owner`` implements backward only."""
    if in_transform():
        raise RuntimeError(
            f"{owner} has no rules for torch.func's transforms (grad, vmap, jvp, ...), nor for forward-mode "
            f"derivatives; use torch.autograd.grad and loops here, or a Linear for each expert, which has them"
        )
