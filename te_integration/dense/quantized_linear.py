"""``quantized_linear``: the differentiable linear operation under a recipe; see ``te_integration/recipes.py``.

Legend: T rows (all leading dims of the input together), K input features, N output features.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...ddp.collectives.streams import capture_number
from ...ddp.contract.main_grad import Demand, demand, record_of
from ...ddp.torch_internals import current_backward, delivers_to_all, watch_prehooks
from ...kernels.quantized import (
    Quantized,
    lacking,
    quantize_both,
    restored,
    scaled_product,
    scaled_wgrad_accumulate,
)
from ..recipes import DelayedScaling, Operand, Recipe, is_recomputed_without_region, recipe_now
from ..scaling.delayed_scaling import scaling_of
from ..scaling.product_scaling import ProductScaling
from ..wgrad_queue import WgradQueue
from .linear import Execution, LinearModule, ProductUse, brought, wanted_and_places, weight_grads
from .products import DenseWgrad, cast, dtype_of_products, in_transform, rows_of

__all__ = [
    "HALF",
    "Moment",
    "QuantizedWgrad",
    "backward_products",
    "forward_product",
    "kept_copies",
    "overflow_as_nan",
    "recipe_of_forward",
    "require_kernels",
    "takes_recipe",
    "warn_of_dtype",
]

HALF = (torch.bfloat16, torch.float16)
Quantizing: TypeAlias = Recipe | ProductScaling
"""What quantises the operands of one product: a recipe, or one with the product's own scales."""
Moment: TypeAlias = Literal["forward", "backward", "evaluation"]
_Copy = TypeVar("_Copy")


