"""A stand-in for modules of Transformer Engine that ask for their weights, and for the protocol that they speak.

Transformer Engine from 2.19 on has the protocol in ``distributed_weight.py``, with functions of these names, and its
``Linear``, ``LayerNormLinear`` and ``GroupedLinear`` call them. As there:

- a function of autograd gets the registered weights, and saves them, not what they gave in forward. What comes back in
  backward is asked; of plain weights a weak reference tells the accumulator;
- the first weight of a group is asked for all; every weight is asked for its own ``grad_buffer``;
- ``get_main_grad`` of a weight with ``__fsdp_param__`` is preferred to ``grad_buffer``;
- the weight itself is asked for in backward where its input's gradient is;
- the product of a distributed weight overwrites its buffer, and ``finalize_group_grads`` gets the buffers, or tensors
  of ``main_grad``'s dtype where the module does not fuse;
- what ``finalize_group_grads`` returns goes to autograd. The operations (``te.ops``) discard it, return memory with any
  contents instead, and ask for the buffers before they ask for the weights.
"""

import weakref
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = [
    "AskingGrouped",
    "AskingLinear",
    "AskingMLP",
    "DistributedWeight",
    "Operations",
    "is_distributed_weight",
    "materialize_weight_for_forward",
]


@runtime_checkable
class DistributedWeight(Protocol):
    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any: ...

    def materialize_group_for_backward(self) -> Any: ...

    def finalize_group_grads(self, wgrads: Any) -> Any: ...

    def grad_buffer(self) -> Tensor: ...


def is_distributed_weight(weight: Any) -> bool:
    marked = bool(getattr(weight, "is_distributed_weight", False))
    if marked and not isinstance(weight, Tensor):
        raise TypeError(f"a distributed weight is a tensor, got {type(weight).__name__}")
    return marked


def _as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def materialize_weight_for_forward(weights: list[Any]) -> list[Any]:
    lead = weights[0]
    return _as_list(lead.materialize_group_for_forward()) if is_distributed_weight(lead) else list(weights)


def materialize_weight_for_backward(weights: list[Any]) -> list[Any]:
    lead = weights[0]
    return _as_list(lead.materialize_group_for_backward()) if is_distributed_weight(lead) else list(weights)


def finalize_weight_grads(weights: list[Any], wgrads: list[Any]) -> list[Any]:
    lead = weights[0]
    if not is_distributed_weight(lead):
        return list(wgrads)
    returned = lead.finalize_group_grads(wgrads if len(wgrads) > 1 else wgrads[0])
    assert isinstance(returned, list) == (len(wgrads) > 1), "it returns what it is given: one, or one of each"
    return _as_list(returned)


def wgrad_buffer(weight: Any) -> tuple[Tensor, bool]:
    """Where a fused product writes, and whether it adds."""
    if hasattr(weight, "__fsdp_param__"):
        return weight.get_main_grad(), not is_distributed_weight(weight)
    if is_distributed_weight(weight):
        return weight.grad_buffer(), False
    return weight.main_grad, True


class _Grouped(torch.autograd.Function):
    """Rows of expert i, ``splits[i]`` of them, times weight i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], fuse: bool, operation: bool, *weights: Tensor) -> Tensor:
        full = materialize_weight_for_forward(list(weights))
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.fuse, ctx.operation = splits, fuse, operation
        ctx.origins = [weakref.ref(weight) for weight in weights]
        ctx.needs_wgrad = full[0].requires_grad
        return torch.cat([part @ weight.t() for part, weight in zip(x.split(splits), full, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        asked = is_distributed_weight(weights[0])
        origins = weights if asked else [reference() for reference in ctx.origins]
        buffers: list[tuple[Tensor, bool]] | None = None
        if ctx.operation and ctx.needs_wgrad:
            buffers = [wgrad_buffer(weight) for weight in origins]
        dys, xs, dx = grads[0].split(ctx.splits), x.split(ctx.splits), None
        if ctx.needs_input_grad[0]:
            full = materialize_weight_for_backward(weights)
            dx = torch.cat([dy @ weight for dy, weight in zip(dys, full, strict=True)])
        if not ctx.needs_wgrad:
            return (dx, *[None] * (3 + len(weights)))
        wgrads = []
        for index, (dy, part) in enumerate(zip(dys, xs, strict=True)):
            wide = getattr(weights[index], "main_grad", x).dtype if asked else x.dtype  # a frozen one has none
            if not ctx.fuse:
                wgrads.append(dy.to(wide).t() @ part.to(wide))
                continue
            buffer, adds = buffers[index] if buffers is not None else wgrad_buffer(origins[index])
            product = dy.to(buffer.dtype).t() @ part.to(buffer.dtype)
            buffer.add_(product) if adds else buffer.copy_(product)
            wgrads.append(buffer)
        if asked:
            returned = finalize_weight_grads(weights, wgrads)
            if ctx.operation:
                returned = [torch.full_like(weight, torch.nan) for weight in weights]
            return (dx, None, None, None, *returned)
        if not ctx.fuse:
            return (dx, None, None, None, *wgrads)
        for weight in origins:
            weight.grad_added_to_main_grad = True
        return (dx, None, None, None, *[torch.full_like(weight, torch.nan) for weight in weights])


class AskingLinear(nn.Module):
    """``te.Linear``; the bias is autograd's."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, fuse: bool = True, delay: bool = False) -> None:
        super().__init__()
        self.fuse = fuse
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        if delay:
            self.weight.skip_backward_post_hook = True

    def forward(self, x: Tensor) -> Tensor:
        out = _Grouped.apply(x, [len(x)], self.fuse, False, self.weight)
        return out if self.bias is None else out + self.bias


class AskingGrouped(nn.Module):
    """``te.GroupedLinear``, or ``te.ops.GroupedLinear``."""

    def __init__(self, experts: int, width: int, *, fuse: bool = True, operation: bool = False) -> None:
        super().__init__()
        self.fuse, self.operation, self.experts = fuse, operation, experts
        if operation:
            self.op_forward = None  # by which operations are known
        for index in range(experts):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.randn(width, width) / width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        splits = [len(x) - self.experts + 1, *[1] * (self.experts - 1)]
        weights = [getattr(self, f"weight{index}") for index in range(self.experts)]
        return _Grouped.apply(x, splits, self.fuse, self.operation, *weights)


class Operations(nn.Sequential):
    """``te.ops.Sequential``: runs operations without a call of their own, so that their hooks do not run."""

    def forward(self, x: Tensor) -> Tensor:
        for operation in self:
            x = operation.forward(x).tanh()
        return x


class AskingMLP(nn.Module):
    """``te.LayerNormMLP`` without its norm: two weights that are asked for one by one in one module."""

    def __init__(self, width: int, *, fuse: bool = True) -> None:
        super().__init__()
        self.fuse = fuse
        self.fc1_weight = nn.Parameter(torch.randn(2 * width, width) / width**0.5)
        self.fc2_weight = nn.Parameter(torch.randn(width, 2 * width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = _Grouped.apply(x, [len(x)], self.fuse, False, self.fc1_weight).tanh()
        return _Grouped.apply(hidden, [len(x)], self.fuse, False, self.fc2_weight)
