"""SGD's momentum under a loss scaler, where the device may skip the first step.

With a scaler, a fused kernel reads ``found_inf`` on the device and skips its update; the host does not know. torch's
SGD allocates the momentum buffer in its first step by ``empty_like``, for the kernel to write. If the device skips that
step, the buffer keeps uninitialised memory, and the next step takes that for momentum.

Here the buffer ``b`` starts as zeros, so the first step that is not skipped computes ``momentum * 0 + g = g``. With
dampening ``d`` that is not enough: torch's first step sets ``b = g``, and later ones ``b = momentum * b + (1 - d) g``.
So the host reads ``found_inf`` in each step until one is taken, and the buffers of a skipped step are deleted.

Other fused optimizers of torch start their state as zeros, and undo their step count.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from ..collectives.streams import is_capturing

__all__ = ["prepare_skippable_step"]

_MOMENTUM = "momentum_buffer"


@torch.no_grad()
def prepare_skippable_step(optimizer: Optimizer) -> None:
    """Call right before each step of an optimizer.

    The host reads nothing from the device, but for a first step with dampening. That one raises ``RuntimeError`` in a
    capture.
    """
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    if (
        not isinstance(optimizer, SGD)
        or found_inf is None
        or not all(group["fused"] for group in optimizer.param_groups)
    ):
        return
    begun = _without_momentum(optimizer)
    if any(dampened for dampened in begun.values()):
        if is_capturing():
            raise RuntimeError(
                "the first step of SGD with dampening under a scaler in a CUDA graph: the host has to know whether it "
                "is skipped; take a step before the capture, or use dampening=0"
            )
        if found_inf.item():
            _delete_after_step(optimizer, [param for param, dampened in begun.items() if dampened])
    for param, dampened in begun.items():
        if not dampened:
            optimizer.state[param][_MOMENTUM] = torch.zeros_like(param, requires_grad=False)


def _delete_after_step(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """The step that comes now is skipped: what it allocates stays unwritten."""

    def delete(optimizer: Optimizer, *_: Any) -> None:
        handle.remove()
        for param in params:
            del optimizer.state[param][_MOMENTUM]

    handle: RemovableHandle = optimizer.register_step_post_hook(delete)


def _without_momentum(optimizer: Optimizer) -> dict[Tensor, bool]:
    """Parameters of groups that need momentum and have none, and whether the group has dampening.

    torch raises for groups of which only some parameters have momentum.
    """
    found: dict[Tensor, bool] = {}
    for group in optimizer.param_groups:
        if group["momentum"] != 0:
            stepping = [param for param in group["params"] if param.grad is not None]
            if all(optimizer.state[param].get(_MOMENTUM) is None for param in stepping):
                found |= dict.fromkeys(stepping, group["dampening"] != 0)
    return found
