"""Cross-entropy of a linear head, chunk of tokens by chunk: no more logits are in memory than one chunk's.

Legend: T tokens, C tokens of a chunk, K features, V classes. With ``dr`` of ``reference.py``::

    r = x W^T + b        dx = dr W        dW = dr^T x        db = sum over tokens of dr
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..wgrad import wgrad_accumulate
from .cross_entropy import cross_entropy_in_place
from .reference import LossTerms

__all__ = ["Head", "HeadGrads", "head_grads", "head_losses"]


class Head(NamedTuple):
    """A linear head and its tokens: the operands of all products, in one dtype."""

    hidden: Tensor
    """[T, K]."""
    weight: Tensor
    """[V, K]."""
    bias: Tensor | None
    """[V]."""
    targets: Tensor
    """[T], int64."""
    terms: LossTerms
    chunk_tokens: int

    def chunks(self) -> list[slice]:
        """Rows of each chunk, as even as can be: products of few rows are slow."""
        tokens = self.hidden.shape[0]
        number = -(-tokens // self.chunk_tokens)
        rows = -(-tokens // max(number, 1))
        return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)] if tokens else []

    def memory(self) -> Tensor:
        """Uninitialised memory [C, V] for the logits of any chunk."""
        rows = max((chunk.stop - chunk.start for chunk in self.chunks()), default=0)
        return self.hidden.new_empty(rows, self.weight.shape[0])

    def logits(self, chunk: slice, memory: Tensor) -> Tensor:
        """``r`` of a chunk, in ``memory``."""
        out = memory[: chunk.stop - chunk.start]
        if self.bias is None:
            return torch.mm(self.hidden[chunk], self.weight.t(), out=out)
        return torch.addmm(self.bias, self.hidden[chunk], self.weight.t(), out=out)


class HeadGrads(NamedTuple):
    """What ``head_grads`` has computed; None: not asked for."""

    losses: Tensor | None
    """[T]; None where ``lse`` was given."""
    hidden: Tensor | None
    """``dx`` [T, K]."""
    bias: Tensor | None
    """``db`` [V], fp32 (fp64 for fp64)."""


def head_losses(head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and log-sum-exps [T], in fp32 (fp64 for fp64), and the logits of the first chunk, [C, V].

    The first chunk comes last: its logits are still there when backward, right behind it as a rule, begins with it.
    """
    dtype = torch.promote_types(head.hidden.dtype, torch.float32)
    losses, lse = (head.hidden.new_empty(head.hidden.shape[0], dtype=dtype) for _ in range(2))
    memory = head.memory()
    for chunk in reversed(head.chunks()):
        found = cross_entropy_in_place(head.logits(chunk, memory), head.targets[chunk], head.terms)
        assert found[0] is not None, "no log-sum-exp was given"
        losses[chunk], lse[chunk] = found[0], found[1]
    return losses, lse, memory


def head_grads(
    head: Head,
    grads: Tensor,
    lse: Tensor | None,
    *,
    first_logits: Tensor | None = None,
    needs_hidden: bool = True,
    needs_bias: bool = False,
    main_grad: Tensor | None = None,
    overwrite: bool = False,
) -> HeadGrads:
    """Gradients of a head whose tokens' losses have the gradients ``grads`` [T] (any stride).

    lse           [T] of ``head_losses``; None: each chunk's logits are used for the loss and for the gradient
    first_logits  [C, V] of ``head_losses``, which become the memory of all chunks; None: computed again
    main_grad     [V, K] gets or adds ``dW``: a chunk's product is added in the accumulator's dtype. One that is
                  narrower than fp32 gets the sum of all chunks, which is kept in fp32 until then
    overwrite     ``main_grad`` may hold anything: the first chunk writes, and the others add
    """
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    dx = torch.empty_like(head.hidden, memory_format=torch.contiguous_format) if needs_hidden else None
    db = head.hidden.new_zeros(head.weight.shape[0], dtype=wide) if needs_bias else None
    losses = head.hidden.new_empty(head.hidden.shape[0], dtype=wide) if lse is None else None
    chunks, memory = head.chunks(), head.memory() if first_logits is None else first_logits
    total, fresh = main_grad, overwrite
    if main_grad is not None and torch.promote_types(main_grad.dtype, torch.float32) is not main_grad.dtype:
        total, fresh = torch.empty_like(main_grad, dtype=torch.float32), True
    if not chunks and total is not None and fresh:
        total.zero_()
    for chunk in chunks:
        is_known = chunk.start == 0 and first_logits is not None
        logits = memory[: chunk.stop] if is_known else head.logits(chunk, memory)
        known = None if lse is None else lse[chunk]
        found, _ = cross_entropy_in_place(logits, head.targets[chunk], head.terms, lse=known, grads=grads[chunk])
        if losses is not None:
            assert found is not None, "no log-sum-exp was given"
            losses[chunk] = found
        if dx is not None:
            torch.mm(logits, head.weight, out=dx[chunk])
        if db is not None:
            db += logits.sum(0, dtype=wide)
        if total is not None:
            wgrad_accumulate(logits, head.hidden[chunk], total, overwrite=fresh and chunk.start == 0)
    if main_grad is not None and total is not None and total is not main_grad:
        if overwrite:
            main_grad.copy_(total)
        else:
            main_grad.add_(total)
    return HeadGrads(losses, dx, db)
