"""``quantized_linear``: the differentiable linear operation under a recipe; see ``te_integration/recipes.py``.

Legend: T rows (all leading dims of the input together), K input features, N output features.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...ddp.collectives.streams import capture_number
from ...ddp.contract.main_grad import record_of
from ...ddp.contract.target import Demand
from ...ddp.torch_internals import current_backward, delivers_to_all
from ...kernels.quantized import Quantized, lacking, quantize_both, restored, scaled_product
from ..recipes import Operand, Recipe
from ..scaling.product_scaling import ProductScaling
from ..torch_internals import watch_prehooks
from .fused_linear import ProductUse, cast, dtype_of_products, rows_of, wanted_and_places, weight_grads

__all__ = [
    "HALF",
    "Moment",
    "Quantizing",
    "copies",
    "copies_of_weight",
    "kept_copies",
    "overflow_as_nan",
    "quantized_linear",
    "takes_recipe",
    "warn_of_dtype",
]

HALF = (torch.bfloat16, torch.float16)
Quantizing: TypeAlias = Recipe | ProductScaling
"""What quantises the operands of one product: a recipe, or one with the product's own scales."""
Moment: TypeAlias = Literal["forward", "backward", "evaluation"]
_Copy = TypeVar("_Copy")


def takes_recipe(recipe: Recipe, input: Tensor, owner: str) -> bool:
    """Whether products of ``input`` are quantised. False for fp32 and fp64, with a warning once a module's name.

    Raises ``RuntimeError`` where the device has no kernel for the recipe.
    """
    if dtype_of_products(input) not in HALF:
        warn_of_dtype(recipe, dtype_of_products(input), owner)
        return False
    if input.is_cuda and not recipe.emulate:
        needed = lacking(recipe.specs("input")[0], input.device)
        if needed is not None:
            raise RuntimeError(
                f"{owner}: {type(recipe).__name__} on {torch.cuda.get_device_name(input.device)} needs {needed}. "
                f"{type(recipe).__name__}(emulate=True) quantises, and multiplies in fp32: right, and slower than bf16"
            )
    return True


def warn_of_dtype(recipe: Recipe, dtype: torch.dtype, owner: str) -> None:
    """A product in fp32 or fp64 is computed as without a recipe."""
    warnings.warn(
        f"{owner}: {type(recipe).__name__} quantises bf16 and fp16; this module computes in {dtype}, as without a "
        f"recipe",
        RuntimeWarning,
        stacklevel=3,
    )


def quantized_linear(
    input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, use: ProductUse, recipe: Quantizing
) -> Tensor:
    """``y = x W^T + b``; arguments as those of ``fused_linear``. All three products take quantised operands.

    Saved for backward is the input's transposed quantised copy: half of bf16's bytes, or a quarter. Raises
    ``RuntimeError`` for second derivatives.
    """
    trains = torch.is_grad_enabled()  # in the function it is off, and ``needs_input_grad`` does not tell
    output: Tensor = _QuantizedLinear.apply(input, use, recipe, trains, *weights, bias)
    if input.dim() == 2 or use.only_save:
        return output
    return output.view(*input.shape[:-1], output.shape[1])  # here: a view made in the function refuses in-place changes


class _QuantizedLinear(torch.autograd.Function):
    """See ``quantized_linear``."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, use: ProductUse, recipe: Quantizing, trains: bool, *weights_and_bias: Any
    ) -> Tensor:
        *weights, bias = weights_and_bias
        dtype = dtype_of_products(input)
        x = cast(rows_of(input), dtype)
        needs_dx, needs_dw = trains and ctx.needs_input_grad[0], trains and True in ctx.needs_input_grad[4:-1]
        empty = x.numel() == 0 or not any(weight.numel() for weight in weights)
        rows = columns = None
        if not empty:
            rows, columns = copies(recipe, "input", x, rows=not use.only_save, columns=needs_dw)
        ctx.x_kind = None if columns is None else (columns.spec, columns.columns)
        ctx.save_for_backward(*weights, *(() if columns is None else columns.tensors))
        ctx.use, ctx.recipe, ctx.dtype = use, recipe, dtype
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weights[0].dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        if use.only_save:
            return x.new_empty(0)
        bias = None if bias is None else cast(bias, dtype)
        if rows is None:
            shape = x.shape[0], sum(weight.shape[1 if use.transposed else 0] for weight in weights)
            return x.new_zeros(shape) if bias is None else bias.expand(shape).clone()
        of_weight, _ = copies_of_weight(
            weights,
            recipe,
            dtype,
            transposed=use.transposed,
            rows=True,
            columns=needs_dx,
            moment="forward" if trains else "evaluation",
        )
        assert of_weight is not None
        return scaled_product(rows, of_weight, dtype, bias, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        use: ProductUse = ctx.use
        recipe: Quantizing = ctx.recipe
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{use.owner}: second derivatives (create_graph=True) of quantised products are not defined; run this "
                f"forward under autocast(enabled=False)"
            )
        needs_dx, _, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        saved = ctx.saved_tensors
        weights = saved[: len(needs_dw)]
        wanted, places = wanted_and_places(ctx, needs_dw)
        dy = cast(rows_of(grads[0]), ctx.dtype)
        db = dy.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        dy = overflow_as_nan(dy)
        dx = rows = columns = None
        if isinstance(recipe, ProductScaling):
            trains = Demand.ACCUMULATE in wanted if True in needs_dw else delivers_to_all()
            recipe.enter_backward(trains=trains, frozen=True not in needs_dw)
        if dy.numel():
            rows, columns = copies(recipe, "grad", dy, rows=needs_dx, columns=ctx.x_kind is not None)
        if needs_dx:
            if rows is None or 0 in ctx.input_shape:
                dx = dy.new_zeros(ctx.input_shape, dtype=ctx.input_dtype)
            else:
                _, of_weight = copies_of_weight(
                    weights, recipe, ctx.dtype, transposed=use.transposed, columns=True, moment="backward"
                )
                assert of_weight is not None
                dx = cast(scaled_product(rows, of_weight, ctx.dtype), ctx.input_dtype).view(ctx.input_shape)
        dws: list[Tensor | None] = [None] * len(weights)
        if True in needs_dw:
            of_input: Tensor | Quantized
            of_grad: Tensor | Quantized | None
            if ctx.x_kind is None:  # no tokens, or no features
                of_input = dy.new_zeros(dy.shape[0], weights[0].shape[0 if use.transposed else 1])
                of_grad = dy
            else:
                of_input, of_grad = restored(saved[len(weights) :], *ctx.x_kind), columns
            assert of_grad is not None, "where the input has elements, dy has some too"
            operands = (of_input, of_grad) if use.transposed else (of_grad, of_input)
            dws = weight_grads(ctx, wanted, places, operands)
        return (dx, None, None, None, *dws, db)


def _whole(weights: Sequence[Tensor], dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """[N, K] in the dtype of the products."""
    weight = cast(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), dtype)
    return weight.t() if transposed else weight


class _Kept(NamedTuple):
    """Copies of weights, kept in a ``GradRecord`` while an iteration's gradients are summed."""

    key: tuple[Any, ...]
    rows: Any
    columns: Any


