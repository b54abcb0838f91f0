"""``fused_linear``: the differentiable linear operation of every module in this folder.

Legend: T rows (all leading dims of the input together), K input features, N output features.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.contract.demand import Demand, demand
from ...ddp.contract.target import Place, WgradTarget
from ...ddp.contract.torch_ddp import in_torch_ddp
from ...ddp.torch_internals import current_backward
from ..torch_internals import watch_prehooks
from ..wgrad_queue import WgradQueue

__all__ = [
    "LinearUse",
    "cast",
    "dtype_of_products",
    "fused_linear",
    "input_grad",
    "linear_product",
    "refuse_split_backward",
    "rows_of",
    "run_outside_graph",
]


class LinearUse:
    """The options of one product, all but the tensors. Forwards with equal options share one object.

    owner                name of the module in error messages
    fused                True: each ``dW_i = dy_i^T x`` is one GEMM into the weight's ``main_grad``. False, with a
                         ``queue``: it is added to the weight's ``.grad``
    queue                delayed weight gradients wait there; None: backward computes them
    transposed           the single weight and its ``main_grad`` are [K, N]: ``y = x W + b``, ``dW = x^T dy``
    save_original_input  save the input itself for backward instead of the copy that autocast made; this saves memory
                         if another operation keeps the input anyway
    only_save            save what backward needs and skip the product: for a recompute whose output is not read
    """

    __slots__ = ("_queue", "fused", "only_save", "owner", "save_original_input", "targets", "transposed")

    def __init__(
        self,
        weights: Sequence[Tensor],
        owner: str,
        *,
        fused: bool = True,
        queue: WgradQueue | None = None,
        transposed: bool = False,
        save_original_input: bool = False,
        only_save: bool = False,
    ) -> None:
        self.owner, self.fused, self.transposed = owner, fused, transposed
        self._queue = None if queue is None else weakref.ref(queue)  # weak: modules must not keep a queue alive
        self.save_original_input, self.only_save = save_original_input, only_save
        self.targets = tuple(WgradTarget(weight, owner, fused=fused, queue=queue) for weight in weights)

    @property
    def delays(self) -> bool:
        """Whether weight gradients wait in a queue."""
        return self._queue is not None

    def serves(self, weights: Sequence[Tensor], fused: bool, queue: WgradQueue | None) -> bool:
        """Whether a forward with these arguments may reuse this object.

        Never for a delayed product inside torch's ``DistributedDataParallel``: a new object refuses it by name.
        """
        return (
            (queue is None if self._queue is None else queue is not None and self._queue() is queue)
            and not (queue is not None and in_torch_ddp())
            and self.fused is fused
            and len(self.targets) == len(weights)
            and all(map(WgradTarget.refers_to, self.targets, weights))
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied module has other weights, and creates its own object


def fused_linear(input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, use: LinearUse) -> Tensor:
    """``y = x W^T + b``. Backward: ``dx = dy W``, ``db = sum dy``, and ``dW = dy^T x`` as ``use`` says.

    =======  ======================  ==============================================================
    input    [..., K]                any leading dims
    weights  [N_i, K] each           slices of W along N, in order; usually one
    bias     [N] or None             N = sum of N_i
    y        [..., N]                in autocast's dtype under autocast, like ``nn.Linear``
    =======  ======================  ==============================================================

    Backward reaches the weights through weak references: see ``WgradTarget``. ``autograd.grad`` and
    ``create_graph=True`` get ordinary gradients and write nothing.
    """
    dtype = dtype_of_products(input)
    if not use.save_original_input:
        input = cast(input, dtype)  # not in _FusedLinear: second derivatives need the cast in the graph
    output: Tensor = _apply_directly(input, use, dtype, *weights, bias)
    return output


Forward = Callable[..., Any]


def _run(forward: Forward, module: nn.Module, *args: Any) -> Any:
    return forward(module, *args)


# A graph break, for what a compiled graph cannot hold: see ``LinearModule.way``. The caller passes its
# forward, because type(module).forward may belong to a subclass.
run_outside_graph: Callable[..., Any] = torch.compiler.disable(_run)


# ``to`` and ``reshape`` cost host time even if they change nothing, and a forward and backward have seven of them. On a
# CPU, skipping these calls saves a tiny layer (64 x 64, 16 rows) 9 % of its forward and backward.
def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def rows_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def dtype_of_products(input: Tensor) -> torch.dtype:
    """The dtype that a product of ``input`` is computed in: autocast's under autocast, but for fp64, else its own."""
    dtype, device_type = input.dtype, input.device.type
    if torch.is_autocast_enabled(device_type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return dtype


def linear_product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, *, transposed: bool) -> Tensor:
    """``x W^T + b`` in the dtype of x, to which autocast has weights and bias cast: see ``fused_linear``."""
    weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
    if weight.dtype is not x.dtype and torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.t() if transposed else weight, bias)


