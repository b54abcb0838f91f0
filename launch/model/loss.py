"""The mean of a loss over the targets that count."""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["mean_loss"]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ``logits`` [B, T, V] over ``targets`` [B, T] that are not negative; fp32.

    0 where no target counts.
    """
    flat = targets.reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), flat, ignore_index=-100, reduction="sum")
    return total / (flat >= 0).sum().clamp(min=1)