def copies_of_weight(
    weights: Sequence[Tensor],
    recipe: Quantizing,
    dtype: torch.dtype,
    *,
    transposed: bool,
    rows: bool = False,
    columns: bool = False,
    moment: Moment,
) -> tuple[Quantized | None, Quantized | None]:
    """The quantised copies of W [N, K], as it is and transposed: see ``kept_copies``."""

    def make(rows: bool, columns: bool) -> tuple[Quantized | None, Quantized | None]:
        return copies(recipe, "weight", _whole(weights, dtype, transposed=transposed), rows=rows, columns=columns)

    version = None
    if isinstance(recipe, Recipe) and (scale := recipe.scale_of("weight")) is not None:
        version = scale.data_ptr(), scale._version  # a recipe of the program's own may change it in place
    form = recipe, version, dtype, transposed
    return kept_copies(weights, form, make, rows=rows, columns=columns, moment=moment)


def kept_copies(
    weights: Sequence[Tensor],
    form: tuple[Any, ...],
    make: Callable[[bool, bool], tuple[_Copy | None, _Copy | None]],
    *,
    rows: bool,
    columns: bool,
    moment: Moment,
) -> tuple[_Copy | None, _Copy | None]:
    """``make(rows, columns)``: quantised copies of weights, as they are and transposed; or those kept in this ``form``.

    Under our provider a forward that trains keeps its copies: for this iteration's backwards, and for its forwards from
    the first gradient of each of the weights on. Before it, and after the last, somebody may write the weights and tell
    nobody (fused optimizers raise no version); but gradients of different weights are never summed. An evaluation takes
    the weights as they are: others may have been swapped in for it. A forward whose copies are not kept makes those
    that it needs itself, as they are, and no others.
    """
    number = capture_number()
    records = [] if number is None or moment == "evaluation" else [record_of(weight) for weight in weights]
    # A frozen weight has no gradients that would bind it to an iteration; sharded weights come and go within one.
    if not records or any(each is None or each.closed is not None or each.make_room is not None for each in records):
        return make(rows, columns and not rows)
    record: Any = records[0]
    key = *form, number, *((weight._version, weight.data_ptr()) for weight in weights)
    kept = record.of_weight
    if (
        isinstance(kept, _Kept)
        and (moment == "backward" or all(each is not None and each.written for each in records))
        and kept.key == key
        and not (rows and kept.rows is None)
        and not (columns and kept.columns is None)
    ):
        return kept.rows, kept.columns
    made = make(rows, columns)
    if moment == "forward":
        record.of_weight = _Kept(key, *made)
    return made


def overflow_as_nan(dy: Tensor) -> Tensor:
    """A gradient whose overflow stays visible: elements have no Inf, from which a loss scaler in fp16 learns of it."""
    return dy.masked_fill(dy.isinf(), torch.nan) if dy.dtype is torch.float16 else dy


def copies(
    recipe: Quantizing, operand: Operand, matrix: Tensor, *, rows: bool = False, columns: bool = False
) -> tuple[Quantized | None, Quantized | None]:
    """The quantised copies of ``matrix``: as it is, and transposed."""
    of_rows, of_columns = recipe.specs(operand)
    return quantize_both(
        matrix,
        of_rows if rows else None,
        of_columns if columns else None,
        scale=recipe.scale_of(operand),
        amax=recipe.amax_of(operand),
    )


watch_prehooks(_QuantizedLinear)
