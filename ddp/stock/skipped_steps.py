"""SGD's momentum under a loss scaler, where the device may skip the first step.

With a scaler, a fused kernel reads ``found_inf`` on the device and skips its update; the host does not know. torch's
SGD allocates the momentum buffer in its first step by ``empty_like``, for the kernel to write. If the device skips that
step, the buffer keeps uninitialised memory, and the next step takes that for momentum.

Here the buffer ``b`` starts as zeros, so the first step that is not skipped computes ``momentum * 0 + g = g``. With
dampening ``d`` that is not enough: torch's first step sets ``b = g``, and later ones ``b = momentum * b + (1 - d) g``.
So until one step is known to be taken, both steps are launched, and the device skips at least one of them::

    fresh         1 on the device until a step was taken
    first step    skipped where found_inf, or not fresh
    later step    skipped where found_inf, or fresh

Other fused optimizers of torch start their state as zeros, and undo their step count.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd
from torch.utils.hooks import RemovableHandle

__all__ = ["prepare_skippable_step", "settle_first_step"]

_MOMENTUM = "momentum_buffer"
_DOUBT = "_maingrad_first_step"


class _Doubt(NamedTuple):
    """It is not known whether a step was taken since these momentum buffers were made. Kept on the optimizer."""

    made: dict[Tensor, Tensor]
    """Momentum buffers by parameter, of groups with dampening."""
    fresh: Tensor
    """0-dim: 1 while no step was taken."""
    settled_by: RemovableHandle
    """The hook that settles the doubt before a state dict is made."""


@torch.no_grad()
def prepare_skippable_step(optimizer: Optimizer) -> None:
    """Call right before each step of an optimizer. The host reads nothing from the device.

    Exception: one read where a step without scaler, or not fused, follows steps with one.
    """
    if not isinstance(optimizer, SGD):
        return
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    if found_inf is None or not all(group["fused"] for group in optimizer.param_groups):
        settle_first_step(optimizer)
        return
    begun = _without_momentum(optimizer)
    if any(dampened for dampened in begun.values()):
        settle_first_step(optimizer)  # an older doubt about other groups
        begun = _without_momentum(optimizer)
    for param in begun:
        optimizer.state[param][_MOMENTUM] = torch.zeros_like(param, requires_grad=False)
    made = {param: optimizer.state[param][_MOMENTUM] for param, dampened in begun.items() if dampened}
    if made:
        handle = optimizer.register_state_dict_pre_hook(settle_first_step)
        vars(optimizer)[_DOUBT] = _Doubt(made, torch.ones_like(found_inf), handle)
    doubt = _doubt_of(optimizer)
    if doubt is not None:
        _take_first_step(optimizer, doubt.made, torch.maximum(found_inf, 1 - doubt.fresh))
        optimizer.found_inf = torch.maximum(found_inf, doubt.fresh)  # type: ignore[attr-defined]
        doubt.fresh.mul_(found_inf != 0)


def settle_first_step(optimizer: Optimizer) -> None:
    """Read from the device whether a step was taken, where that is in doubt. If none was, delete the momentum."""
    doubt = _doubt_of(optimizer)
    _forget(optimizer)
    if doubt is not None and doubt.fresh.item():
        for param in doubt.made:
            del optimizer.state[param][_MOMENTUM]


def _forget(optimizer: Optimizer) -> None:
    """Remove the doubt and its hook."""
    doubt: _Doubt | None = vars(optimizer).pop(_DOUBT, None)
    if doubt is not None:
        doubt.settled_by.remove()


def _doubt_of(optimizer: Optimizer) -> _Doubt | None:
    """The optimizer's doubt; None without one, and where ``load_state_dict`` has replaced the momentum."""
    doubt: _Doubt | None = vars(optimizer).get(_DOUBT)
    if doubt is not None and any(optimizer.state[param].get(_MOMENTUM) is not own for param, own in doubt.made.items()):
        _forget(optimizer)
        return None
    return doubt


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


def _take_first_step(optimizer: Optimizer, made: dict[Tensor, Tensor], skips: Tensor) -> None:
    """Launch the step that is right if the buffers in ``made`` hold zeros. The device skips it where ``skips`` is 1."""
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        sgd(
            params,
            [param.grad for param in params],
            [optimizer.state[param][_MOMENTUM] for param in params] if group["momentum"] != 0 else [],
            fused=True,
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=skips,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0 if any(param in made for param in params) else group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
