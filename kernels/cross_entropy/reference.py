"""The reference implementation of the cross-entropy of logits, and of its gradient.

Legend: T tokens, V classes. With ``r`` [T, V] the logits of the last layer, ``y`` [T] the targets::

    s = scale r                    z = cap tanh(s / cap)            (z = s without a cap)
    l = log sum exp z              p = exp(z - l)
    loss  = l - (1 - e) z[y] - e mean(z) + zl l^2                   e: label smoothing, zl: z-loss
    dz[j] = g ((1 + 2 zl l) p[j] - (1 - e) [j = y] - e / V)         g: gradient of the token's loss
    dr    = dz (1 - (z / cap)^2) scale

An ignored token has loss 0 and gradient 0, whatever its logits and ``g`` are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LossTerms", "logit_grads_reference", "token_losses_reference"]


class LossTerms(NamedTuple):
    """What a token's loss is made of."""

    ignore_index: int = -100
    """Tokens with this target are left out."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over all classes."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp (PaLM, Chowdhery et al., 2022)."""
    logit_softcap: float | None = None
    """Bound of the logits' absolute value, by tanh (Gemma 2); None: no bound."""
    logit_scale: float = 1.0
    """Factor of the logits, before the cap."""


def scaled_and_capped(logits: Tensor, terms: LossTerms) -> Tensor:
    """``z`` of the legend, in the dtype of ``logits``."""
    if terms.logit_scale != 1.0:
        logits = logits * terms.logit_scale
    if terms.logit_softcap is not None:
        logits = terms.logit_softcap * torch.tanh(logits / terms.logit_softcap)
    return logits


def token_losses_reference(logits: Tensor, targets: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each token, in fp32 (fp64 for fp64): [T, V], [T] -> [T], [T]. Differentiable."""
    z = scaled_and_capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), terms)
    lse = torch.logsumexp(z, dim=1)
    valid = targets != terms.ignore_index
    of_target = z.gather(1, torch.where(valid, targets, 0)[:, None])[:, 0]
    losses = lse - (1 - terms.label_smoothing) * of_target
    if terms.label_smoothing:
        losses = losses - terms.label_smoothing * z.mean(dim=1)
    if terms.z_loss:
        losses = losses + terms.z_loss * lse.square()
    return torch.where(valid, losses, 0.0), lse


def logit_grads_reference(logits: Tensor, targets: Tensor, lse: Tensor, grads: Tensor, terms: LossTerms) -> None:
    """``dr`` in place of the logits, rounded once: ``logits`` [T, V], the others [T]."""
    z = scaled_and_capped(logits.to(lse.dtype), terms)
    valid = targets != terms.ignore_index
    dz = torch.exp(z - lse[:, None])
    if terms.z_loss:
        dz *= 1 + 2 * terms.z_loss * lse[:, None]
    if terms.label_smoothing:
        dz -= terms.label_smoothing / logits.shape[1]
    at = torch.where(valid, targets, 0)[:, None]
    dz.scatter_add_(1, at, dz.new_full((), terms.label_smoothing - 1).expand(at.shape))
    dz *= grads[:, None]
    if terms.logit_softcap is not None:
        dz *= 1 - (z / terms.logit_softcap).square()
    if terms.logit_scale != 1.0:
        dz *= terms.logit_scale
    logits.copy_(dz.masked_fill_(~valid[:, None], 0))
