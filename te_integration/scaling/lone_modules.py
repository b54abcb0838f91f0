"""Modules without a wrapper: the amaxes of a backward are dropped where its step is skipped.

Without a wrapper nothing ends an iteration but the module's next forward, which moves on the amaxes of the last
backward. By then a step was skipped if the backward had left ``.grad`` of all trained weights, every ``.grad`` is None
again, no optimizer has stepped, and no weight has changed. A fused kernel decides on the device: torch's hook of steps
has its answer.

A program may also update weights past their versions (``weight.data``), with an optimizer over copies. It looks as if
it skipped every step: such steps are dropped ``MOST_UNSEEN`` times, unless an optimizer was seen to step.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .amax_history import ScalingUse, versions_of
from .scaled_module import NONE_YET

__all__ = ["MOST_UNSEEN", "drop_amaxes", "was_skipped", "watch_steps"]

MOST_UNSEEN = 16
"""A scaler that begins with 2^16 skips at most so many steps before the first one."""

_watched: "weakref.WeakSet[ScalingUse]" = weakref.WeakSet()


def watch_steps(use: ScalingUse) -> None:
    """From now on, ``was_skipped`` tells whether the step after a backward of this module was skipped."""
    if not use.is_alone:
        use.is_alone = True
        _watched.add(use)
        _watch_optimizers()


def was_skipped(use: ScalingUse) -> bool:
    """Before a forward: whether the gradients of the last backward were cleared without a step."""
    if use.weights_before is None:
        return False
    weights = use.trained_weights()
    if any(weight.grad is not None for weight in weights) or use.weights_before != versions_of(weights):
        return False
    if not use.optimized:
        use.num_unseen += 1
    return use.num_unseen <= MOST_UNSEEN


@torch.no_grad()
def drop_amaxes(use: ScalingUse) -> None:
    """Forget the amaxes of the last backward."""
    use.history[0].fill_(NONE_YET)
    use.row_0 = "empty"


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    for use in _trained_by(optimizer):
        use.optimized, use.weights_before = True, None
        if found_inf is not None:
            with torch.no_grad():
                use.history[0].masked_fill_(found_inf.to(use.history.device) != 0, NONE_YET)


def _trained_by(optimizer: Optimizer) -> Iterator[ScalingUse]:
    """The modules with amaxes of a backward, and with a weight in ``optimizer``."""
    recorded = [use for use in _watched if use.row_0 != "empty" and use.is_live]
    if not recorded:
        return
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for use in recorded:
        module = use.module()
        if any(id(module._parameters.get(name)) in params for name in module.weight_names):
            yield use