def input_grad(dy: Tensor, weights: Sequence[Tensor], *, transposed: bool) -> Tensor:
    """``dy W`` [..., K] in the dtype of dy [..., N]."""
    weight = cast(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), dy.dtype)
    return dy @ (weight.t() if transposed else weight)


class _Like(NamedTuple):
    """What backward needs of a weight if the input needs no gradient."""

    shape: torch.Size
    dtype: torch.dtype


class _FusedLinear(torch.autograd.Function):
    """See ``fused_linear``. ``apply`` takes input, use, dtype of the products, one or more weights, and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, use: LinearUse, dtype: torch.dtype, *weights_and_bias: Any) -> Tensor:
        *weights, bias = weights_and_bias
        x = cast(input, dtype)
        needs_dw = True in ctx.needs_input_grad[3:-1]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(input if needs_dw else None, *weights)
        else:  # backward needs shapes and dtypes only, so the weights may change in place before it
            ctx.save_for_backward(input if needs_dw else None)
            ctx.likes = [_Like(weight.shape, weight.dtype) for weight in weights]
        ctx.use = use
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if use.only_save:
            return x.new_empty(0)
        return linear_product(x, weights, bias, transposed=use.transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        x, *weights = ctx.saved_tensors
        weights = weights or ctx.likes
        use: LinearUse = ctx.use
        needs_dx, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        # Find out who asks for each gradient and where it goes, so that errors are raised before any product.
        # next_functions lists the tensor inputs only: the input, then the weights.
        nodes = ctx.next_functions
        wanted = [demand(nodes[i + 1][0]) if need else Demand.NOTHING for i, need in enumerate(needs_dw)]
        if use.fused and Demand.ACCUMULATE not in wanted:
            refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
        places = [use.targets[i].resolve() if want is Demand.ACCUMULATE else None for i, want in enumerate(wanted)]

        dx = None
        if needs_dx:
            dx = cast(input_grad(dy, weights, transposed=use.transposed), ctx.input_dtype)
        dy_rows = rows_of(dy)
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        if x is None:
            return (dx, None, None, *[None] * len(weights), db)
        x_rows = cast(rows_of(x), dy.dtype)
        if len(weights) == 1:
            return dx, None, None, _weight_grad(ctx, 0, weights[0], wanted[0], places[0], dy_rows, x_rows), db
        parts = dy_rows.split([weight.shape[0] for weight in weights], dim=1)
        dws = [_weight_grad(ctx, i, weight, wanted[i], places[i], parts[i], x_rows) for i, weight in enumerate(weights)]
        return (dx, None, None, *dws, db)


# Function.apply in Python only adds support for torch.func transforms, which never get here. Its C++ base saves a tiny
# layer (64 x 64, 16 rows) 3 % of its forward and backward.
_apply_directly = super(torch.autograd.Function, _FusedLinear).apply


def _weight_grad(
    ctx: Any,
    index: int,
    weight: Tensor | _Like,
    want: Demand,
    place: Place | None,
    dy: Tensor,
    x: Tensor,
) -> Tensor | None:
    """What backward returns for one weight: dy [T, N_i], x [T, K]."""
    use: LinearUse = ctx.use
    if place is None:
        if want is Demand.NOTHING:
            return None
        return cast(x.t() @ dy if use.transposed else dy.t() @ x, weight.dtype)
    if use.delays:
        x = x.detach()  # the queue must not keep the graph of x, which keeps the weights
    backward = ctx.outer_backward if ctx.outer_backward != -1 else current_backward()
    left, right = (x, dy) if use.transposed else (dy, x)
    return use.targets[index].deliver(*place, left, right, backward)


def refuse_split_backward(ctx: Any, returns: bool) -> None:
    """Raise in the second half of a split backward of torch.distributed.pipelining (inputs first, then weights).

    torch writes the weight gradients of the second half to ``.grad`` directly, so that no provider's hook sees them.
    Each half alone looks like ``autograd.grad`` of a user. The prehook on this node distinguishes torch's split.
    """
    if not getattr(ctx, "has_prehook", False):
        return
    if not returns:
        ctx.ran_for_inputs = True
    elif getattr(ctx, "ran_for_inputs", False) and not torch.is_grad_enabled():
        raise RuntimeError(
            f"{ctx.use.owner}: this backward was split into one for inputs and one for weights, as zero-bubble "
            f"schedules of torch.distributed.pipelining do with its own PipelineStage, and the weight gradient would "
            f"bypass main_grad; use maingrad.te_integration.pipeline.PipelineStage"
        )


watch_prehooks(_FusedLinear)
