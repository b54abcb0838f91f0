"""``quantized_grouped_linear``: the differentiable grouped operation under a recipe; see ``te_integration/recipes.py``.

Legend: E experts, T rows, K input features, N output features. Each expert's rows, and its weight, are quantised alone:
scales are those of one expert, and no block lies in two. The host reads no split sizes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.target import Demand, Place
from ...kernels import PerExpert
from ...kernels.quantized import (
    GroupedQuantized,
    QuantizedExperts,
    lacking,
    quantize_experts,
    quantize_grouped_both,
    restored,
    scaled_grouped_product,
)
from ..dense.fused_linear import ProductUse, cast, wanted_and_places, weight_grads
from ..dense.quantized_linear import Moment, kept_copies, overflow_as_nan
from ..recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from ..torch_internals import watch_prehooks
from .fused_grouped_linear import (
    GroupedCall,
    arguments_of,
    bias_grads,
    needs_dw_of,
    per_expert,
    record_product,
    without_autocast,
    written,
)

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
    bias_scale: Tensor | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e``; arguments as those of ``fused_grouped_linear``, with rows: T is not 0.

    All three products take quantised operands. Saved for backward is the input's transposed quantised copy, by experts.
    Raises ``RuntimeError`` for second derivatives, and for a recipe that experts have no products for.
    """
    _refuse_unsupported(recipe, input, use.owner)
    input, call, tensors = arguments_of(input, weights, bias, offsets, use, bias_scale, out, grad_input)
    call = call._replace(recipe=recipe, trains=torch.is_grad_enabled())
    output: Tensor = _QuantizedGroupedLinear.apply(input, use, call, *tensors)
    return output


def _refuse_unsupported(recipe: Recipe, input: Tensor, owner: str) -> None:
    name = type(recipe).__name__
    if not isinstance(recipe, _SUPPORTED):
        raise RuntimeError(
            f"{owner}: {name} is not supported with experts; run the module under autocast(enabled=False), where it "
            f"computes in {input.dtype}, or under another recipe"
        )
    if input.is_cuda and not recipe.emulate:
        needed = lacking(recipe.specs("input")[0], input.device, experts=True)
        if needed is not None:
            raise RuntimeError(
                f"{owner}: {name} with experts on {torch.cuda.get_device_name(input.device)} needs {needed}. "
                f"{name}(emulate=True) quantises, and multiplies in fp32: right, and slower than bf16"
            )


class _QuantizedGroupedLinear(torch.autograd.Function):
    """See ``quantized_grouped_linear``. ``apply`` takes what that of ``fused_grouped_linear`` takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: ProductUse, call: GroupedCall, *tensors: Any) -> Tensor:
        count = call.num_weights
        weights, biases, scale = tensors[:count], tensors[count:-1], tensors[-1]
        needs_dx, _, _, *needs = ctx.needs_input_grad
        needs_dw, needs_db, needs_ds = True in needs[:count], True in needs[count:-1], needs[-1]
        assert call.recipe is not None, "of quantised products"
        of_rows, of_columns = call.recipe.specs("input")
        keeps = of_columns if needs_dw and call.trains else None
        rows, columns = quantize_grouped_both(x, of_rows, keeps, call.offsets)
        of_weights, _ = _copies_of_weights(
            weights, use, call, rows=True, columns=needs_dx, moment="forward" if call.trains else "evaluation"
        )
        assert rows is not None and of_weights is not None
        ctx.x_kind = None if columns is None else (columns.matrix.spec, columns.matrix.columns)
        ctx.save_for_backward(
            call.offsets,
            scale if needs_db else None,
            *(weights if needs_dx else ()),
            *(biases if needs_ds else ()),
            *(() if columns is None else columns.tensors),
        )
        record_product(ctx, x, use, call, tensors)
        y = scaled_grouped_product(
            rows,
            of_weights,
            call.dtype,
            bias=per_expert(biases, call.packed_bias, call.dtype) if biases else None,
            bias_scale=scale,
            out=call.out,
        )
        return y if call.out is None else written(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.use.owner}: second derivatives (create_graph=True) of quantised products are not defined; run "
                f"this forward under autocast(enabled=False)"
            )
        wanted, places = wanted_and_places(ctx, needs_dw_of(ctx))
        with without_autocast(grads[0].device.type):
            return _gradients(ctx, grads[0], wanted, places)


watch_prehooks(_QuantizedGroupedLinear)


def _gradients(
    ctx: Any, dy: Tensor, wanted: Sequence[Demand], places: Sequence[Place | None]
) -> tuple[Tensor | None, ...]:
    """What backward returns for each argument of ``apply``: dy [T, N]."""
    call: GroupedCall = ctx.call
    use: ProductUse = ctx.use
    assert call.recipe is not None, "of quantised products"
    offsets, scale, *others = ctx.saved_tensors
    needs_dx, needs_ds = ctx.needs_input_grad[0], ctx.needs_input_grad[-1]
    num_weights = call.num_weights if needs_dx else 0
    num_biases = len(ctx.needs_input_grad) - 4 - call.num_weights if needs_ds else 0
    weights, biases = others[:num_weights], others[num_weights : num_weights + num_biases]

    dbs_and_ds = bias_grads(ctx, dy, offsets, scale, biases)
    dy = overflow_as_nan(dy)
    needs_dw = ctx.x_kind is not None
    rows = grad = dx = None
    if needs_dx or needs_dw:
        of_rows, of_columns = call.recipe.specs("grad")
        rows, grad = quantize_grouped_both(dy, of_rows if needs_dx else None, of_columns if needs_dw else None, offsets)
    if needs_dx:
        _, of_weights = _copies_of_weights(weights, use, call, rows=False, columns=True, moment="backward")
        assert rows is not None and of_weights is not None
        dx = scaled_grouped_product(rows, of_weights, call.dtype, out=call.grad_input)
        dx = cast(dx, ctx.input_dtype) if call.grad_input is None else written(dx)
    dws: list[Tensor | None] = [None] * len(wanted)
    if needs_dw:
        assert grad is not None
        *of_matrix, segments = others[num_weights + num_biases :]
        x = GroupedQuantized(restored(of_matrix, *ctx.x_kind), segments, transposed=True)
        dws = weight_grads(ctx, wanted, places, (x, grad, offsets) if use.transposed else (grad, x, offsets))
    return (dx, None, None, *dws, *dbs_and_ds)


def _copies_of_weights(
    weights: Sequence[Tensor], use: ProductUse, call: GroupedCall, *, rows: bool, columns: bool, moment: Moment
) -> tuple[QuantizedExperts | None, QuantizedExperts | None]:
    """[N, K] of each expert, and their transposes."""
    recipe = call.recipe
    assert recipe is not None, "of quantised products"

    def make(rows: bool, columns: bool) -> tuple[QuantizedExperts | None, QuantizedExperts | None]:
        of_rows, of_columns = recipe.specs("weight")
        matrices = per_expert(weights, use.packed, call.dtype)
        wanted = of_rows if rows else None, of_columns if columns else None
        if use.transposed:
            transposes, as_they_are = quantize_experts(matrices, *reversed(wanted))
            return as_they_are, transposes
        return quantize_experts(matrices, *wanted)

    form = recipe, call.dtype, use.transposed
    return kept_copies(weights, form, make, rows=rows, columns=columns, moment=moment)
