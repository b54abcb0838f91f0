"""``quantized_linear``: the differentiable linear operation under a recipe; see ``te_integration/recipes.py``.

Legend: T rows (all leading dims of the input together), K input features, N output features.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.demand import Demand, demand
from ...ddp.contract.target import Place
from ...ddp.torch_internals import current_backward
from ...kernels.quantized import Quantized, quantize, restored, scaled_product
from ...kernels.wgrad import wgrad_product
from ..recipes import Operand, Recipe
from ..torch_internals import watch_prehooks
from .fused_linear import LinearUse, cast, dtype_of_products, refuse_split_backward, rows_of

__all__ = ["quantized_linear", "takes_recipe"]

_HALF = (torch.bfloat16, torch.float16)


def takes_recipe(recipe: Recipe, input: Tensor, owner: str) -> bool:
    """Whether products of ``input`` are quantised. False for fp32 and fp64, with a warning once a module's name.

    Raises ``RuntimeError`` where the device has no kernel for the recipe.
    """
    if dtype_of_products(input) not in _HALF:
        warnings.warn(
            f"{owner}: {type(recipe).__name__} quantises bf16 and fp16; this module computes in "
            f"{dtype_of_products(input)}, as without a recipe",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    if input.is_cuda and not recipe.emulate:
        raise RuntimeError(
            f"{owner}: {type(recipe).__name__} has no kernel on GPUs here. {type(recipe).__name__}(emulate=True) "
            f"quantises, and multiplies in fp32: right, and slower than bf16"
        )
    return True


def quantized_linear(
    input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, use: LinearUse, recipe: Recipe, writes: bool
) -> Tensor:
    """``y = x W^T + b``; arguments as those of ``fused_linear``. All three products take quantised operands.

    writes  gradients of weights go where ``use`` says; False: autograd delivers them

    Saved for backward is the input's transposed quantised copy: half of bf16's bytes, or a quarter. Raises
    ``RuntimeError`` for second derivatives.
    """
    output: Tensor = _QuantizedLinear.apply(input, use, recipe, writes, *weights, bias)  # type: ignore[no-untyped-call]
    if input.dim() == 2 or use.only_save:
        return output
    return output.view(*input.shape[:-1], output.shape[1])  # here: a view made in the function refuses in-place changes


class _QuantizedLinear(torch.autograd.Function):
    """See ``quantized_linear``."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, use: LinearUse, recipe: Recipe, writes: bool, *weights_and_bias: Any
    ) -> Tensor:
        *weights, bias = weights_and_bias
        dtype = dtype_of_products(input)
        x = cast(rows_of(input), dtype)
        needs_dw = True in ctx.needs_input_grad[4:-1]
        empty = x.numel() == 0 or not any(weight.numel() for weight in weights)
        columns = _quantized(recipe, "input", x.t(), columns=True) if needs_dw and not empty else None
        ctx.x_kind = None if columns is None else (columns.spec, columns.columns)
        ctx.save_for_backward(*weights, *(() if columns is None else columns.tensors))
        ctx.use, ctx.recipe, ctx.writes, ctx.dtype = use, recipe, writes, dtype
        ctx.input_shape, ctx.input_dtype = input.shape, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        if use.only_save:
            return x.new_empty(0)
        weight = _whole(weights, dtype, transposed=use.transposed)
        bias = None if bias is None else cast(bias, dtype)
        if empty:
            shape = x.shape[0], weight.shape[0]
            return x.new_zeros(shape) if bias is None else bias.expand(shape).clone()
        rows = _quantized(recipe, "input", x, columns=False)
        return scaled_product(rows, _quantized(recipe, "weight", weight, columns=False), dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        use: LinearUse = ctx.use
        recipe: Recipe = ctx.recipe
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{use.owner}: second derivatives (create_graph=True) of quantised products are not defined; run this "
                f"forward under autocast(enabled=False)"
            )
        needs_dx, _, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        saved = ctx.saved_tensors
        weights = saved[: len(needs_dw)]
        nodes = ctx.next_functions  # of the tensor inputs only: the input, then the weights
        wanted = [demand(nodes[i + 1][0]) if need else Demand.NOTHING for i, need in enumerate(needs_dw)]
        if ctx.writes and use.fused and Demand.ACCUMULATE not in wanted:
            refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
        places = [
            use.targets[i].resolve() if ctx.writes and want is Demand.ACCUMULATE else None
            for i, want in enumerate(wanted)
        ]
        dy = cast(rows_of(grads[0]), ctx.dtype)
        db = dy.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        if ctx.dtype is torch.float16:  # elements have no Inf, from which a loss scaler learns of an overflow
            dy = dy.masked_fill(dy.isinf(), torch.nan)
        dx = None
        if needs_dx:
            dx = dy.new_zeros(ctx.input_shape, dtype=ctx.input_dtype)
            if dx.numel() and dy.numel():
                weight = _whole(weights, ctx.dtype, transposed=use.transposed)
                rows = _quantized(recipe, "grad", dy, columns=False)
                of_weight = _quantized(recipe, "weight", weight.t(), columns=True)
                dx = cast(scaled_product(rows, of_weight, ctx.dtype), ctx.input_dtype).view(ctx.input_shape)
        dws: list[Tensor | None] = [None] * len(weights)
        if any(needs_dw):
            dws = _weight_grads(ctx, weights, saved[len(weights) :], wanted, places, dy)
        return (dx, None, None, None, *dws, db)


def _weight_grads(
    ctx: Any,
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    wanted: Sequence[Demand],
    places: Sequence[Place | None],
    dy: Tensor,
) -> list[Tensor | None]:
    """What backward returns for each weight."""
    use: LinearUse = ctx.use
    x: Tensor | Quantized
    grad: Tensor | Quantized
    if ctx.x_kind is None:  # no tokens, or no features
        x = dy.new_zeros(dy.shape[0], weights[0].shape[0 if use.transposed else 1])
        grad = dy
    else:
        spec, columns = ctx.x_kind
        x = restored(saved, spec, columns)
        grad = _quantized(ctx.recipe, "grad", dy.t(), columns=True)
    backward = ctx.outer_backward if ctx.outer_backward != -1 else current_backward()
    found: list[Tensor | None] = []
    start = 0
    for index, weight in enumerate(weights):
        size = weight.shape[1 if use.transposed else 0]
        part = grad.rows(start, start + size) if isinstance(grad, Quantized) else grad[:, start : start + size]
        start += size
        left, right = (x, part) if use.transposed else (part, x)
        place: Place | None = places[index]
        if place is not None:
            found.append(use.targets[index].deliver(place.weight, place.accumulator, left, right, backward))
        elif wanted[index] is Demand.NOTHING:
            found.append(None)
        else:
            found.append(wgrad_product(left, right, weight.dtype))
    return found


def _whole(weights: Sequence[Tensor], dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """[N, K] in the dtype of the products."""
    weight = cast(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), dtype)
    return weight.t() if transposed else weight


def _quantized(recipe: Recipe, operand: Operand, matrix: Tensor, *, columns: bool) -> Quantized:
    return quantize(matrix, recipe.spec(operand, columns=columns))


watch_prehooks(_QuantizedLinear)
