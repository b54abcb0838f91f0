"""``fused_linear``: the one differentiable linear operation behind every module here.

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

__all__ = ["LinearUse", "fused_linear", "refuse_split_backward", "run_outside_graph"]


class LinearUse:
    """How one product is used: everything about it that is not a tensor. Forwards that agree on all of it share one.

    owner                the module, for errors
    fused                each ``dW_i = dy_i^T x`` is one GEMM into that weight's ``main_grad``; otherwise, with a
                         ``queue``, it is added to the weight's ``.grad``
    queue                weight gradients wait there; None: they are computed in backward
    transposed           the one weight and its ``main_grad`` are [K, N]: ``y = x W + b``, ``dW = x^T dy``
    save_original_input  keep the input for backward as it came, and not as autocast cast it, where somebody else keeps
                         it anyway
    only_save            do all that backward needs and leave the product out, for a recompute that nobody reads
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
        self._queue = None if queue is None else weakref.ref(queue)  # a module keeps this object
        self.save_original_input, self.only_save = save_original_input, only_save
        self.targets = tuple(WgradTarget(weight, owner, fused=fused, queue=queue) for weight in weights)

    @property
    def delays(self) -> bool:
        """Whether weight gradients wait in a queue."""
        return self._queue is not None

    def serves(self, weights: Sequence[Tensor], fused: bool, queue: WgradQueue | None) -> bool:
        """Whether a forward with these may use this object again. Delayed gradients are checked anew in a wrapper of
        torch's, which may have come since."""
        return (
            (queue is None if self._queue is None else queue is not None and self._queue() is queue)
            and not (queue is not None and in_torch_ddp())
            and self.fused is fused
            and len(self.targets) == len(weights)
            and all(map(WgradTarget.refers_to, self.targets, weights))
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a module has weights of its own, and makes its own


def fused_linear(input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, use: LinearUse) -> Tensor:
    """``y = x W^T + b``; in backward ``dx = dy W``, ``db = sum dy``, and ``dW = dy^T x`` goes where ``use`` says.

    =======  ======================  ==============================================================
    input    [..., K]                any leading dims
    weights  [N_i, K] each           slices of W along N, in order; usually one
    bias     [N] or None             N = sum of N_i
    y        [..., N]                in autocast's dtype under autocast, as ``nn.Linear``'s
    =======  ======================  ==============================================================

    The weights are used as data and reached through weak references: see ``WgradTarget``. ``autograd.grad`` and a graph
    of the gradients get ordinary gradients and write nothing.
    """
    dtype, device_type = input.dtype, input.device.type
    if torch.is_autocast_enabled(device_type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    if not use.save_original_input:
        input = _cast(input, dtype)  # outside the function: second derivatives need a saved input that has a graph
    output: Tensor = _apply_directly(input, use, dtype, *weights, bias)  # type: ignore[no-untyped-call]
    return output


Forward = Callable[..., Any]


def _run(forward: Forward, module: nn.Module, *args: Any) -> Any:
    return forward(module, *args)


# A graph break and an autograd function, and not a custom op: the op's backward would have to hide its write to
# main_grad and its flag from functionalisation, which may drop, reorder or repeat what it cannot see, and a compiled
# backward runs no Python between the GEMM and the hook that launches the bucket. The break costs one guard check per
# layer; everything between the layers is compiled. The caller names its forward: type(module)'s may be a subclass's.
run_outside_graph: Callable[..., Any] = torch.compiler.disable(_run)


# ``to`` and ``reshape`` cost host time where they change nothing, and a forward and backward have seven of them. On a
# CPU, leaving them out saves a tiny layer (64 x 64, 16 rows) 9 % of its forward and backward.
def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


class _Like(NamedTuple):
    """What backward asks of a weight where nothing is multiplied by it."""

    shape: torch.Size
    dtype: torch.dtype


class _FusedLinear(torch.autograd.Function):
    """See ``fused_linear``. ``apply`` takes input, use, dtype of the products, one or more weights, and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, use: LinearUse, dtype: torch.dtype, *weights_and_bias: Any) -> Tensor:
        *weights, bias = weights_and_bias
        x = _cast(input, dtype)
        needs_dw = True in ctx.needs_input_grad[3:-1]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(input if needs_dw else None, *weights)
        else:  # backward asks of their shapes and dtypes alone: they may change in place until then
            ctx.save_for_backward(input if needs_dw else None)
            ctx.likes = [_Like(weight.shape, weight.dtype) for weight in weights]
        ctx.use = use
        # A forward that runs in a backward is a reentrant recompute, whose nested backward belongs to that one.
        ctx.outer_backward = current_backward()
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if use.only_save:
            return x.new_empty(0)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if weight.dtype is not dtype and torch.is_autocast_enabled(input.device.type):
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return F.linear(x, weight.t() if use.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        x, *weights = ctx.saved_tensors
        weights = weights or ctx.likes
        use: LinearUse = ctx.use
        needs_dx, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        # Who asks, and where each gradient goes, before any product. next_functions has the tensor inputs only: the
        # input, then the weights.
        nodes = ctx.next_functions
        wanted = [demand(nodes[i + 1][0]) if need else Demand.NOTHING for i, need in enumerate(needs_dw)]
        if use.fused and Demand.ACCUMULATE not in wanted:
            refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
        places = [use.targets[i].resolve() if want is Demand.ACCUMULATE else None for i, want in enumerate(wanted)]

        dx = None
        if needs_dx:
            weight = _cast(weights[0] if len(weights) == 1 else torch.cat(weights), dy.dtype)
            dx = _cast(dy @ (weight.t() if use.transposed else weight), ctx.input_dtype)
        dy_rows = _rows(dy)
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        if x is None:
            return (dx, None, None, *[None] * len(weights), db)
        x_rows = _cast(_rows(x), dy.dtype)
        if len(weights) == 1:
            return dx, None, None, _weight_grad(ctx, 0, weights[0], wanted[0], places[0], dy_rows, x_rows), db
        parts = dy_rows.split([weight.shape[0] for weight in weights], dim=1)
        dws = [_weight_grad(ctx, i, weight, wanted[i], places[i], parts[i], x_rows) for i, weight in enumerate(weights)]
        return (dx, None, None, *dws, db)


# Function.apply is Python around this C++ function, for torch.func's transforms, which never get here. Leaving it out
# saves a tiny layer (64 x 64, 16 rows) 3 % of its forward and backward.
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
        return _cast(x.t() @ dy if use.transposed else dy.t() @ x, weight.dtype)
    if use.delays:
        x = x.detach()  # a queue must not hold the graph that made x, and through it the weights
    backward = ctx.outer_backward if ctx.outer_backward != -1 else current_backward()
    left, right = (x, dy) if use.transposed else (dy, x)
    return use.targets[index].deliver(*place, left, right, backward)


def refuse_split_backward(ctx: Any, returns: bool) -> None:
    """Raise in the second half of torch.distributed.pipelining's split: a prehook, inputs alone, then weights alone.

    Its captured weight gradients are put into ``.grad`` by hand, where no provider's hook sees them. ``autograd.grad``
    of a user looks like each half, and both may be asked of one graph; the prehook on this node is what tells.
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
