"""The three products of a grouped linear layer; the derivatives of each are the other two.

Legend: E experts, T rows, N output features, K input features; W and H [E, N, K], x and g [T, K], y and dy [T, N].

    linear  y[t] = x[t] W_e^T    dx = dgrad(dy, W)     dW = wgrad(dy, x)
    dgrad   x[t] = y[t] W_e      dy = linear(g, W)     dW = wgrad(y, g)
    wgrad   W_e = y_e^T x_e      dy = linear(x, H)     dx = dgrad(y, H)

Only second derivatives need these autograd functions: a first backward calls the kernels directly.
"""

from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.grouped_wgrad import grouped_gradients
from ...kernels import grouped_dgrad, grouped_linear

__all__ = [
    "differentiable_bias_grad",
    "differentiable_dgrad",
    "differentiable_linear",
    "differentiable_scale_grad",
    "differentiable_wgrad",
]


def differentiable_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``y[t] = x[t] W_e^T``, with derivatives of any order."""
    result: Tensor = _Linear.apply(x, weight, offsets)
    return result


def differentiable_dgrad(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``dx[t] = dy[t] W_e``, with derivatives of any order."""
    result: Tensor = _Dgrad.apply(dy, weight, offsets)
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return grouped_linear(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, offsets = ctx.saved_tensors
        return differentiable_dgrad(grads[0], weight, offsets), differentiable_wgrad(grads[0], x, offsets), None


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight, offsets)
        return grouped_dgrad(y, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weight, offsets = ctx.saved_tensors
        dy = _Linear.apply(grads[0], weight, offsets)
        return dy, differentiable_wgrad(y, grads[0], offsets), None


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
        dy = _Linear.apply(x, grads[0], offsets)
        return dy, differentiable_dgrad(y, grads[0], offsets), None
