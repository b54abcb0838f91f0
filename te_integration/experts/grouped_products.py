"""The products of a grouped linear layer; the derivatives of each are the others.

Legend: E experts, T rows, N output features, K input features; W and H [E, N, K], x and g [T, K], y and dy [T, N].

    linear               y[t] = x[t] W_e^T    dx = dy W_e       dW = wgrad(dy, x)
    linear, transposed   x[t] = y[t] W_e      dy = g W_e^T      dW = wgrad(y, g)
    wgrad                W_e = y_e^T x_e      dy = x H_e^T      dx = y H_e

Only second derivatives need these autograd functions: a first backward calls the kernels directly.
"""

from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.grouped_wgrad import grouped_gradients
from ...kernels import grouped_linear

__all__ = [
    "differentiable_bias_grad",
    "differentiable_linear",
    "differentiable_scale_grad",
    "differentiable_wgrad",
]


def differentiable_linear(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """``y[t] = x[t] W_e^T``, or ``x[t] W_e`` if ``transposed``, with derivatives of any order."""
    result: Tensor = _Linear.apply(x, weight, offsets, transposed)
    return result


def differentiable_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """``dW_e = dy_e^T x_e``, with derivatives of any order."""
    result: Tensor = _Wgrad.apply(dy, x, offsets)
    return result


def differentiable_bias_grad(dy: Tensor, scale: Tensor | None, offsets: Tensor) -> Tensor:
    """``db_e = sum of s[t] dy[t] over the rows of expert e``, [E, N], with derivatives of any order."""
    members = _members(dy, offsets)
    terms = _without_padding(dy, offsets)
    if scale is not None:
        terms = terms * _without_padding(scale[:, None], offsets).to(dy.dtype)
    return members @ terms


def differentiable_scale_grad(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """``ds[t] = dy[t] . b_e``, [T], with derivatives of any order: bias [E, N]."""
    return (_without_padding(dy, offsets) * (_members(dy, offsets).t() @ bias)).sum(1)


def _members(dy: Tensor, offsets: Tensor) -> Tensor:
    """[E, T]: 1 where row t belongs to expert e. A product with it sums in a fixed order; ``index_add`` does not."""
    row = torch.arange(dy.shape[0], device=dy.device)
    return ((row >= offsets[:-1, None]) & (row < offsets[1:, None])).to(dy.dtype)


def _without_padding(rows: Tensor, offsets: Tensor) -> Tensor:
    """Set pad rows, which may hold any value, to zero."""
    filled = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return torch.where(filled[:, None], rows, 0.0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.transposed = transposed
        return grouped_linear(x, weight, offsets, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, offsets = ctx.saved_tensors
        dy = grads[0]
        dx = differentiable_linear(dy, weight, offsets, not ctx.transposed)
        left, right = (x, dy) if ctx.transposed else (dy, x)
        return dx, differentiable_wgrad(left, right, offsets), None, None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(y, x, offsets)
        (result,) = grouped_gradients(y, x, offsets, [True], y.dtype, packed=True)
        assert result is not None, "it is wanted"
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y, x, offsets = ctx.saved_tensors
        dy = differentiable_linear(x, grads[0], offsets)
        return dy, differentiable_linear(y, grads[0], offsets, True), None