class QuantizedWgrad(DenseWgrad):
    """``dW = dy^T x`` of operands that are quantised along the tokens, and so transposed: dy [N, T], x [K, T]."""

    def parts(self, dy: Quantized) -> Sequence[Any]:
        """The rows of ``dy`` for each weight."""
        return [dy.rows(*ends) for ends in itertools.pairwise(itertools.accumulate(self.features, initial=0))]

    def add(self, dy: Quantized, x: Quantized, main_grad: Tensor, *, overwrite: bool) -> None:
        """``main_grad (+)= dy^T x`` for the rows of one weight."""
        scaled_wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)

    def multiply(self, dy: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
        """``dy^T x`` in ``dtype`` for the rows of one weight."""
        return scaled_product(dy, x, dtype)


def recipe_of_forward(module: LinearModule, input: Tensor) -> Recipe | None:
    """The recipe by which the products of this forward are quantised; None: there is none."""
    recipe = None if module.ignores_recipes else recipe_now()
    if recipe is None:
        if module._has_been_quantized and is_recomputed_without_region():
            raise RuntimeError(
                f"{module.describe()} was quantised under autocast, and a reentrant checkpoint computes it again "
                f"outside: use torch.utils.checkpoint(use_reentrant=False), or enter autocast in the function"
            )
        return None
    if not takes_recipe(recipe, input, module.describe()):
        return None
    if not module._has_been_quantized:
        module._has_been_quantized = True
    return recipe


class _Quantized(NamedTuple):
    """The ``Execution`` of a quantised product."""

    use: ProductUse
    recipe: Recipe
    scaling: ProductScaling | None

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See ``quantized_linear``."""
        output = quantized_linear(input, weights, bias, self.use, self.scaling or self.recipe)
        if self.scaling is not None:
            self.scaling.forward_done(has_graph=output.requires_grad)
        return output


class _Empty(NamedTuple):
    """The ``Execution`` under a recipe where there is nothing to quantise, and no amax.

    The backward ends the iteration of the scales all the same: ranks with tokens agree with this one.
    """

    use: ProductUse
    scaling: ProductScaling | None

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See ``ProductUse``."""
        leading = input.shape[:-1] if input.dim() > 2 else ()
        output = self.use.multiply(input.flatten(0, -2) if leading else input, weights, bias)
        if leading and not self.use.only_save:
            output = output.unflatten(0, leading)  # here: see quantized_linear
        if self.scaling is not None:
            self.scaling.forward_done(has_graph=output.requires_grad)
            if output.requires_grad:
                nodes = [get_gradient_edge(weight).node for weight in weights if weight.requires_grad]
                output.register_hook(partial(_enter_backward, self.scaling, nodes))
        return output


def _execution(
    recipe: Recipe,
    module: LinearModule,
    input: Tensor,
    weights: Sequence[Tensor],
    queue: WgradQueue | None,
    product: int,
    only_save: bool,
) -> Execution:
    module.check_input(input, weights[0])
    if in_transform():
        raise RuntimeError(f"{module.describe()}: a recipe does not go with transforms of torch.func")
    fused, queue = module.delivery(weights, queue)
    scaling = scaling_of(module, recipe, product, input.device) if isinstance(recipe, DelayedScaling) else None
    if input.numel() and any(weight.numel() for weight in weights):
        return _Quantized(module.use(product, weights, fused, queue, only_save, QuantizedWgrad), recipe, scaling)
    return _Empty(module.use(product, weights, fused, queue, only_save), scaling)


def _enter_backward(scaling: ProductScaling, nodes: Sequence[Any], grad: Tensor) -> None:
    trains = Demand.ACCUMULATE in map(demand, nodes) if nodes else delivers_to_all()
    scaling.enter_backward(trains=trains, frozen=not nodes)


brought.recipe_of_forward = recipe_of_forward
brought.execution_under_recipe = _execution


def takes_recipe(recipe: Recipe, input: Tensor, owner: str) -> bool:
    """Whether products of ``input`` are quantised. False for fp32 and fp64, with a warning once a module's name.

    Raises ``RuntimeError`` where the device has no kernel for the recipe.
    """
    if dtype_of_products(input) not in HALF:
        warn_of_dtype(recipe, dtype_of_products(input), owner)
        return False
    require_kernels(recipe, input.device, owner)
    return True


def require_kernels(recipe: Recipe, device: torch.device, owner: str, *, experts: bool = False) -> None:
    """Raise ``RuntimeError`` where a GPU has no kernels for the recipe, or none for ``experts``."""
    if device.type != "cuda" or recipe.emulate:
        return
    needed = lacking(recipe.specs("input")[0], device, experts=experts)
    if needed is not None:
        name, what = type(recipe).__name__, " with experts" if experts else ""
        raise RuntimeError(
            f"{owner}: {name}{what} on {torch.cuda.get_device_name(device)} needs {needed}. {name}(emulate=True) "
            f"quantises, and multiplies in fp32: right, and slower than bf16"
        )


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
    """``y = x W^T + b``; arguments as those of ``ProductUse.multiply``. All three products take quantised operands.

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
        if use.only_save:
            _, columns = copies(recipe, "input", x, columns=needs_dw)
            y = x.new_empty(0)
        else:
            moment: Moment = "forward" if trains else "evaluation"
            y, columns = forward_product(
                recipe, x, weights, bias, needs_dx, needs_dw, moment, transposed=use.transposed
            )
        ctx.x_kind = None if columns is None else (columns.spec, columns.columns)
        ctx.save_for_backward(*weights, *(() if columns is None else columns.tensors))
        ctx.use, ctx.recipe, ctx.dtype = use, recipe, dtype
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weights[0].dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        return y

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
        if isinstance(recipe, ProductScaling):
            trains = Demand.ACCUMULATE in wanted if True in needs_dw else delivers_to_all()
            recipe.enter_backward(trains=trains, frozen=True not in needs_dw)
        needs_copy = ctx.x_kind is not None
        dx, of_grad = backward_products(recipe, dy, weights, needs_dx, needs_copy, transposed=use.transposed)
        if dx is not None:
            dx = cast(dx.view(ctx.input_shape), ctx.input_dtype)
        dws: list[Tensor | None] = [None] * len(weights)
        if of_grad is not None:
            x = restored(saved[len(weights) :], *ctx.x_kind)
            dws = weight_grads(ctx, wanted, places, (x, of_grad) if use.transposed else (of_grad, x))
        return (dx, None, None, None, *dws, db)


def forward_product(
    recipe: Quantizing,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    needs_dx: bool,
    needs_dw: bool,
    moment: Moment,
    *,
    transposed: bool,
) -> tuple[Tensor, Quantized | None]:
    """``x W^T + b`` [T, N], and the transposed copy of x [T, K] that the weight gradients need, if any will come."""
    rows, columns = copies(recipe, "input", x, rows=True, columns=needs_dw)
    of_weight, _ = _copies_of_weight(
        weights, recipe, x.dtype, transposed=transposed, rows=True, columns=needs_dx, moment=moment
    )
    assert rows is not None and of_weight is not None
    bias = None if bias is None else cast(bias, x.dtype)
    return scaled_product(rows, of_weight, x.dtype, bias, fast=True), columns


def backward_products(
    recipe: Quantizing, dy: Tensor, weights: Sequence[Tensor], needs_dx: bool, needs_dw: bool, *, transposed: bool
) -> tuple[Tensor | None, Quantized | None]:
    """``dy W`` [T, K], and the transposed copy of dy [T, N] for the weight gradients; each where it is needed."""
    rows, columns = copies(recipe, "grad", overflow_as_nan(dy), rows=needs_dx, columns=needs_dw)
    if rows is None:
        return None, columns
    _, of_weight = _copies_of_weight(weights, recipe, dy.dtype, transposed=transposed, columns=True, moment="backward")
    assert of_weight is not None
    return scaled_product(rows, of_weight, dy.dtype), columns


def _whole(weights: Sequence[Tensor], dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """[N, K] in the dtype of the products."""
    weight = cast(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), dtype)
    return weight.t() if transposed else weight


class _Kept(NamedTuple):
    """Copies of weights, kept in a ``GradRecord`` while an iteration's gradients are summed."""

    key: tuple[Any, ...]
    rows: Any
    columns: Any


def _copies_of_weight(
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
    if not records or any(each is None or each.closed is not None or each.is_of_unit for each in records):
        return make(rows, columns and not rows)
    record: Any = records[0]
    key = *form, number, *((weight._version, weight.data_ptr()) for weight in weights)
    kept = record.of_weight
    if (
        isinstance(kept, _Kept)
        and (moment == "backward" or all(each is not None and each.written for each in records))
        and kept.key == key
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
