"""``losses_in_forward``: the head's losses, with all gradients made in forward of the only logits.

The gradient that backward will bring is known before. ``dW`` goes into ``main_grad`` in forward, and a token stands for
that contribution until backward comes: ``written_ahead.py`` has what becomes of one whose backward does not come.

Legend: T tokens, K features, V classes.
"""

from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.main_grad import Demand, demand, record_of
from ...ddp.torch_internals import NO_BACKWARD, checkpointed_regions, current_backward
from ...kernels.cross_entropy.chunks import HeadGrads, head_losses
from ...kernels.cross_entropy.reference import LossTerms
from ..dense.linear import ProductUse
from .recomputing import HeadWork, head_of, refuse_create_graph
from .written_ahead import deliver_written, write_ahead

__all__ = ["can_write_in_forward", "losses_in_forward", "poison_of"]

_TOLERANCE = 1e-6
"""Relative difference between announced and real gradient that is rounding: a few units of fp32."""


def can_write_in_forward(weight: Tensor, fused: bool) -> bool:
    """Whether the weight's gradient can be written in forward: into our wrapper's ``main_grad``, or not at all."""
    if not torch.is_grad_enabled():
        return False
    return record_of(weight) is not None if fused else not weight.requires_grad


def losses_in_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    announced: Tensor,
    terms: LossTerms,
    chunk_tokens: int,
    use: ProductUse,
) -> Tensor:
    """Loss of each token: [T, K], [V, K], [V], [T] -> [T], fp32 (fp64 for fp64).

    announced  0-dim: the gradient that backward will bring to each token that is not ignored

    The recompute of a non-reentrant checkpoint computes the losses alone: the first forward has the gradients.
    """
    recomputes = current_backward() != NO_BACKWARD and any(again for _, again in checkpointed_regions())
    losses: Tensor = _InForward.apply(hidden, weight, bias, targets, announced, terms, chunk_tokens, use, recomputes)
    return losses


class _InForward(torch.autograd.Function):
    """See ``losses_in_forward``. Nothing is saved by ``save_for_backward``: a checkpoint would compute it again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        announced: Tensor,
        terms: LossTerms,
        chunk_tokens: int,
        use: ProductUse,
        recomputes: bool,
    ) -> Tensor:
        head = head_of(hidden, weight, bias, targets, terms, chunk_tokens)
        ctx.use, ctx.found = use, None
        if recomputes:
            return head_losses(head)[0]
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        grads = announced.expand(targets.shape)
        work: Any = HeadWork(head, grads, None, needs_hidden=needs_dx, needs_bias=needs_db)
        ctx.ahead = None
        if needs_dw:
            ctx.ahead = write_ahead(use, (work,))
        found: HeadGrads = work.run()
        ctx.found = found.hidden, found.bias  # autograd casts it
        ctx.announced, ctx.targets, ctx.ignore_index = announced, targets, terms.ignore_index
        assert found.losses is not None, "no log-sum-exp was given"
        losses: Tensor = found.losses
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        owner = ctx.use.owner
        refuse_create_graph(owner)
        if ctx.found is None:
            raise RuntimeError(
                f'{owner}: a second backward through a forward in mode="in_forward", whose gradients are used up: call '
                f'backward() once, or use mode="recompute"'
            )
        wanted = demand(ctx.next_functions[1][0]) if ctx.needs_input_grad[1] else Demand.NOTHING
        if wanted is Demand.RETURN:
            raise RuntimeError(
                f'{owner}: autograd.grad(loss, weight) in mode="in_forward", whose forward wrote the gradient into '
                f'main_grad; call backward(), or use mode="recompute"'
            )
        poison = poison_of(grads[0], ctx.announced, ctx.targets, ctx.ignore_index, owner)
        if wanted is Demand.ACCUMULATE:
            dw = deliver_written(ctx.use, ctx.ahead, poison)
        else:
            dw = None
        (dx, db), ctx.found, ctx.ahead = ctx.found, None, None
        dx, db = (None if each is None else each.add_(poison) for each in (dx, db))
        return dx, dw, db, None, None, None, None, None, None


def poison_of(grads: Tensor, announced: Tensor, targets: Tensor, ignore_index: int, owner: str) -> Tensor:
    """[1]: 0, or NaN where the gradients that came are not the announced ones; on a CPU ``RuntimeError``."""
    close = (grads - announced).abs() <= _TOLERANCE * announced.abs()
    fits = (close | (targets == ignore_index)).all()
    if not fits.is_cuda and not fits:
        raise RuntimeError(
            f'{owner}: mode="in_forward" was told another gradient of the loss than backward has brought: pass '
            f"grad_scale=, a number or a tensor on the device, to the forward (1 without; 1 / microbatches where the "
            f'loss is divided by them; the GradScaler\'s scale), or use mode="recompute"'
        )
    return torch.where(fits, 0.0, float("nan")).reshape(1)
