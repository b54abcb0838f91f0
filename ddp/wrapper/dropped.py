"""A wrapper that was freed while its model trains on: no gradient would be reduced, and each rank would train alone.

When a wrapper is freed its parameters become plain. Among several ranks they also get a mark, and the modules that
register them refuse to train until the model is wrapped again. ``unwrap`` leaves no mark.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..contract.torch_ddp import in_torch_ddp

__all__ = ["forget_dropped", "mark_dropped"]

_MARK = "_maingrad_dropped"


class _Mark:
    """The mark on a parameter, with its name in the wrapped model. A copy of the parameter has no mark."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return type(None), ()


def mark_dropped(param: Tensor, name: str, owners: Iterable[nn.Module]) -> None:
    """Mark a trainable parameter whose wrapper was freed; ``owners`` are the modules that register it."""
    setattr(param, _MARK, _Mark(name))
    for owner in owners:
        if _refuse_to_train not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(_refuse_to_train)


def forget_dropped(param: Tensor, owners: Iterable[nn.Module] = ()) -> None:
    """Remove the mark: a wrapper reduces the gradient again."""
    param.__dict__.pop(_MARK, None)
    for owner in owners:
        _remove_hook(owner)


def _refuse_to_train(module: nn.Module, args: Any) -> None:
    """The forward pre-hook. A module-level function, so that modules with it can be copied and pickled."""
    if not torch.is_grad_enabled():
        return
    marks = {name: mark for name, param in module._parameters.items() if (mark := _mark_of(param)) is not None}
    if not marks:  # wrapped again since, or a copy
        _remove_hook(module)
        return
    if in_torch_ddp() or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for local, mark in marks.items():
        param = module._parameters[local]
        if param is not None and param.requires_grad:
            raise RuntimeError(
                f"parameter '{mark.name}' was wrapped in maingrad.ddp.DistributedDataParallel, and the wrapper was let "
                f"go: each rank would train this {type(module).__name__} by itself; keep the wrapper and call it, or "
                f"wrap again. Where ranks are to part, call the wrapper's unwrap() before letting it go"
            )


def _mark_of(param: Tensor | None) -> _Mark | None:
    return None if param is None else getattr(param, _MARK, None)


def _remove_hook(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _refuse_to_train]:
        del hooks[key]
