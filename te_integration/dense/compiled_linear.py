"""``compiled_linear``: a linear product in a form that ``torch.compile`` takes into its graph whole.

Without a recipe the product, ``dx`` and ``db`` are the operations of ``ProductUse``. Under one they are two operators
that a compiler does not look into: one quantises and multiplies in forward, the other in backward. The weight gradient
is one ``wgrad`` operator.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ddp.contract.delay_blocks import check_recompute_delays
from ...kernels.operators import define_operator
from ...kernels.quantized import quantized_like
from ..recipes import recipe_of
from ..wgrad_queue import WgradQueue
from .compiled_wgrad import mode_and_recipe, run_outside_graph, wgrad
from .linear import PLAIN, Execution, LinearModule, brought
from .products import Ranks, cast, dtype_of_products, input_grad, linear_product, rows_of
from .quantized_linear import Moment, backward_products, forward_product, takes_recipe

__all__ = ["InGraph", "compiled_linear"]


class InGraph(NamedTuple):
    """The ``Execution`` of a product that a compiler takes into its graph."""

    module: LinearModule
    product: int
    recipe: int
    ranks: Ranks | None = None
    """The ranks of a column-parallel product without a recipe, which exchanges its operands itself."""
    shares: bool = False
    """Whether it hands its input on to other products, and sums what they add to the input's gradient."""

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Any:
        """See ``compiled_linear``."""
        module = self.module
        module.check_input(input, weights[0])
        key, transposed = module._wgrad_key, module.transposed
        arguments = input, weights, bias, key, self.product, transposed, self.recipe, self.ranks, self.shares
        return compiled_linear(*arguments)


class _OutsideGraph(NamedTuple):
    """The ``Execution`` of a product that is a graph break: behind it eager code chooses how the product runs."""

    module: LinearModule
    queue: WgradQueue | None
    product: int
    only_save: bool

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See ``LinearModule.multiply``."""
        arguments = input, weights, bias, self.queue, self.product, self.only_save
        output: Tensor = run_outside_graph(_multiply, self.module, *arguments)
        return output


def _multiply(
    module: LinearModule, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, queue: Any, *rest: Any
) -> Tensor:
    """``LinearModule.multiply`` behind a graph break, for subclasses that override it too."""
    if queue is not module.wgrad_queue:
        check_recompute_delays(module.describe())
    return LinearModule.multiply(module, input, weights, bias, queue, *rest)


def _execution(
    module: LinearModule,
    input: Tensor,
    weights: Sequence[Tensor],
    queue: WgradQueue | None,
    product: int,
    only_save: bool,
) -> Execution:
    product = operator.index(product)  # a graph that begins here, behind a break, would take it for a variable
    mode, recipe = mode_and_recipe(module, weights, queue, product, input)
    if mode == "autograd":
        return PLAIN[module.transposed]
    if mode == "break":
        return _OutsideGraph(module, queue, product, only_save)
    return InGraph(module, product, recipe)


brought.execution_in_trace = _execution


def compiled_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    key: Tensor,
    product: int,
    transposed: bool = False,
    recipe: int = -1,
    ranks: Ranks | None = None,
    shares: bool = False,
) -> Any:
    """``y = x W^T + b``, inside a graph; ``ProductUse.multiply`` has the shapes and dtypes.

    key      of the module: ``WgradHandle.key``
    product  index of the product in the module, for ``WgradHandle.deliver``
    recipe   by its ``number_of``; -1: none
    ranks    see ``InGraph``
    shares   likewise; then a pair of y and of the input for others
    """
    input = cast(input, dtype_of_products(input))
    arguments = input, key, product, transposed, recipe, torch.is_grad_enabled(), ranks, shares, bias, *weights
    return _CompiledLinear.apply(*arguments)


# A compiler calls the function once instead of tracing its Python, and traces the operations of both passes as it does
# for any other. Traced, the autograd function alone would take as long as the rest of a layer's Python.
torch.compiler.allow_in_graph(compiled_linear)


class _CompiledLinear(torch.autograd.Function):
    """See ``compiled_linear``. A compiler decides what to save: input and weights are named all the same.

    Under a recipe what waits for backward is the input's transposed quantised copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        key: Tensor,
        product: int,
        transposed: bool,
        recipe: int,
        trains: bool,
        ranks: Ranks | None,
        shares: bool,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Any:
        if recipe < 0:
            whole = x if ranks is None else ranks.finish_gather(ranks.start_gather(x))
            y, of_input = linear_product(whole, weights, bias, transposed=transposed), [whole]
        else:
            needs_dx, needs_dw = trains and ctx.needs_input_grad[0], trains and True in ctx.needs_input_grad[9:]
            rows, *of_input = _forward_op(rows_of(x), weights, bias, recipe, transposed, needs_dx, needs_dw)
            y = rows.view(*x.shape[:-1], rows.shape[1])
        ctx.save_for_backward(key, *weights, *of_input)
        ctx.num_weights, ctx.product, ctx.transposed, ctx.recipe = len(weights), product, transposed, recipe
        ctx.ranks = ranks
        ctx.input_shape = x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return (y, x.view_as(x)) if shares else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, *of_others = grads
        dy_rows = rows_of(dy)
        key, *saved = ctx.saved_tensors
        weights, operands = saved[: ctx.num_weights], saved[ctx.num_weights :]
        needs_dx, _, _, _, _, _, _, _, needs_db, *needs_dw = ctx.needs_input_grad
        ranks: Ranks | None = ctx.ranks
        dx, columns = None, 0
        if ctx.recipe < 0:
            if needs_dx:
                dx = sum(of_others, input_grad(dy, weights, transposed=ctx.transposed))
                dx = dx if ranks is None else ranks.start_sum(dx)
            operands = [dy_rows, rows_of(operands[0])]
        else:
            of_rows, *of_grad = _backward_op(dy_rows, weights, ctx.recipe, ctx.transposed, needs_dx, True in needs_dw)
            dx = of_rows.view(ctx.input_shape) if needs_dx else None
            operands, columns = [*of_grad, *operands], _columns(ctx.recipe, dy_rows.shape[0])
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        if True in needs_dw:
            assert wgrad is not None, "can_compile was asked"
            # A compiler puts the product between the start of the sum, which it reads, and the wait, which writes that.
            wgrad(operands, key, ctx.product, ctx.recipe, columns, None if ranks is None else dx)
        if ranks is not None and dx is not None:
            dx = ranks.finish_sum(dx)
        return (dx, None, None, None, None, None, None, None, db, *[None] * len(weights))


