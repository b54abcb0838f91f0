"""``fused_linear``: the differentiable linear operation of every module in this folder.

Legend: T rows (all leading dims of the input together), K input features, N output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ...ddp.contract.delayed import Operands
from ...ddp.contract.target import Demand, Place, WgradProduct, WgradTarget, demand
from ...ddp.contract.torch_wrappers import in_torch_ddp
from ...ddp.torch_internals import are_transforms_active, current_backward
from ..torch_internals import watch_prehooks
from ..wgrad_queue import WgradQueue

__all__ = [
    "ProductUse",
    "cast",
    "dtype_of_products",
    "fused_linear",
    "in_transform",
    "input_grad",
    "linear_product",
    "refuse_in_transform",
    "refuse_split_backward",
    "rows_of",
    "wanted_and_places",
    "weight_grads",
]


class ProductUse:
    """The options of one product, all but the tensors. Forwards with equal options share one object.

    weights              of the product, for which ``product`` computes the gradients
    names                of the weights in error messages
    owner                name of the module in error messages
    fused                each weight gradient is one GEMM into the weight's ``main_grad``. False, with a ``queue``: it
                         is added to the weight's ``.grad``. False without a queue: autograd delivers it
    queue                delayed weight gradients wait there; None: backward computes them
    transposed           weights and their ``main_grad`` are [K, N] each: ``y = x W + b``, ``dW = x^T dy``
    save_original_input  save the input itself for backward instead of the copy that autocast made; this saves memory
                         if another operation keeps the input anyway
    only_save            save what backward needs and skip the product: for a recompute whose output is not read
    """

    __slots__ = (
        "fused",
        "only_save",
        "owner",
        "packed",
        "product",
        "save_original_input",
        "target",
        "transposed",
    )

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        product: WgradProduct,
        owner: str,
        *,
        fused: bool = True,
        queue: WgradQueue | None = None,
        transposed: bool = False,
        save_original_input: bool = False,
        only_save: bool = False,
    ) -> None:
        self.owner, self.fused, self.transposed = owner, fused, transposed
        self.save_original_input, self.only_save = save_original_input, only_save
        self.product = product
        self.packed = weights[0].dim() == 3
        """All experts' weights are one [E, N, K]."""
        self.target: WgradTarget | None = None
        if fused or queue is not None:
            self.target = WgradTarget(weights, names, product, owner, fused=fused, queue=queue)

    def serves(self, weights: Sequence[Tensor], fused: bool, queue: WgradQueue | None) -> bool:
        """Whether a forward with these arguments may reuse this object.

        Never for a delayed product inside torch's ``DistributedDataParallel``: a new object refuses it by name.
        """
        if self.target is None:
            same = queue is None
        else:
            same = self.target.delays_into(queue) and self.target.refers_to(weights)
        return (
            same and self.fused is fused and not (queue is not None and in_torch_ddp()) and self.product.fits(weights)
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied module has other weights, and creates its own object


def fused_linear(input: Tensor, weights: Sequence[Tensor], bias: Tensor | None, use: ProductUse) -> Tensor:
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


def in_transform() -> bool:
    """Whether a transform or forward-mode AD is active, for any tensor."""
    return are_transforms_active() or forward_ad._current_level >= 0


def refuse_in_transform(owner: str) -> None:
    """Raise ``RuntimeError`` if a transform is active: ``owner`` implements backward only."""
    if in_transform():
        raise RuntimeError(
            f"{owner} has no rules for torch.func's transforms (grad, vmap, jvp, ...), nor for forward-mode "
            f"derivatives; use torch.autograd.grad and loops here, or a Linear for each expert, which has them"
        )


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


class _FusedLinear(torch.autograd.Function):
    """See ``fused_linear``. ``apply`` takes input, use, dtype of the products, one or more weights, and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, use: ProductUse, dtype: torch.dtype, *weights_and_bias: Any) -> Tensor:
        *weights, bias = weights_and_bias
        x = cast(input, dtype)
        needs_dw = True in ctx.needs_input_grad[3:-1]
        # Step 2 of docs/by_hand.py: what the two products of backward need. Weights are left out where no dx is wanted:
        # they may then change in place before backward.
        ctx.save_for_backward(input if needs_dw else None, *(weights if ctx.needs_input_grad[0] else ()))
        ctx.use = use
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weights[0].dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if use.only_save:
            return x.new_empty(0)
        return linear_product(x, weights, bias, transposed=use.transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        x, *weights = ctx.saved_tensors
        use: ProductUse = ctx.use
        needs_dx, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        # Step 3 of docs/by_hand.py, in three. Who asks for each weight gradient, and where it goes: errors are raised
        # before any product.
        wanted, places = wanted_and_places(ctx, needs_dw)
        # The gradients of input and bias.
        dx = None
        if needs_dx:
            dx = cast(input_grad(dy, weights, transposed=use.transposed), ctx.input_dtype)
        dy_rows = rows_of(dy)
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        # The weight gradients: into main_grad, into a queue, or to autograd.
        if x is None:
            return (dx, None, None, *[None] * len(needs_dw), db)
        x_rows = cast(rows_of(x), dy.dtype)
        operands = (x_rows, dy_rows) if use.transposed else (dy_rows, x_rows)
        return (dx, None, None, *weight_grads(ctx, wanted, places, operands), db)


# Function.apply in Python only adds support for torch.func transforms, which never get here. Its C++ base saves a tiny
# layer (64 x 64, 16 rows) 3 % of its forward and backward.
_apply_directly = super(torch.autograd.Function, _FusedLinear).apply


def wanted_and_places(ctx: Any, needs_dw: Sequence[bool]) -> tuple[list[Demand], list[Place | None]]:
    """In the backward of a product: what becomes of each weight's gradient, and where it goes if ours to deliver.

    ``ctx.next_functions`` lists the tensor inputs only: the input, then the weights.
    """
    use: ProductUse = ctx.use
    nodes = ctx.next_functions
    wanted = [demand(nodes[i + 1][0]) if need else Demand.NOTHING for i, need in enumerate(needs_dw)]
    if use.target is None:
        return wanted, [None] * len(wanted)
    if use.fused and Demand.ACCUMULATE not in wanted:
        refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
    return wanted, use.target.resolve([want is Demand.ACCUMULATE for want in wanted])


def weight_grads(
    ctx: Any, wanted: Sequence[Demand], places: Sequence[Place | None], operands: Operands
) -> list[Tensor | None]:
    """What backward returns for each weight of a product; gradients that have a place are delivered there.

    operands  what ``ctx.use.product`` takes
    """
    use: ProductUse = ctx.use
    results: list[Tensor | None] = []
    if None in places:
        returned = [place is None and want is not Demand.NOTHING for place, want in zip(places, wanted, strict=True)]
        if True in returned:
            results = use.product.gradients(returned, ctx.weight_dtype, *operands)
    if use.target is None or not any(places):
        return results or [None] * len(wanted)
    if use.target.delays:  # the queue must not keep the graph of the input, which keeps the weights
        operands = [each.detach() if isinstance(each, Tensor) else each for each in operands]
    # The nested backward of a reentrant recompute counts as part of the backward around it.
    backward = ctx.outer_backward if ctx.outer_backward != -1 else current_backward()
    delivered = use.target.deliver(places, operands, backward)
    return (
        [given if place else own for given, place, own in zip(delivered, places, results, strict=True)]
        if results
        else delivered
    )


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
