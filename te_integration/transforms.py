"""``torch.func``'s transforms (grad, vmap, jvp, ...) and forward-mode derivatives, which ask for ordinary autograd."""

import torch
from torch.autograd import forward_ad

__all__ = ["in_transform", "refuse_in_transform"]

_is_transforming = torch._C._are_functorch_transforms_active


def in_transform() -> bool:
    """Whether one is running, around whatever tensors."""
    if torch.compiler.is_compiling():
        return False  # a compiler sees to it by itself
    return _is_transforming() or forward_ad._current_level >= 0


def refuse_in_transform(owner: str) -> None:
    """Raise ``RuntimeError`` inside one. ``owner`` is what has formulas for backward alone."""
    if in_transform():
        raise RuntimeError(
            f"{owner} has no rules for torch.func's transforms (grad, vmap, jvp, ...), nor for forward-mode "
            f"derivatives; use torch.autograd.grad and loops here, or a Linear for each expert, which has them"
        )
