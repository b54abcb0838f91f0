"""``fused_grouped_linear``: the differentiable grouped operation of every module with experts.

Legend: E experts, T rows, K input features, N output features. Expert e has the rows from offsets[e] up to, but not
including, offsets[e + 1]. Rows from offsets[E] on are padding.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ddp.contract.target import Demand, Place
from ...ddp.torch_internals import current_backward
from ...kernels import PerExpert, grouped_bias_grad, grouped_dgrad, grouped_linear, grouped_scale_grad
from ..dense.fused_linear import (
    ProductUse,
    cast,
    dtype_of_products,
    refuse_in_transform,
    wanted_and_places,
    weight_grads,
)
from ..recipes import Recipe
from ..torch_internals import watch_prehooks
from .grouped_products import (
    differentiable_bias_grad,
    differentiable_dgrad,
    differentiable_linear,
    differentiable_scale_grad,
    differentiable_wgrad,
)

__all__ = [
    "GroupedCall",
    "arguments_of",
    "bias_grads",
    "fused_grouped_linear",
    "needs_dw_of",
    "parts_of",
    "per_expert",
    "record_product",
    "without_autocast",
    "written",
]


class GroupedCall(NamedTuple):
    """What one forward passes to its autograd function, except the tensors that may need a gradient."""

    offsets: Tensor
    dtype: torch.dtype
    """Dtype of the products."""
    num_weights: int
    packed_bias: bool
    out: Tensor | None
    grad_input: Tensor | None
    recipe: Recipe | None = None
    """The recipe of quantised products: see ``quantized_grouped_linear``."""
    trains: bool = True
    """Grad mode is on; quantised products save nothing otherwise."""


def fused_grouped_linear(
    input: Tensor,
    weights: PerExpert,
    bias: PerExpert | None,
    offsets: Tensor,
    use: ProductUse,
    *,
    bias_scale: Tensor | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e`` for row t of expert e, and its gradients; pad rows are zeros.

    ==========  =========================  =================================================================
    input       [T, K]                     x
    weights     [E, N, K], or E x [N, K]   W: one packed tensor, or one per expert
    bias        [E, N], or E x [N]         b; None: no bias
    offsets     [E + 1]                    int64, from 0 to at most T; on the device, never read by the host
    bias_scale  [T]                        s; None: ones
    out         [T, N]                     memory for y
    grad_input  [T, K]                     memory for dx
    y           [T, N]                     in autocast's dtype under autocast, like ``nn.Linear``
    ==========  =========================  =================================================================

    Backward: ``dx[t] = dy[t] W_e``; ``db_e`` is the sum of ``s[t] dy[t]`` over the expert's rows;
    ``ds[t] = dy[t] . b_e``; ``dW_e = dy_e^T x_e`` goes where ``use`` says, decided for each expert by the return table
    of the contract. Pad rows of x and dy are never read. Backward reaches the weights through weak references.

    ``out`` and ``grad_input`` belong to the caller: tensors of the products' dtype that require no gradient. y and dx
    are views of this memory. Do not overwrite ``out`` before every reader of y has finished, including its backward,
    and ``grad_input`` before every reader of dx has finished (the ``.grad`` of a leaf reads it).

    ``autograd.grad`` and ``create_graph=True`` get ordinary gradients and write nothing.
    """
    input, call, tensors = arguments_of(input, weights, bias, offsets, use, bias_scale, out, grad_input)
    output: Tensor = _apply_directly(input, use, call, *tensors)
    return output


def arguments_of(
    input: Tensor,
    weights: PerExpert,
    bias: PerExpert | None,
    offsets: Tensor,
    use: ProductUse,
    bias_scale: Tensor | None,
    out: Tensor | None,
    grad_input: Tensor | None,
) -> tuple[Tensor, GroupedCall, tuple[Tensor | None, ...]]:
    """What ``apply`` takes, for the arguments of ``fused_grouped_linear``: checked, and cast to the products' dtype."""
    dtype = dtype_of_products(input)
    _check_buffer(use.owner, "out", out, (input.shape[0], _features(weights, use)), dtype, input.device)
    _check_buffer(use.owner, "grad_input", grad_input, tuple(input.shape), dtype, input.device)
    if not use.save_original_input:
        input = cast(input, dtype)
    elif grad_input is not None and input.dtype is not dtype:
        raise ValueError(f"{use.owner}: grad_input with save_original_input needs an input of {dtype}")
    experts = (weights,) if isinstance(weights, Tensor) else tuple(weights)
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    call = GroupedCall(offsets, dtype, len(experts), isinstance(bias, Tensor), out, grad_input)
    refuse_in_transform(use.owner)
    return input, call, (*experts, *biases, bias_scale)


