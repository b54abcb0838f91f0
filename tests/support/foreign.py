"""Stand-ins for other people's providers and consumers, as strict as the contract lets them be."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DELAYED_FORMS", "ForeignDelayedLinear", "ForeignLinear", "ForeignProvider", "LazyForeignProvider"]


class ForeignProvider:
    """Owns ``main_grad`` of a model's parameters with hooks of its own; knows nothing of our records.

    Its hook insists on a gradient that is not None, as hooks on the accumulator's node do, which torch skips for None.
    Where a parameter says at this moment that it is delayed, the module that delays it calls the hook instead.

    flag  it sets ``grad_added_to_main_grad`` and registers hooks; without, it only reads ``main_grad`` after backward
    """

    def __init__(self, model: nn.Module, *, flag: bool = True, dtype: torch.dtype | None = torch.float32) -> None:
        self.placeholders: list[tuple[str, Tensor]] = []
        self.seen: list[tuple[str, bool]] = []
        """(name, flag) of every hook that ran."""
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            self.give(name, param, torch.zeros_like(param, dtype=dtype, requires_grad=False))
            if not flag:
                continue
            param.grad_added_to_main_grad = False
            if getattr(param, "skip_backward_post_hook", False):
                self._after_backward_dw(model, param, self._hook_of(name))
            else:
                param.register_post_accumulate_grad_hook(self._hook_of(name))

    def give(self, name: str, param: nn.Parameter, main_grad: Tensor) -> None:
        param.main_grad = main_grad

    def main_grad_of(self, param: nn.Parameter) -> Tensor:
        return param.main_grad

    def _after_backward_dw(self, model: nn.Module, param: nn.Parameter, hook: Any) -> None:
        """As Megatron looks for them: every module with the verb that holds the parameter, at any depth."""
        for module in model.modules():
            register = getattr(module, "register_wgrad_accumulation_and_reduce_hooks", None)
            if register is not None and any(own is param for own in module.parameters()):
                register(lambda: hook(param))

    def _hook_of(self, name: str) -> Any:
        def hook(param: Tensor) -> None:
            flag = param.grad_added_to_main_grad
            self.seen.append((name, flag))
            if param.grad is None:
                raise AssertionError(f"{name}: overlap needs a gradient that is not None")
            if flag:
                self.placeholders.append((name, param.grad))
            if not flag or getattr(param, "zero_out_wgrad", False):
                self.main_grad_of(param).add_(param.grad)
            param.grad = None
            param.grad_added_to_main_grad = False

        return hook


class LazyForeignProvider(ForeignProvider):
    """Allocates in backward and asks for the first write to overwrite: what it hands out is NaN until then."""

    def give(self, name: str, param: nn.Parameter, main_grad: Tensor) -> None:
        param.__fsdp_param__ = True
        self.allocated: dict[str, Tensor] = getattr(self, "allocated", {})

        def get_main_grad() -> Tensor:
            if name not in self.allocated:
                self.allocated[name] = torch.full_like(main_grad, torch.nan)
                param.overwrite_main_grad = True
            return self.allocated[name]

        param.get_main_grad = get_main_grad

    def main_grad_of(self, param: nn.Parameter) -> Tensor:
        main_grad = param.get_main_grad()
        if main_grad.isnan().all():
            main_grad.zero_()
        param.main_grad = main_grad
        return main_grad

    def start_microbatch(self, model: nn.Module) -> None:
        """From the second microbatch on gradients add."""
        for param in model.parameters():
            param.overwrite_main_grad = False


def main_grad_of(weight: Tensor) -> Tensor:
    """What a consumer asks in backward, of either kind of provider."""
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    return weight.main_grad


class _ForeignLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        (input,) = ctx.saved_tensors
        weight = ctx.weight
        main_grad_of(weight).add_(dy.t() @ input)
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return dy @ weight, torch.full_like(weight, 0.0 if zeros else torch.nan)


class ForeignLinear(nn.Linear):
    """Writes ``main_grad`` itself and returns uninitialised memory (NaN), or zeros where ``zero_out_wgrad`` asks."""

    def forward(self, input: Tensor) -> Tensor:
        return _ForeignLinearFunction.apply(input, self.weight)


class _ForeignDelayedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, module: "ForeignDelayedLinear") -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.module, ctx.origin = module, weight
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        module = ctx.module
        dy, x = grads[0].flatten(0, -2), input.flatten(0, -2)
        dbias = dy.sum(0) if module.bias_when == "backward" else None
        buffer = torch.full_like(weight, float("nan")) if module.buffer and not module.fused else None
        module.waiting.append((dy, x, main_grad_of(ctx.origin) if module.fused else buffer))
        if not module.fused:
            return grads[0] @ weight, buffer, dbias, None
        ctx.origin.grad_added_to_main_grad = True
        return grads[0] @ weight, torch.full_like(weight, float("nan")), dbias, None


class ForeignDelayedLinear(nn.Linear):
    """Delays as Transformer Engine does: marks its parameters, and calls the provider back after ``backward_dw``.

    buffer     not fused, it hands autograd memory that ``backward_dw`` fills: ``te.GroupedLinear``
    bias_when  "no" bias; its gradient comes in "backward", and ``backward_dw`` has none (``te.LayerNormMLP``'s first,
               all under fp8); or in "backward_dw" alone
    """

    def __init__(
        self, in_features: int, out_features: int, *, fused: bool, buffer: bool = False, bias_when: str = "no"
    ) -> None:
        super().__init__(in_features, out_features, bias=bias_when != "no")
        self.fused, self.buffer, self.bias_when = fused, buffer, bias_when
        self.waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.hooks: list[Any] = []
        for param in self.parameters():
            param.skip_backward_post_hook = True

    def forward(self, input: Tensor) -> Tensor:
        return _ForeignDelayedFunction.apply(input, self.weight, self.bias, self)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.hooks.append(hook)

    def need_backward_dw(self) -> bool:
        return bool(self.waiting)

    @torch.no_grad()
    def backward_dw(self) -> None:
        if not self.waiting:
            return
        dy, x, out = self.waiting.pop(0)
        dbias = dy.sum(0) if self.bias_when == "backward_dw" else None
        if self.fused:
            out.add_(dy.t() @ x)
        else:
            self.weight.grad = dy.t() @ x if out is None else torch.mm(dy.t(), x, out=out)
        if self.bias is not None and self.bias.grad is None:
            if dbias is None:
                raise AssertionError("somebody took the bias' gradient that backward left in .grad")
            self.bias.grad = dbias.to(self.bias.dtype)
        for hook in self.hooks:
            hook()


DELAYED_FORMS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "fused, bias in backward": {"fused": True, "bias_when": "backward"},
    "fused, bias in backward_dw": {"fused": True, "bias_when": "backward_dw"},
    "plain": {"fused": False},
    "plain, bias in backward": {"fused": False, "bias_when": "backward"},
    "plain, a buffer first": {"fused": False, "buffer": True},
    "plain, a buffer first, bias in backward_dw": {"fused": False, "buffer": True, "bias_when": "backward_dw"},
}
"""Options of ``ForeignDelayedLinear``, by what it does."""
