"""``torch.func``'s transforms (grad, vmap, jvp, ...) and forward-mode derivatives, which ask for ordinary autograd."""

import torch
from torch.autograd import forward_ad

from ..torch_internals import are_transforms_active

__all__ = ["in_transform", "refuse_in_transform"]


def in_transform() -> bool:
    """Whether one is running, around whatever tensors."""
    if torch.compiler.is_compiling():
        return False  # a compiler sees to it by itself
    return are_transforms_active() or forward_ad._current_level >= 0


def refuse_in_transform(owner: str) -> None:
    """Raise ``RuntimeError`` inside one. ``owner`` is what has formulas for backward alone."""
    if in_transform():
        raise RuntimeError(
            f"{owner} has no rules for torch.func's transforms (grad, vmap, jvp, ...), nor for forward-mode "
            f"derivatives; use torch.autograd.grad and loops here, or a Linear for each expert, which has them"
        )
