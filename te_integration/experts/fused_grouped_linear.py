"""``fused_grouped_linear``: the differentiable grouped operation of every module with experts.

Legend: E experts, T rows, K input features, N output features. Expert e has the rows from offsets[e] up to, but not
including, offsets[e + 1]. Rows from offsets[E] on are padding.

A gradient goes the way that ``dense/linear.py`` tells, and comments have the numbers of its steps. Step 2.1 is in the
forward of each module, and 2.2 in ``GroupedModule.multiply_rows``. ``GroupedWgrad`` (``ddp/contract``) computes in 3.4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...ddp.torch_internals import current_backward, watch_prehooks
from ...kernels import PerExpert, grouped_bias_grad, grouped_linear, grouped_scale_grad
from ..dense.linear import ProductUse, wanted_and_places, weight_grads
from ..dense.products import cast, dtype_of_products, refuse_in_transform

__all__ = ["GroupedCall", "GroupedProducts", "fused_grouped_linear", "parts_of", "per_expert"]


class GroupedProducts(Protocol):
    """How the products with a layer's experts are computed: ``PlainProducts``, or of quantised operands."""

    def output(
        self, ctx: Any, input: Tensor, weights: Sequence[Tensor], bias: PerExpert | None, scale: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """y [T, N], and what waits for the weight gradients, if any will come: of the input [T, K]."""

    def gradients(
        self, ctx: Any, dy: Tensor, weights: Sequence[Tensor], of_input: Sequence[Tensor]
    ) -> tuple[Tensor | None, Any, Any]:
        """dx [T, K], where it is needed, and dy and x as the weight gradients take them."""


class GroupedCall(NamedTuple):
    """What one forward passes to its autograd function, except the tensors that may need a gradient."""

    offsets: Tensor
    dtype: torch.dtype
    """Dtype of the products."""
    num_weights: int
    packed_bias: bool
    out: Tensor | None
    grad_input: Tensor | None
    products: GroupedProducts


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
    products: GroupedProducts | None = None,
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

    ``autograd.grad`` gets ordinary gradients and writes nothing. ``create_graph=True`` raises ``RuntimeError``.
    ``products`` None: of the tensors as they are.
    """
    dtype = dtype_of_products(input)
    _check_buffer(use.owner, "out", out, (input.shape[0], _features(weights, use)), dtype, input.device)
    _check_buffer(use.owner, "grad_input", grad_input, tuple(input.shape), dtype, input.device)
    if not use.save_original_input:
        input = cast(input, dtype)
    elif grad_input is not None and input.dtype is not dtype:
        raise ValueError(f"{use.owner}: grad_input with save_original_input needs an input of {dtype}")
    experts = (weights,) if isinstance(weights, Tensor) else tuple(weights)
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    call = GroupedCall(
        offsets, dtype, len(experts), isinstance(bias, Tensor), out, grad_input, products or _PLAIN_PRODUCTS
    )
    refuse_in_transform(use.owner)
    output: Tensor = _apply_directly(input, use, call, *experts, *biases, bias_scale)
    return output


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


def _written(buffer: Tensor) -> Tensor:
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
        needs_db, needs_ds = True in needs[count:-1], needs[-1]
        ctx.use, ctx.call = use, call
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weights[0].dtype
        ctx.bias_dtype = biases[0].dtype if biases else None
        ctx.scale_dtype = None if scale is None else scale.dtype
        bias = per_expert(biases, call.packed_bias, call.dtype) if biases else None
        y, of_input = call.products.output(ctx, input, weights, bias, scale)
        # Step 2.3: what backward needs is saved.
        ctx.save_for_backward(
            scale if needs_db else None,
            *(weights if needs_dx else ()),
            *(biases if needs_ds else ()),
            *of_input,
        )
        if call.out is None:
            return y
        ctx.call = call._replace(out=None)
        return _written(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        call: GroupedCall = ctx.call
        use: ProductUse = ctx.use
        count = call.num_weights
        needs_dx, _, _, *needs = ctx.needs_input_grad
        # Steps 3.1 and 3.2: who asks for each weight's gradient, and where it goes.
        wanted, places = wanted_and_places(ctx, needs[:count])
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{use.owner}: second derivatives (create_graph=True) of experts' products are not defined; compute "
                f"this forward with a Linear for each expert, or with transformers' own experts (unconvert)"
            )
        scale, *others = ctx.saved_tensors
        weights, others = (others[:count], others[count:]) if needs_dx else ((), others)
        num_biases = len(needs) - count - 1 if needs[-1] else 0
        biases, of_input = others[:num_biases], others[num_biases:]
        # Step 3.3: the gradient of the input. Those of the biases come last.
        dx, left, right = call.products.gradients(ctx, dy, weights, of_input)
        if dx is not None:
            dx = cast(dx, ctx.input_dtype) if call.grad_input is None else _written(dx)
        dws: list[Tensor | None] = [None] * count
        if of_input:
            if use.transposed:
                left, right = right, left
            # Steps 3.4 and 3.5: one product for the weights of all experts, now or from a queue; then the flags.
            dws = weight_grads(ctx, wanted, places, (left, right, call.offsets))
        return (dx, None, None, *dws, *_bias_grads(ctx, dy, scale, biases))


# Its C++ base is faster: see ``dense/linear.py``. torch.func's transforms are refused.
_apply_directly = super(torch.autograd.Function, _FusedGroupedLinear).apply
watch_prehooks(_FusedGroupedLinear)


class PlainProducts:
    """``GroupedProducts`` of the tensors as they are."""

    def output(
        self, ctx: Any, input: Tensor, weights: Sequence[Tensor], bias: PerExpert | None, scale: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See ``GroupedProducts``."""
        call: GroupedCall = ctx.call
        y = grouped_linear(
            cast(input, call.dtype),
            per_expert(weights, ctx.use.packed, call.dtype),
            call.offsets,
            bias=bias,
            bias_scale=scale,
            out=call.out,
            transposed=ctx.use.transposed,
        )
        return y, (input,) if True in ctx.needs_input_grad[3 : 3 + call.num_weights] else ()

    def gradients(
        self, ctx: Any, dy: Tensor, weights: Sequence[Tensor], of_input: Sequence[Tensor]
    ) -> tuple[Tensor | None, Any, Any]:
        """See ``GroupedProducts``."""
        call: GroupedCall = ctx.call
        use: ProductUse = ctx.use
        dx = None
        if weights:
            matrices = per_expert(weights, use.packed, dy.dtype)
            dx = grouped_linear(dy, matrices, call.offsets, out=call.grad_input, transposed=not use.transposed)
        return dx, dy, cast(of_input[0], dy.dtype) if of_input else None


_PLAIN_PRODUCTS = PlainProducts()


def _bias_grads(ctx: Any, dy: Tensor, scale: Tensor | None, biases: Sequence[Tensor]) -> list[Tensor | None]:
    """What backward returns for each bias, and for the scale of the bias: dy [T, N]."""
    call: GroupedCall = ctx.call
    *needs_db, needs_ds = ctx.needs_input_grad[3 + call.num_weights :]
    dbs: list[Tensor | None] = [None] * len(needs_db)
    if True in needs_db:
        db = grouped_bias_grad(dy, call.offsets, scale=scale, dtype=ctx.bias_dtype)
        dbs = parts_of(db, call.packed_bias, needs_db)
    ds = None
    if needs_ds:
        ds = grouped_scale_grad(dy, per_expert(biases, call.packed_bias, dy.dtype), call.offsets)
        ds = cast(ds, ctx.scale_dtype)
    return [*dbs, ds]
