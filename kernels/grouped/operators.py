"""The grouped products as operators of compiled graphs.

Tensors for each expert are a list: E tensors, or one packed tensor.
Legend: E experts, T rows, N output features, K input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..experts import PerExpert
from ..operators import define_operator
from .products import (
    group_offsets,
    grouped_bias_grad,
    grouped_linear,
    grouped_scale_grad,
    grouped_wgrad_accumulate,
)

__all__ = ["group_offsets_op", "grouped_bias_grad_op", "grouped_linear_op", "grouped_scale_grad_op", "grouped_wgrad_op"]


def _each(tensors: Sequence[Tensor], dims: int) -> PerExpert:
    """One packed tensor, which has a dim more than an expert's ``dims``; or the experts' tensors."""
    return tensors[0] if tensors[0].dim() > dims else tensors


def _linear(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Sequence[Tensor],
    bias_scale: Tensor | None,
    transposed: bool,
) -> Tensor:
    biases = _each(bias, 1) if bias else None
    return grouped_linear(x, _each(weights, 2), offsets, bias=biases, bias_scale=bias_scale, transposed=transposed)


def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    gradients = dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype)
    grouped_wgrad_accumulate(dy, x, gradients, offsets, overwrite=True)
    return gradients


group_offsets_op = define_operator(
    "group_offsets(Tensor splits) -> Tensor",
    group_offsets,
    lambda splits: splits.new_empty(splits.shape[0] + 1, dtype=torch.int64),
)
"""``group_offsets``: [E] -> [E + 1]."""

grouped_linear_op = define_operator(
    "grouped_linear(Tensor x, Tensor[] weights, Tensor offsets, Tensor[] bias, Tensor? bias_scale, bool transposed) "
    "-> Tensor",
    _linear,
    lambda x, weights, offsets, bias, bias_scale, transposed: x.new_empty(
        x.shape[0], weights[0].shape[-1 if transposed else -2]
    ),
)
"""``grouped_linear``, and ``grouped_dgrad`` by ``transposed``: x [T, K] -> [T, N]; an empty list of biases: none."""

grouped_wgrad_op = define_operator(
    "grouped_wgrad(Tensor dy, Tensor x, Tensor offsets, ScalarType dtype) -> Tensor",
    _wgrad,
    lambda dy, x, offsets, dtype: dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype),
)
"""Weight gradients as a new tensor: dy [T, N], x [T, K] -> [E, N, K] of ``dtype``, fp32 or that of ``dy``."""

grouped_bias_grad_op = define_operator(
    "grouped_bias_grad(Tensor dy, Tensor offsets, Tensor? scale, ScalarType dtype) -> Tensor",
    lambda dy, offsets, scale, dtype: grouped_bias_grad(dy, offsets, scale=scale, dtype=dtype),
    lambda dy, offsets, scale, dtype: dy.new_empty(offsets.shape[0] - 1, dy.shape[1], dtype=dtype),
)
"""``grouped_bias_grad``: dy [T, N] -> [E, N]."""

grouped_scale_grad_op = define_operator(
    "grouped_scale_grad(Tensor dy, Tensor[] bias, Tensor offsets) -> Tensor",
    lambda dy, bias, offsets: grouped_scale_grad(dy, _each(bias, 1), offsets),
    lambda dy, bias, offsets: dy.new_empty(dy.shape[0], dtype=torch.promote_types(dy.dtype, torch.float32)),
)
"""``grouped_scale_grad``: dy [T, N] -> [T]."""
