"""A wrapper that was freed while its model trains on: no gradient would be reduced, and each rank would train alone.

When a wrapper is freed its parameters become plain. Among several ranks they also get a mark, and the modules that
register them refuse to train until the model is wrapped again. ``unwrap`` leaves no mark.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..contract.torch_ddp import in_torch_ddp

__all__ = ["forget_dropped", "mark_dropped"]

_dropped: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""Trainable parameters whose wrapper was freed, with their names in the wrapped model. Copies are not among them."""


def mark_dropped(param: Tensor, name: str, owners: Iterable[nn.Module]) -> None:
    """Mark a trainable parameter whose wrapper was freed; ``owners`` are the modules that register it."""
    _dropped[param] = name
    for owner in owners:
        if _refuse_to_train not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(_refuse_to_train)


def forget_dropped(param: Tensor, owners: Iterable[nn.Module] = ()) -> None:
    """Remove the mark: a wrapper reduces the gradient again."""
    _dropped.pop(param, None)
    for owner in owners:
        _remove_hook(owner)


def _refuse_to_train(module: nn.Module, args: Any) -> None:
    """The forward pre-hook. A module-level function, so that modules with it can be copied and pickled."""
    if not torch.is_grad_enabled():
        return
    mine = [param for param in module._parameters.values() if param is not None and param in _dropped]
    if not mine:  # wrapped again since, or a copy
        _remove_hook(module)
        return
    if in_torch_ddp() or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for param in mine:
        if param.requires_grad:
            raise RuntimeError(
                f"parameter '{_dropped[param]}' was wrapped in maingrad.ddp.DistributedDataParallel, and the wrapper "
                f"was let go: each rank would train this {type(module).__name__} by itself; keep the wrapper and call "
                f"it, or wrap again. Where ranks are to part, call the wrapper's unwrap() before letting it go"
            )


def _remove_hook(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _refuse_to_train]:
        del hooks[key]
