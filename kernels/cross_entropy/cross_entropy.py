"""Cross-entropy of logits that are already in memory, and its gradient in place of the logits.

Legend: T tokens, V classes.
"""

import torch
from torch import Tensor

from ..compat import HAS_TRITON, runs_on_triton
from .reference import LossTerms, logit_grads_reference, token_losses_reference

if HAS_TRITON:
    from .triton_kernels import cross_entropy_triton

__all__ = ["cross_entropy_in_place"]


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, terms: LossTerms, *, lse: Tensor | None = None, grads: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """Losses and log-sum-exps of ``logits``; with ``grads``, the logits' gradient in place of the logits.

    =======  ======  ===================================================================================
    logits   [T, V]  bf16, fp16, fp32 or fp64, adjacent columns; without ``grads`` they stay
    targets  [T]     int64; out of range and not ignored: NaN on CUDA, ``RuntimeError`` on a CPU
    lse      [T]     of an earlier call with these logits: no loss is computed; None: computed
    grads    [T]     gradient of each token's loss, fp32 (fp64 for fp64), any stride; None: no gradient
    =======  ======  ===================================================================================

    Returns the losses [T] (None where ``lse`` was given) and the log-sum-exps [T], in fp32 (fp64 for fp64).

    On CUDA one kernel runs, which reads a row once for the log-sum-exp, and once more, from L2, for the gradient. The
    order of its sums is fixed. Elsewhere the reference runs.

    Raises ``ValueError`` for shapes that do not match, and ``TypeError`` for targets that are not int64.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or (logits.numel() and logits.stride(1) != 1):
        raise ValueError(
            f"cross_entropy_in_place needs logits [T, V] with adjacent columns and targets [T]; "
            f"got {tuple(logits.shape)}, stride {tuple(logits.stride())}, and {tuple(targets.shape)}"
        )
    if targets.dtype is not torch.int64:
        raise TypeError(f"cross_entropy_in_place needs int64 targets, got {targets.dtype}")
    if runs_on_triton("cross_entropy_in_place", logits):
        return cross_entropy_triton(logits, targets, terms, lse=lse, grads=grads)
    losses = None
    if lse is None:
        losses, lse = token_losses_reference(logits, targets, terms)
    if grads is not None:
        logit_grads_reference(logits, targets, lse, grads, terms)
    return losses, lse