def _features(weights: PerExpert, use: ProductUse) -> int:
    return (weights if isinstance(weights, Tensor) else weights[0]).shape[-1 if use.transposed else -2]


def _check_buffer(
    owner: str,
    name: str,
    buffer: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if buffer is None:
        return
    if buffer.requires_grad:
        raise ValueError(f"{owner}: {name} is memory to be written, and must not require a gradient")
    if buffer.shape != shape or buffer.dtype is not dtype or buffer.device != device:
        raise ValueError(
            f"{owner}: {name} must be {shape}, {dtype} on {device}; got {tuple(buffer.shape)}, {buffer.dtype} on "
            f"{buffer.device}"
        )


def parts_of(gradient: Tensor, packed: bool, needs: Sequence[bool]) -> list[Tensor | None]:
    """A gradient [E, ...] as the gradients of E tensors, or of one packed tensor; None where none is needed."""
    parts = (gradient,) if packed else gradient.unbind()
    return [part if need else None for part, need in zip(parts, needs, strict=True)]


def per_expert(tensors: Sequence[Tensor], packed: bool, dtype: torch.dtype) -> PerExpert:
    first = tensors[0]
    if packed:
        return cast(first, dtype)
    if all(tensor.dtype is dtype for tensor in tensors):
        return tensors
    together = first.new_empty(len(tensors), *first.shape, dtype=dtype)  # needs no table of pointers
    torch._foreach_copy_(together.unbind(), tuple(tensors))
    return together


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off: operands are cast already, and fp32 sums must stay fp32."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def written(buffer: Tensor) -> Tensor:
    """A view, for autograd, of memory that a kernel wrote: the caller's tensor itself gets no history."""
    if not buffer.is_inference():  # an inference tensor has no version
        torch.autograd.graph.increment_version(buffer)  # a graph that saved the old content must fail
    return buffer.detach()


class _FusedGroupedLinear(torch.autograd.Function):
    """See ``fused_grouped_linear``. ``apply`` takes input, use, call, weights, biases, and the scale of the bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, use: ProductUse, call: GroupedCall, *tensors: Any) -> Tensor:
        count = call.num_weights
        weights, biases, scale = tensors[:count], tensors[count:-1], tensors[-1]
        needs_dx, _, _, *needs = ctx.needs_input_grad
        needs_dw, needs_db, needs_ds = True in needs[:count], True in needs[count:-1], needs[-1]
        ctx.save_for_backward(
            input if needs_dw else None,
            call.offsets,
            scale if needs_db else None,
            *(weights if needs_dx else ()),
            *(biases if needs_ds else ()),
        )
        record_product(ctx, input, use, call, tensors)
        x = cast(input, call.dtype)
        with without_autocast(x.device.type):
            y = grouped_linear(
                x,
                per_expert(weights, use.packed, call.dtype),
                call.offsets,
                bias=per_expert(biases, call.packed_bias, call.dtype) if biases else None,
                bias_scale=scale,
                out=call.out,
                transposed=use.transposed,
            )
        return y if call.out is None else written(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted, places = wanted_and_places(ctx, needs_dw_of(ctx))
        with without_autocast(grads[0].device.type):
            if torch.is_grad_enabled():
                return _gradients_with_graph(ctx, grads[0], wanted)
            return _gradients(ctx, grads[0], wanted, places)


# Its C++ base is faster: see ``dense/fused_linear.py``. torch.func's transforms are refused.
_apply_directly = super(torch.autograd.Function, _FusedGroupedLinear).apply
watch_prehooks(_FusedGroupedLinear)


def record_product(ctx: Any, input: Tensor, use: ProductUse, call: GroupedCall, tensors: Sequence[Any]) -> None:
    """In forward: what backward needs beside tensors."""
    biases, scale = tensors[call.num_weights : -1], tensors[-1]
    ctx.use, ctx.call = use, call._replace(out=None)
    # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
    ctx.outer_backward = current_backward()
    ctx.input_dtype, ctx.weight_dtype = input.dtype, tensors[0].dtype
    ctx.bias_dtype = biases[0].dtype if biases else None
    ctx.scale_dtype = None if scale is None else scale.dtype


def needs_dw_of(ctx: Any) -> Sequence[bool]:
    """Whether autograd needs each weight's gradient, in the order of ``apply``'s arguments."""
    needs: Sequence[bool] = ctx.needs_input_grad[3 : 3 + ctx.call.num_weights]
    return needs


def _gradients(
    ctx: Any, dy: Tensor, wanted: Sequence[Demand], places: Sequence[Place | None]
) -> tuple[Tensor | None, ...]:
    """What backward returns for each argument of ``apply``: dy [T, N]."""
    call: GroupedCall = ctx.call
    use: ProductUse = ctx.use
    x, offsets, scale, *others = ctx.saved_tensors
    needs_dx = ctx.needs_input_grad[0]
    weights = others[: call.num_weights] if needs_dx else ()

    dx = None
    if needs_dx:
        product = grouped_linear if use.transposed else grouped_dgrad
        dx = product(dy, per_expert(weights, use.packed, dy.dtype), offsets, out=call.grad_input)
        dx = cast(dx, ctx.input_dtype) if call.grad_input is None else written(dx)
    dbs_and_ds = bias_grads(ctx, dy, offsets, scale, others[len(weights) :])
    dws: list[Tensor | None] = [None] * len(wanted)
    if x is not None:
        x = cast(x, dy.dtype)
        dws = weight_grads(ctx, wanted, places, (x, dy, offsets) if use.transposed else (dy, x, offsets))
    return (dx, None, None, *dws, *dbs_and_ds)


def bias_grads(
    ctx: Any, dy: Tensor, offsets: Tensor, scale: Tensor | None, biases: Sequence[Tensor]
) -> list[Tensor | None]:
    """What backward returns for each bias, and for the scale of the bias: dy [T, N]."""
    call: GroupedCall = ctx.call
    *needs_db, needs_ds = ctx.needs_input_grad[3 + call.num_weights :]
    dbs: list[Tensor | None] = [None] * len(needs_db)
    if True in needs_db:
        db = grouped_bias_grad(dy, offsets, scale=scale, dtype=ctx.bias_dtype)
        dbs = parts_of(db, call.packed_bias, needs_db)
    ds = None
    if needs_ds:
        ds = cast(grouped_scale_grad(dy, per_expert(biases, call.packed_bias, dy.dtype), offsets), ctx.scale_dtype)
    return [*dbs, ds]


def _gradients_with_graph(ctx: Any, dy: Tensor, wanted: Sequence[Demand]) -> tuple[Tensor | None, ...]:
    """``_gradients`` under ``create_graph=True``: differentiable, and without a write to ``main_grad``."""
    call: GroupedCall = ctx.call
    x, offsets, scale, *others = ctx.saved_tensors
    needs_dx, _, _, *needs = ctx.needs_input_grad
    needs_db, needs_ds = needs[call.num_weights : -1], needs[-1]
    weights = others[: call.num_weights] if needs_dx else ()
    biases = others[len(weights) :]

    def packed(tensors: Sequence[Tensor], are_packed: bool) -> Tensor:
        return (tensors[0] if are_packed else torch.stack(tuple(tensors))).to(dy.dtype)

    dx = ds = None
    if needs_dx:
        product = differentiable_linear if ctx.use.transposed else differentiable_dgrad
        dx = product(dy, packed(weights, ctx.use.packed), offsets).to(ctx.input_dtype)
    dws: list[Tensor | None] = [None] * len(wanted)
    if x is not None:
        left, right = (x.to(dy.dtype), dy) if ctx.use.transposed else (dy, x.to(dy.dtype))
        dw = differentiable_wgrad(left, right, offsets).to(ctx.weight_dtype)
        dws = parts_of(dw, ctx.use.packed, [want is not Demand.NOTHING for want in wanted])
    dbs: list[Tensor | None] = [None] * len(needs_db)
    if True in needs_db:
        db = differentiable_bias_grad(dy, scale, offsets).to(ctx.bias_dtype)
        dbs = parts_of(db, call.packed_bias, needs_db)
    if needs_ds:
        ds = differentiable_scale_grad(dy, packed(biases, call.packed_bias), offsets).to(ctx.scale_dtype)
    return (dx, None, None, *dws, *dbs, ds)
