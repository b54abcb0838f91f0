"""SGD's momentum under steps that the device may skip.

Under a loss scaler fused kernels read on the device whether to skip; the host never knows. torch's SGD makes its
momentum in the first step, without values: ``empty_like``, which the kernel then writes, or does not. A first step that
overflows would leave whatever was in that memory, and the next one would take it for momentum.

Here momentum begins as zeros, so that the first step that is taken finds ``m 0 + g = g``, whichever it is. Dampening
asks for more: it spares the first gradient (``m 0 + (1 - d) g`` is not ``g``). While no step is known to be taken,
both are queued, the one that is the first and the one that is not, and the device skips one of them, or both::

    fresh       1 on the device until a step was taken
    first one   skipped where found_inf, or not fresh
    other one   skipped where found_inf, or fresh

Other fused classes make their state as zeros, and take back the step that they counted.
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
    """Whether a step was taken since some of the momentum was made; kept on the optimizer."""

    made: dict[Tensor, Tensor]
    """Momentum by parameter, that of groups with dampening."""
    fresh: Tensor
    """0-dim: 1 while no step was taken."""
    settled_by: RemovableHandle
    """A state dict needs to know."""


@torch.no_grad()
def prepare_skippable_step(optimizer: Optimizer) -> None:
    """Call it right before the step of an optimizer that may have a scaler's ``found_inf``; the host reads nothing.

    It does read, once, where such steps are followed by one that is not fused or has no scaler.
    """
    if not isinstance(optimizer, SGD):
        return
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    if found_inf is None or not all(group["fused"] for group in optimizer.param_groups):
        settle_first_step(optimizer)
        return
    begun = _without_momentum(optimizer)
    if any(dampened for dampened in begun.values()):
        settle_first_step(optimizer)  # an older doubt, of other groups
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
    """Ask the device whether a step was taken, where that is in doubt: without one there is no momentum yet."""
    doubt = _doubt_of(optimizer)
    _forget(optimizer)
    if doubt is not None and doubt.fresh.item():
        for param in doubt.made:
            del optimizer.state[param][_MOMENTUM]


def _forget(optimizer: Optimizer) -> None:
    """Somebody has written other momentum."""
    doubt: _Doubt | None = vars(optimizer).pop(_DOUBT, None)
    if doubt is not None:
        doubt.settled_by.remove()


def _doubt_of(optimizer: Optimizer) -> _Doubt | None:
    """None, too, where the momentum in question was replaced, by ``load_state_dict`` say."""
    doubt: _Doubt | None = vars(optimizer).get(_DOUBT)
    if doubt is not None and any(optimizer.state[param].get(_MOMENTUM) is not own for param, own in doubt.made.items()):
        _forget(optimizer)
        return None
    return doubt


def _without_momentum(optimizer: Optimizer) -> dict[Tensor, bool]:
    """Parameters of groups that have none where they need it, and whether dampening spares their first gradient.

    Where some of a group have it torch raises, as there is no saying which step is the first.
    """
    found: dict[Tensor, bool] = {}
    for group in optimizer.param_groups:
        if group["momentum"] != 0:
            stepping = [param for param in group["params"] if param.grad is not None]
            if all(optimizer.state[param].get(_MOMENTUM) is None for param in stepping):
                found |= dict.fromkeys(stepping, group["dampening"] != 0)
    return found


def _take_first_step(optimizer: Optimizer, made: dict[Tensor, Tensor], skips: Tensor) -> None:
    """The step as it is where ``made`` holds zeros; ``skips``: 1 on the device where it is not."""
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
