"""``compiled_linear``: ``fused_linear`` in a form that ``torch.compile`` takes into its graph whole.

The product, ``dx`` and ``db`` are the operations of ``fused_linear``. The weight gradient is one ``wgrad`` operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiled import wgrad
from .fused_linear import cast, dtype_of_products, input_grad, linear_product, rows_of

__all__ = ["compiled_linear"]


def compiled_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    key: Tensor,
    product: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """``y = x W^T + b``, inside a graph; ``fused_linear`` has the shapes and dtypes.

    key      of the module: ``WgradHandle.key``
    product  the number that the module's ``deliver_wgrad`` gets
    """
    input = cast(input, dtype_of_products(input))
    output: Tensor = _CompiledLinear.apply(input, key, product, transposed, bias, *weights)  # type: ignore[no-untyped-call]
    return output


# A compiler calls the function once instead of tracing its Python, and traces the operations of both passes as it does
# for any other. Traced, the autograd function alone would take as long as the rest of a layer's Python.
torch.compiler.allow_in_graph(compiled_linear)


class _CompiledLinear(torch.autograd.Function):
    """See ``compiled_linear``. A compiler decides what to save: input and weights are named all the same."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        key: Tensor,
        product: int,
        transposed: bool,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(key, x, *weights)
        ctx.product, ctx.transposed = product, transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear_product(x, weights, bias, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        key, x, *weights = ctx.saved_tensors
        needs_dx, _, _, _, needs_db, *needs_dw = ctx.needs_input_grad
        dx = cast(input_grad(dy, weights, transposed=ctx.transposed), x.dtype) if needs_dx else None
        db = rows_of(dy).sum(0, dtype=ctx.bias_dtype) if needs_db else None
        if True in needs_dw:
            assert wgrad is not None, "can_compile was asked"
            wgrad([dy, x], key, ctx.product)
        return (dx, None, None, None, db, *[None] * len(weights))
