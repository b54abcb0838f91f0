"""``quantized_grouped_linear``: the differentiable grouped operation under a recipe; see ``te_integration/recipes.py``.

Legend: E experts, T rows, K input features, N output features. Each expert's rows, and its weight, are quantised alone:
scales are those of one expert, and no block lies in two. The host reads no split sizes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import PerExpert
from ...kernels.quantized import (
    GroupedQuantized,
    Quantized,
    quantize_experts,
    quantize_grouped_both,
    restored,
    scaled_grouped_product,
)
from ..dense.linear import ProductUse
from ..dense.quantized_linear import Moment, kept_copies, overflow_as_nan, require_kernels
from ..recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Operand, Recipe
from .fused_grouped_linear import GroupedCall, fused_grouped_linear, per_expert

__all__ = ["quantized_grouped_linear"]

_SUPPORTED = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


def quantized_grouped_linear(
    input: Tensor,
    weights: PerExpert,
    bias: PerExpert | None,
    offsets: Tensor,
    use: ProductUse,
    *,
    recipe: Recipe,
    **options: Any,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e``; arguments as those of ``fused_grouped_linear``, with rows: T is not 0.

    All three products take quantised operands. Saved for backward is the input's transposed quantised copy, by experts.
    Raises ``RuntimeError`` for second derivatives, and for a recipe that experts have no products for.
    """
    _refuse_unsupported(recipe, input, use.owner)
    products = QuantizedProducts(recipe, trains=torch.is_grad_enabled())
    return fused_grouped_linear(input, weights, bias, offsets, use, products=products, **options)


def _refuse_unsupported(recipe: Recipe, input: Tensor, owner: str) -> None:
    if not isinstance(recipe, _SUPPORTED):
        raise RuntimeError(
            f"{owner}: {type(recipe).__name__} is not supported with experts; run the module under "
            f"autocast(enabled=False), where it computes in {input.dtype}, or under another recipe"
        )
    require_kernels(recipe, input.device, owner, experts=True)


class QuantizedProducts(NamedTuple):
    """``GroupedProducts`` of quantised operands.

    trains  grad mode is on in forward; nothing is saved otherwise
    """

    recipe: Recipe
    trains: bool

    def output(
        self, ctx: Any, input: Tensor, weights: Sequence[Tensor], bias: PerExpert | None, scale: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See ``GroupedProducts``: the input's transposed copy is saved."""
        call: GroupedCall = ctx.call
        keeps = self.trains and True in ctx.needs_input_grad[3 : 3 + call.num_weights]
        rows, columns = self._copies(input, "input", call.offsets, rows=True, columns=keeps)
        of_weights, _ = self._copies_of_weights(
            ctx, weights, rows=True, columns=ctx.needs_input_grad[0], moment="forward" if self.trains else "evaluation"
        )
        assert rows is not None and of_weights is not None
        y = scaled_grouped_product(rows, of_weights, call.dtype, bias=bias, bias_scale=scale, out=call.out)
        if columns is None:
            return y, ()
        ctx.x_kind = columns.matrix.spec, columns.matrix.columns
        return y, columns.tensors

    def gradients(
        self, ctx: Any, dy: Tensor, weights: Sequence[Tensor], of_input: Sequence[Tensor]
    ) -> tuple[Tensor | None, Any, Any]:
        """See ``GroupedProducts``."""
        call: GroupedCall = ctx.call
        dy = overflow_as_nan(dy)
        rows = columns = dx = x = None
        if weights or of_input:
            rows, columns = self._copies(dy, "grad", call.offsets, rows=bool(weights), columns=bool(of_input))
        if rows is not None:
            _, of_weights = self._copies_of_weights(ctx, weights, rows=False, columns=True, moment="backward")
            assert of_weights is not None
            dx = scaled_grouped_product(rows, of_weights, call.dtype, out=call.grad_input)
        if of_input:
            *of_matrix, segments = of_input
            x = GroupedQuantized(restored(of_matrix, *ctx.x_kind), segments, transposed=True)
        return dx, columns, x

    def _copies(
        self, matrix: Tensor, operand: Operand, offsets: Tensor, *, rows: bool, columns: bool
    ) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
        of_rows, of_columns = self.recipe.specs(operand)
        return quantize_grouped_both(matrix, of_rows if rows else None, of_columns if columns else None, offsets)

    def _copies_of_weights(
        self, ctx: Any, weights: Sequence[Tensor], *, rows: bool, columns: bool, moment: Moment
    ) -> tuple[Quantized | None, Quantized | None]:
        """[N, K] of each expert, and their transposes."""
        use: ProductUse = ctx.use
        dtype: torch.dtype = ctx.call.dtype

        def make(rows: bool, columns: bool) -> tuple[Quantized | None, Quantized | None]:
            of_rows, of_columns = self.recipe.specs("weight")
            matrices = per_expert(weights, use.packed, dtype)
            wanted = of_rows if rows else None, of_columns if columns else None
            if use.transposed:
                transposes, as_they_are = quantize_experts(matrices, *reversed(wanted))
                return as_they_are, transposes
            return quantize_experts(matrices, *wanted)

        form = self.recipe, dtype, use.transposed
        return kept_copies(weights, form, make, rows=rows, columns=columns, moment=moment)
