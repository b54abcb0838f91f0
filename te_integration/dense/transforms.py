"""Detects ``torch.func`` transforms (grad, vmap, jvp, ...) and forward-mode AD, which need ordinary autograd."""

from torch.autograd import forward_ad

from ...ddp.torch_internals import are_transforms_active

__all__ = ["in_transform", "refuse_in_transform"]


def in_transform() -> bool:
    """Whether a transform or forward-mode AD is active, for any tensor."""
    return are_transforms_active() or forward_ad._current_level >= 0


def refuse_in_transform(owner: str) -> None:
    """Raise ``RuntimeError`` if a transform is active: ``owner`` implements backward only."""
    if in_transform():
        raise RuntimeError(
            f"{owner} has no rules for torch.func's transforms (grad, vmap, jvp, ...), nor for forward-mode "
            f"derivatives; use torch.autograd.grad and loops here, or a Linear for each expert, which has them"
        )
