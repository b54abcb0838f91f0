"""A linear layer that delays its weight gradient, with the verbs alone and nothing of ours behind them."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DelayingLinear", "ForwardingSequential"]


class _DelayingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: "DelayingLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        if not ctx.module.delay:
            return dx, dy.t() @ x, None
        ctx.module.put_off(dy, x)
        return dx, None, None


class DelayingLinear(nn.Linear):
    """Adds ``dy^T x`` to ``weight.grad`` in ``backward_dw``, one backward's at a time.

    log  ``(module, x)`` of every delayed weight gradient, in the order in which they ran; may be shared by modules
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, delay: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.delay = delay
        self.log: list[tuple[nn.Module, Tensor]] = []
        self._waiting: deque[tuple[int, list[tuple[Tensor, Tensor]]]] = deque()

    def forward(self, x: Tensor) -> Tensor:
        y = _DelayingFunction.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias

    def put_off(self, dy: Tensor, x: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if not self._waiting or self._waiting[-1][0] != backward:
            self._waiting.append((backward, []))
        self._waiting[-1][1].append((dy, x))

    def need_backward_dw(self) -> bool:
        return bool(self._waiting)

    def backward_dw(self) -> None:
        if not self._waiting:
            return
        for dy, x in self._waiting.popleft()[1]:
            gradient = dy.t() @ x
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
            self.log.append((self, x))


class ForwardingSequential(nn.Sequential):
    """A container with the verbs: it forwards them to its children."""

    def need_backward_dw(self) -> bool:
        return any(child.need_backward_dw() for child in self if hasattr(child, "need_backward_dw"))

    def backward_dw(self) -> None:
        for child in reversed(self):
            if hasattr(child, "backward_dw"):
                child.backward_dw()