def _columns(recipe: int, tokens: int) -> int:
    """What the transposed copies contract: ``Quantized.columns``."""
    return -(-tokens // 16) * 16 if recipe_of(recipe).spec("grad", columns=True).rotated else tokens


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    recipe: int,
    transposed: bool,
    needs_dx: bool,
    needs_dw: bool,
) -> list[Tensor]:
    by = recipe_of(recipe)
    takes_recipe(by, x, "a compiled linear layer")
    moment: Moment = "forward" if needs_dx or needs_dw else "evaluation"
    y, columns = forward_product(by, x, weights, bias, needs_dx, needs_dw, moment, transposed=transposed)
    return [y, *(() if columns is None else columns.tensors)]


def _fake_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    recipe: int,
    transposed: bool,
    needs_dx: bool,
    needs_dw: bool,
) -> list[Tensor]:
    features = sum(weight.shape[1 if transposed else 0] for weight in weights)
    columns = quantized_like(x.t(), recipe_of(recipe).spec("input", columns=True)) if needs_dw else ()
    return [x.new_empty(x.shape[0], features), *columns]


def _backward(
    dy: Tensor, weights: Sequence[Tensor], recipe: int, transposed: bool, needs_dx: bool, needs_dw: bool
) -> list[Tensor]:
    dx, columns = backward_products(recipe_of(recipe), dy, weights, needs_dx, needs_dw, transposed=transposed)
    return [dy.new_empty(0) if dx is None else dx, *(() if columns is None else columns.tensors)]


def _fake_backward(
    dy: Tensor, weights: Sequence[Tensor], recipe: int, transposed: bool, needs_dx: bool, needs_dw: bool
) -> list[Tensor]:
    features = weights[0].shape[0 if transposed else 1]
    columns = quantized_like(dy.t(), recipe_of(recipe).spec("grad", columns=True)) if needs_dw else ()
    return [dy.new_empty(dy.shape[0], features) if needs_dx else dy.new_empty(0), *columns]


_forward_op = define_operator(
    "quantized_linear(Tensor x, Tensor[] weights, Tensor? bias, int recipe, bool transposed, bool needs_dx, "
    "bool needs_dw) -> Tensor[]",
    _forward,
    _fake_forward,
)
"""x [T, K] -> y [T, N], and the tensors of the input's transposed copy, where weight gradients are needed."""

_backward_op = define_operator(
    "quantized_linear_backward(Tensor dy, Tensor[] weights, int recipe, bool transposed, bool needs_dx, "
    "bool needs_dw) -> Tensor[]",
    _backward,
    _fake_backward,
)
"""dy [T, N] -> dx [T, K] (or nothing), and the tensors of the transposed copy of dy."""
