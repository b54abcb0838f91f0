"""The Triton kernel of the cross-entropy of logits, and of its gradient in place of the logits.

Legend: T tokens, V classes. ``reference.py`` has the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import device_of
from .reference import LossTerms

__all__ = ["cross_entropy_triton"]

_WIDEST = 4096
"""Elements of a row in one step: 16 per thread with 8 warps, which are two loads of 16 bytes in bf16."""
_NUM_WARPS = 8
_LOWEST = tl.constexpr(-3.4028235e38)


@triton.jit
def _scaled_and_capped(logits: tl.tensor, scale: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """``z``. Triton has no tanh: it is ``2 sigmoid(2 x) - 1``."""
    z = logits * scale
    if cap is not None:
        z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)
    return z


@triton.jit
def _cross_entropy_kernel(
    logits: tl.tensor, targets: tl.tensor, grads: tl.tensor, lses: tl.tensor, losses: tl.tensor, V: tl.tensor,
    stride: tl.tensor, stride_grads: tl.tensor, ignore_index: tl.tensor, smoothing: tl.tensor, z_loss: tl.tensor,
    cap: tl.tensor, scale: tl.tensor, HAS_LSE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A program handles a row. Without HAS_LSE the first pass finds the log-sum-exp and the loss.

    The second pass writes the gradient in place, if there are ``grads``. A row of 131,072 in bf16 is 256 KiB: all rows
    in flight fit in the L2 of an H100, from which the second pass reads.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    target = tl.load(targets + row)
    valid = target != ignore_index
    if HAS_LSE:
        lse = tl.load(lses + row)
    else:
        in_range = (target >= 0) & (target < V)
        of_target = tl.load(base + target, mask=in_range, other=float("nan")).to(tl.float32)
        of_target = _scaled_and_capped(of_target, scale, cap)
        # Each lane keeps its own maximum and sum, so that the loop has no reduction across threads.
        largest = tl.full((BLOCK,), _LOWEST, dtype=tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        totals = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            raw = tl.load(base + column, mask=column < V, other=0.0).to(tl.float32)  # [BLOCK]
            z = _scaled_and_capped(raw, scale, cap)
            if smoothing is not None:
                totals += tl.where(column < V, z, 0.0)
            z = tl.where(column < V, z, float("-inf"))
            new = tl.maximum(largest, z)
            sums = sums * tl.exp(largest - new) + tl.exp(z - new)
            largest = new
        top = tl.max(largest, axis=0)
        lse = top + tl.log(tl.sum(sums * tl.exp(largest - top), axis=0))
        if smoothing is not None:
            loss = lse - (1 - smoothing) * of_target - smoothing * tl.sum(totals, axis=0) / V
        else:
            loss = lse - of_target
        if z_loss is not None:
            loss += z_loss * lse * lse
        tl.store(lses + row, lse)
        tl.store(losses + row, tl.where(valid, loss, 0.0))
    if grads is not None:
        upstream = tl.load(grads + row * stride_grads).to(tl.float32)
        of_probability = upstream
        if z_loss is not None:
            of_probability = upstream * (1 + 2 * z_loss * lse)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            raw = tl.load(base + column, mask=column < V, other=0.0).to(tl.float32)  # [BLOCK]
            z = _scaled_and_capped(raw, scale, cap)
            dz = tl.exp(z - lse) * of_probability
            if smoothing is not None:
                dz -= upstream * (tl.where(column == target, 1 - smoothing, 0.0) + smoothing / V)
            else:
                dz -= tl.where(column == target, upstream, 0.0)
            if cap is not None:
                dz *= 1 - (z / cap) * (z / cap)
            dz = tl.where(valid, dz * scale, 0.0)
            tl.store(base + column, dz.to(logits.dtype.element_ty), mask=column < V)


def cross_entropy_triton(
    logits: Tensor, targets: Tensor, terms: LossTerms, *, lse: Tensor | None = None, grads: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """See ``cross_entropy_in_place``."""
    rows, classes = logits.shape
    has_lse = lse is not None
    losses = None if has_lse else logits.new_empty(rows, dtype=torch.float32)
    lse = logits.new_empty(rows, dtype=torch.float32) if lse is None else lse
    if not rows:
        return losses, lse
    with device_of(logits):
        _cross_entropy_kernel[(rows,)](
            logits, targets.contiguous(), grads, lse, losses, classes, logits.stride(0),
            0 if grads is None else grads.stride(0), terms.ignore_index, terms.label_smoothing or None,
            terms.z_loss or None, terms.logit_softcap, terms.logit_scale, HAS_LSE=has_lse,
            BLOCK=min(_WIDEST, max(16, triton.next_power_of_2(classes))), num_warps=_NUM_WARPS,
        )  # fmt: skip
    return losses, lse
