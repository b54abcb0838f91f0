"""Modules without a wrapper: the amaxes of a backward are dropped where its step is skipped.

Without a wrapper nothing ends an iteration but the module's next forward, which moves on the amaxes of the last
backward. Until then an optimizer over the module's weights may clear their gradients without having stepped.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .amax_history import NONE_YET
from .product_scaling import ScalingUse

__all__ = ["watch_steps"]

_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch_steps(module: nn.Module) -> None:
    """From now on, drop the amaxes that this ``ScaledModule`` got in backwards whose step is skipped."""
    if module not in _watched:
        _watch_optimizers()
        _watched.add(module)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    clear, unscale = Optimizer.zero_grad, torch.amp.GradScaler._unscale_grads_

    @functools.wraps(clear)
    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        clear(optimizer, *args, **kwargs)
        for use, history in _trained_by(optimizer):
            if use.optimized and not use.stepped:
                _drop(use, history)

    @functools.wraps(unscale)
    def unscale_grads(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for use, _ in _trained_by(optimizer):
            use.optimized = True
        return unscale(scaler, optimizer, *args, **kwargs)

    # torch has no hooks for these.
    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign, assignment]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    for use, history in _trained_by(optimizer):
        use.optimized = use.stepped = True
        if found_inf is not None:
            with torch.no_grad():
                history[0].masked_fill_(found_inf.to(history.device) != 0, NONE_YET)


def _trained_by(optimizer: Optimizer) -> Iterator[tuple[ScalingUse, Tensor]]:
    """The modules with amaxes of a backward, and with a weight in ``optimizer``."""
    recorded = [module for module in _watched if (use := module._scaling_use) is not None and use.recorded]
    if not recorded:
        return
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in recorded:
        if any(id(module._parameters.get(name)) in params for name in module.weight_names):
            yield module._scaling_use, module._buffers["fp8_amax_history"]


@torch.no_grad()
def _drop(use: ScalingUse, history: Tensor) -> None:
    history[0].fill_(NONE_YET)
    use.recorded = False
