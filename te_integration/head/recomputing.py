"""``recomputed_losses``: the head's losses, whose backward computes the logits again, but for one chunk's.

Legend: T tokens, K features, V classes.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.streams import is_capturing
from ...ddp.torch_internals import checkpointed_regions, current_backward, watch_prehooks
from ...kernels.cross_entropy.chunks import Head, HeadGrads, head_grads, head_losses
from ...kernels.cross_entropy.reference import LossTerms
from ..dense.linear import ProductUse, wanted_and_places, weight_grads
from ..dense.products import cast

__all__ = ["HeadWgrad", "HeadWork", "head_of", "recomputed_losses", "refuse_create_graph"]


class HeadWork:
    """The products of a head's backward. A pass over the chunks computes ``dx`` and ``db`` beside ``dW``."""

    def __init__(
        self,
        head: Head,
        grads: Tensor,
        lse: Tensor | None,
        first_logits: Tensor | None = None,
        *,
        needs_hidden: bool,
        needs_bias: bool,
    ) -> None:
        self._head, self._grads, self._lse, self._first_logits = head, grads, lse, first_logits
        self._needs_hidden, self._needs_bias = needs_hidden, needs_bias
        self._found: HeadGrads | None = None

    def run(self, main_grad: Tensor | None = None, *, overwrite: bool = False) -> HeadGrads:
        """``main_grad (+)= dW``. ``dx`` and ``db`` come of the first pass; without ``main_grad`` they are all it does.

        A captured backward runs the second pass, for ``dW`` alone.
        """
        if self._found is None:
            first_logits, self._first_logits = self._first_logits, None  # their gradient comes in their place
            self._found = head_grads(
                self._head,
                self._grads,
                self._lse,
                first_logits=first_logits,
                needs_hidden=self._needs_hidden,
                needs_bias=self._needs_bias,
                main_grad=main_grad,
                overwrite=overwrite,
            )
        elif main_grad is not None:
            head_grads(self._head, self._grads, self._lse, needs_hidden=False, main_grad=main_grad, overwrite=overwrite)
        return self._found

    def weight_grad(self, dtype: torch.dtype) -> Tensor:
        """``dW`` as a new tensor, whose chunks are summed in fp32 (fp64 for fp64)."""
        total = torch.empty_like(self._head.weight, dtype=dtype, memory_format=torch.contiguous_format)
        self.run(total, overwrite=True)
        return total


class HeadWgrad:
    """The ``WgradProduct`` of a head: its operand is a ``HeadWork``."""

    rows_apart = False

    def __init__(self, weights: Sequence[Tensor]) -> None: ...

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """See ``WgradProduct``."""
        return True  # a head has one weight

    def accumulate(self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], work: HeadWork) -> None:
        """See ``WgradProduct``."""
        work.run(main_grads[0], overwrite=overwrite[0])

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, work: HeadWork) -> list[Tensor | None]:
        """See ``WgradProduct``."""
        return [work.weight_grad(dtype) if wanted[0] else None]


def recomputed_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    terms: LossTerms,
    chunk_tokens: int,
    use: ProductUse,
) -> Tensor:
    """Loss of each token: [T, K], [V, K], [V], [T] -> [T], fp32 (fp64 for fp64).

    Weight and bias are cast to the dtype of ``hidden``. Backward takes any gradient [T], and delivers ``dW`` as ``use``
    says.
    """
    losses: Tensor = _apply_directly(hidden, weight, bias, targets, terms, chunk_tokens, use)
    return losses


def head_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, terms: LossTerms, chunk_tokens: int
) -> Head:
    """The head with weight and bias in the dtype of ``hidden``."""
    dtype = hidden.dtype
    bias = None if bias is None else cast(bias, dtype)
    return Head(hidden, cast(weight, dtype), bias, targets, terms, chunk_tokens)


class _Recomputed(torch.autograd.Function):
    """See ``recomputed_losses``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: LossTerms,
        chunk_tokens: int,
        use: ProductUse,
    ) -> Tensor:
        losses, lse, first_logits = head_losses(head_of(hidden, weight, bias, targets, terms, chunk_tokens))
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        _keep_first_logits(ctx, first_logits)
        ctx.terms, ctx.chunk_tokens, ctx.use = terms, chunk_tokens, use
        ctx.outer_backward = current_backward()  # as in ``_FusedLinear``
        ctx.weight_dtype = weight.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph(ctx.use.owner)
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        wanted, places = wanted_and_places(ctx, [needs_dw])
        head = head_of(hidden, weight, bias, targets, ctx.terms, ctx.chunk_tokens)
        first_logits, ctx.first_logits = ctx.first_logits, None
        work: Any = HeadWork(head, grads[0], lse, first_logits, needs_hidden=needs_dx, needs_bias=needs_db)
        (dw,) = weight_grads(ctx, wanted, places, (work,))
        found = work.run()
        return found.hidden, dw, found.bias, None, None, None, None  # autograd casts the bias's


_latest: weakref.ref[Any] | None = None
"""The last forward of all heads whose first logits were kept; held weakly."""


def _keep_first_logits(ctx: Any, logits: Tensor) -> None:
    """Keep ``logits`` for the backward of ``ctx``, unless another forward comes before it: forwards whose backwards
    come later, as in a pipeline that fills first, would else hold a chunk's logits each.

    They are not saved: a second backward would find them overwritten. A checkpointed region would hold them until its
    backward, and a graph that torch captures may replay its backward twice.
    """
    global _latest
    earlier = None if _latest is None else _latest()
    if earlier is not None:
        earlier.first_logits = None
    in_graph_of_torch = logits.is_cuda and torch.cuda.is_current_stream_capturing() and not is_capturing()
    ctx.first_logits = None if checkpointed_regions() or in_graph_of_torch else logits
    _latest = weakref.ref(ctx)


_apply_directly = super(torch.autograd.Function, _Recomputed).apply  # as in ``dense/linear.py``
watch_prehooks(_Recomputed)


def refuse_create_graph(owner: str) -> None:
    """Raise ``RuntimeError`` in a backward whose gradients must be differentiable."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{owner}: backward(create_graph=True) through a loss whose logits are not kept; use "
            f"torch.nn.functional.cross_entropy of logits(hidden) for second derivatives"
        )
