"""The mean of a loss over the targets that count, and the places that no loss depends on."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["count_targets", "find_padding", "mean_loss"]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ``logits`` [B, T, V] over ``targets`` [B, T] that are not negative; fp32.

    0 where no target counts.
    """
    flat = targets.reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), flat, ignore_index=-100, reduction="sum")
    return total / count_targets(flat)


def count_targets(targets: Tensor) -> Tensor:
    """Number of ``targets`` that are not negative, at least 1; on their device."""
    return (targets >= 0).sum().clamp(min=1)


def find_padding(targets: Tensor) -> Tensor:
    """Which places of ``targets`` [B, T] lie behind the last target of their row that is not negative; bool [B, T].

    No loss depends on these inputs where attention is causal. A negative target before that place may be that of a
    prompt, which later tokens attend to.
    """
    places = torch.arange(targets.shape[1], device=targets.device)
    last = torch.where(targets >= 0, places, -1).amax(1, keepdim=True)
    return places > last
