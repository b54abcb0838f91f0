"""The kernels as operators of ``torch.ops.maingrad``: what a compiler puts into its graph in place of a Triton launch.

Eager code calls the functions of this folder directly, which costs less host time. Each operator has a fake
implementation with the shapes of its results. Tensors for each expert are a list: E tensors, or one packed tensor.
Legend: E experts, T rows, N output features, K input features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .experts import PerExpert
from .grouped.products import (
    group_offsets,
    grouped_bias_grad,
    grouped_linear,
    grouped_scale_grad,
    grouped_wgrad_accumulate,
)
from .permutation.permute import permute_rows, unpermute_rows

__all__ = [
    "define_operator",
    "group_offsets_op",
    "grouped_bias_grad_op",
    "grouped_linear_op",
    "grouped_scale_grad_op",
    "grouped_wgrad_op",
    "permute_rows_op",
    "unpermute_rows_op",
]

_library = torch.library.Library("maingrad", "FRAGMENT")


def define_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``maingrad::name(...)``.

    ``torch.library.custom_op`` takes twice the host time of a call: 36 us for 16 us on the CPU of an H200's host.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maingrad::{name}", fake, lib=_library)
    return getattr(torch.ops.maingrad, name).default


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

permute_rows_op = define_operator(
    "permute_rows(Tensor x, Tensor row_id_map) -> Tensor",
    permute_rows,
    lambda x, row_id_map: x.new_empty(row_id_map.numel(), x.shape[1]),
)
"""``permute_rows``: [T, D] -> [T k, D]. Differentiable."""

unpermute_rows_op = define_operator(
    "unpermute_rows(Tensor rows, Tensor row_id_map) -> Tensor",
    unpermute_rows,
    lambda rows, row_id_map: rows.new_empty(row_id_map.shape[0], rows.shape[1]),
)
"""``unpermute_rows``: [T k, D] -> [T, D]. Differentiable."""


def _keep_map(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return unpermute_rows_op(grad, *ctx.saved_tensors), None


def _unpermute_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return permute_rows_op(grad, *ctx.saved_tensors), None


torch.library.register_autograd("maingrad::permute_rows", _permute_grad, setup_context=_keep_map, lib=_library)
torch.library.register_autograd("maingrad::unpermute_rows", _unpermute_grad, setup_context=_keep_map, lib=_library)
