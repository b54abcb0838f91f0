"""``Linear``: ``nn.Linear`` whose weight gradient is one GEMM into ``main_grad``.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ddp.demand import Demand, demand
from ..ddp.main_grad import FusedWgradModule, WgradTarget, is_fusable

__all__ = ["Linear", "fused_linear", "run_outside_graph"]


class Linear(FusedWgradModule, nn.Linear):
    """``y = x W^T + b``, with ``main_grad += dy^T x`` as one GEMM in backward.

    =========  ============  =====================================
    x          [..., K]      input
    weight     [N, K]        ``nn.Linear``'s own
    bias       [N] or None   ``nn.Linear``'s own
    y          [..., N]      output
    =========  ============  =====================================

    Backward: ``dx = dy W``, ``dW = dy^T x`` straight into ``weight.main_grad``, ``db = sum over rows of dy``.

    fuse_wgrad_accumulation  write the weight gradient into ``weight.main_grad``, which a provider (our
                             ``DistributedDataParallel``, Megatron-core's) must have attached by the time of backward:
                             ``RuntimeError`` otherwise. False: exactly ``nn.Linear``

    Arguments, parameter names and state dict are ``nn.Linear``'s; the fused backward is Megatron-LM's
    ``gradient_accumulation_fusion``. Under ``torch.compile`` a fused layer is a graph break: see ``run_outside_graph``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    def fused_wgrad_weights(self) -> Iterable[str]:
        """The weight, where it is fused."""
        return ("weight",) if self.fuse_wgrad_accumulation else ()

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        weight = self.weight
        if not (self.fuse_wgrad_accumulation and torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(input, weight, self.bias)
        if torch.compiler.is_compiling() and "weight" in self._parameters:
            return run_outside_graph(Linear.forward, self, input)
        if not is_fusable(weight):
            return F.linear(input, weight, self.bias)
        return fused_linear(input, weight, self.bias, self.describe())

    def describe(self) -> str:
        """For errors: which layer this is."""
        return f"Linear(in_features={self.in_features}, out_features={self.out_features})"

    def extra_repr(self) -> str:
        """``nn.Linear``'s, and whether the weight gradient is fused."""
        return f"{super().extra_repr()}, fuse_wgrad_accumulation={self.fuse_wgrad_accumulation}"


def fused_linear(input: Tensor, weight: Tensor, bias: Tensor | None, owner: str, *, transposed: bool = False) -> Tensor:
    """One differentiable linear layer [..., K] -> [..., N] whose weight gradient goes into ``main_grad``.

    owner       the module, for errors
    transposed  ``weight`` and its ``main_grad`` are [K, N]: ``y = x W + b`` and ``dW = x^T dy``
    """
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type) and input.dtype is not torch.float64:
        # As nn.Linear does under autocast; the weight is cast inside, so that its gradient goes to the real one.
        input = input.to(torch.get_autocast_dtype(device_type))
    target = WgradTarget(weight, owner)
    output: Tensor = _FusedLinear.apply(input, weight, bias, target, transposed)  # type: ignore[no-untyped-call]
    return output


Forward = Callable[[Any, Tensor], Tensor]


def _run(forward: Forward, module: nn.Module, input: Tensor) -> Tensor:
    return forward(module, input)


# A graph break and an autograd function, and not a custom op: the op's backward would have to hide its write to
# main_grad and its flag from functionalisation, which may drop, reorder or repeat what it cannot see, and a compiled
# backward runs no Python between the GEMM and the hook that launches the bucket. The break costs one guard check per
# layer; everything between the layers is compiled. The caller names its forward: type(module)'s may be a subclass's.
run_outside_graph: Callable[[Forward, nn.Module, Tensor], Tensor] = torch.compiler.disable(_run)


class _FusedLinear(torch.autograd.Function):
    """See ``fused_linear``; ``target`` says where the weight gradient goes."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: WgradTarget, transposed: bool
    ) -> Tensor:
        ctx.target = target
        ctx.transposed = transposed
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if weight.dtype is not input.dtype and torch.is_autocast_enabled(input.device.type):
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        return F.linear(input, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        input, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        wanted = demand(ctx.next_functions[1][0]) if needs_dw else Demand.NOTHING
        resolved = ctx.target.resolve() if wanted is Demand.ACCUMULATE else None

        dx = dw = None
        if needs_dx:
            cast = weight.to(dy.dtype)
            dx = dy @ (cast.t() if ctx.transposed else cast)
        if wanted is not Demand.NOTHING:
            left, right = dy.reshape(-1, dy.shape[-1]), input.reshape(-1, input.shape[-1])
            if ctx.transposed:
                left, right = right, left
            if resolved is not None:
                dw = ctx.target.deliver(*resolved, left, right)
            else:
                dw = (left.t() @ right).to(weight.dtype)
        db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.bias_dtype) if needs_db else None
        return dx, dw, db, None, None
