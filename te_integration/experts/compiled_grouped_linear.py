"""``compiled_grouped_linear``: ``fused_grouped_linear`` in a form that ``torch.compile`` takes into its graph whole.

Each kernel is an operator in the graph. The weight gradients of all experts are one ``wgrad`` operator.
Legend: E experts, T rows, K input features, N output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.grouped.operators import (
    grouped_bias_grad_op,
    grouped_linear_op,
    grouped_scale_grad_op,
    grouped_wgrad_op,
)
from ..dense.compiled_wgrad import wgrad
from ..dense.products import cast, dtype_of_products
from .fused_grouped_linear import parts_of

__all__ = ["compiled_grouped_linear"]


def compiled_grouped_linear(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets: Tensor,
    key: Tensor | None,
    product: int,
    *,
    bias_scale: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e``, inside a graph; ``fused_grouped_linear`` has the shapes and dtypes.

    weights, biases  E tensors each, or one packed tensor; no biases: an empty sequence
    key              of the module, ``WgradHandle.key``, by which ``WgradHandle.deliver`` writes the weight gradients;
                     None: autograd delivers them
    product          index of the product in the module
    transposed       see ``ProductUse``
    """
    rows = cast(rows, dtype_of_products(rows))
    arguments = rows, key, product, transposed, offsets, bias_scale, len(weights), *weights, *biases
    output: Tensor = _CompiledGroupedLinear.apply(*arguments)
    return output


torch.compiler.allow_in_graph(compiled_grouped_linear)  # as ``compiled_linear``


def _cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [cast(tensor, dtype) for tensor in tensors]


class _CompiledGroupedLinear(torch.autograd.Function):
    """See ``compiled_grouped_linear``. A compiler decides what to save."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        key: Tensor | None,
        product: int,
        transposed: bool,
        offsets: Tensor,
        bias_scale: Tensor | None,
        num_weights: int,
        *weights_and_biases: Tensor,
    ) -> Tensor:
        weights, biases = weights_and_biases[:num_weights], weights_and_biases[num_weights:]
        ctx.save_for_backward(key, x, offsets, bias_scale, *weights_and_biases)
        ctx.product, ctx.transposed, ctx.num_weights = product, transposed, num_weights
        output: Tensor = grouped_linear_op(
            x, _cast_all(weights, x.dtype), offsets, _cast_all(biases, x.dtype), bias_scale, transposed
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        key, x, offsets, scale, *others = ctx.saved_tensors
        weights, biases = others[: ctx.num_weights], others[ctx.num_weights :]
        needs_dx, _, _, _, _, needs_ds, _, *needs = ctx.needs_input_grad
        needs_dw, needs_db = needs[: ctx.num_weights], needs[ctx.num_weights :]
        dx = ds = None
        if needs_dx:
            matrices = _cast_all(weights, dy.dtype)
            dx = grouped_linear_op(dy, matrices, offsets, [], None, not ctx.transposed)
        if needs_ds:
            ds = cast(grouped_scale_grad_op(dy, _cast_all(biases, dy.dtype), offsets), scale.dtype)
        dbs: list[Tensor | None] = [None] * len(biases)
        if True in needs_db:
            db = grouped_bias_grad_op(dy, offsets, scale, biases[0].dtype)
            dbs = parts_of(db, biases[0].dim() == 2, needs_db)
        dws: list[Tensor | None] = [None] * len(weights)
        if True in needs_dw and key is not None:
            assert wgrad is not None, "can_compile was asked"
            wgrad([dy, x, offsets], key, ctx.product)
        elif True in needs_dw:
            left, right = (x, dy) if ctx.transposed else (dy, x)
            dtype = weights[0].dtype if weights[0].dtype in (torch.float32, dy.dtype) else dy.dtype
            dw = cast(grouped_wgrad_op(left, right, offsets, dtype), weights[0].dtype)
            dws = parts_of(dw, weights[0].dim() == 3, needs_dw)
        return (dx, None, None, None, None, ds, None, *dws, *dbs)
