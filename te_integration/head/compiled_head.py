"""The head's losses in a form that ``torch.compile`` takes into its graph whole.

Each pass over the chunks is one operator: a compiler does not look into it, and keeps no logits. Where the weight
gradient goes into ``main_grad``, the operator of backward (and with ``in_forward`` that of forward) has an effect, as
``compiled_wgrad.py`` explains. Options are a ``LossTerms`` and ``chunk_tokens``, one after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.torch_internals import checkpointed_regions
from ...kernels.cross_entropy.chunks import head_losses
from ...kernels.cross_entropy.reference import LossTerms
from ...kernels.operators import define_operator
from ..dense.compiled_wgrad import handle_in_backward, handle_of, refuse_graphs_of_torch
from ..dense.products import cast
from ..torch_internals import make_effectful_op
from .in_forward import poison_of
from .recomputing import HeadWgrad, HeadWork, head_of
from .written_ahead import deliver_written, write_ahead

__all__ = ["compiled_losses", "compiled_losses_in_forward"]

_OPTIONS = (
    "int ignore_index, float label_smoothing, float z_loss, float? logit_softcap, float logit_scale, int chunk_tokens"
)


def compiled_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, key: Tensor | None, *options: Any
) -> Tensor:
    """``recomputed_losses`` inside a graph.

    key  of the module that writes the weight gradient, ``WgradHandle.key``; None: autograd delivers it
    """
    losses: Tensor = _Compiled.apply(hidden, weight, bias, targets, key, *options)
    return losses


def compiled_losses_in_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, key: Tensor, announced: Tensor, *options: Any
) -> Tensor:
    """``losses_in_forward`` inside a graph, of a weight whose gradient goes into our ``main_grad``."""
    losses: Tensor = _CompiledInForward.apply(hidden, weight, bias, targets, key, announced, *options)
    return losses


# As ``compiled_linear``: a compiler calls these once instead of tracing their Python.
torch.compiler.allow_in_graph(compiled_losses)
torch.compiler.allow_in_graph(compiled_losses_in_forward)


class _Compiled(torch.autograd.Function):
    """See ``compiled_losses``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        key: Tensor | None,
        *options: Any,
    ) -> Tensor:
        losses, lse = _losses_op(hidden, weight, bias, targets, *options)
        ctx.save_for_backward(hidden, weight, bias, targets, key, lse)
        ctx.options = options
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, key, lse = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        operands = [grads[0], lse, hidden, weight, targets, *([] if bias is None else [bias])]
        dw = None
        if needs_dw and key is not None:
            assert _backward_op is not None, "can_compile was asked"
            dx, db = _backward_op(operands, key, *ctx.options, needs_dx, needs_db)
        else:
            dx, dw, db = _grads_op(operands, *ctx.options, needs_dx, needs_dw, needs_db)
        return (
            dx if needs_dx else None,
            dw if needs_dw and key is None else None,
            cast(db, bias.dtype) if needs_db else None,
            *[None] * (2 + len(ctx.options)),
        )


class _CompiledInForward(torch.autograd.Function):
    """See ``compiled_losses_in_forward``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        key: Tensor,
        announced: Tensor,
        *options: Any,
    ) -> Tensor:
        needs_dx, _, needs_db, *_ = ctx.needs_input_grad
        operands = [announced, hidden, weight, targets, *([] if bias is None else [bias])]
        assert _in_forward_op is not None, "can_compile was asked"
        losses, dx, db, ahead = _in_forward_op(operands, key, *options, needs_dx, needs_db)
        ctx.save_for_backward(dx, db, ahead, announced, targets, key)
        ctx.ignore_index, ctx.num_options = options[0], len(options)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, db, ahead, announced, targets, key = ctx.saved_tensors
        needs_dx, _, needs_db, *_ = ctx.needs_input_grad
        assert _came_op is not None, "can_compile was asked"
        poison = _came_op([grads[0], announced, targets, ahead], key, ctx.ignore_index)
        return (
            dx + poison.to(dx.dtype) if needs_dx else None,
            None,
            cast(db + poison, ctx.bias_dtype) if needs_db else None,
            *[None] * (3 + ctx.num_options),
        )


# ---- The operators. ----


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    *terms, chunk_tokens = options
    with torch.no_grad():
        return head_losses(head_of(hidden, weight, bias, targets, LossTerms(*terms), chunk_tokens))[:2]


def _fake_losses(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    made = [hidden.new_empty(hidden.shape[0], dtype=_wide(hidden)) for _ in range(2)]
    return made[0], made[1]


_losses_op = define_operator(
    f"head_losses(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor)",
    _losses,
    _fake_losses,
)
"""``head_losses``: losses and log-sum-exps [T]."""


def _or_empty(found: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if found is None else found


def _work(operands: Sequence[Tensor], options: Sequence[Any], needs_dx: bool, needs_db: bool) -> HeadWork:
    """The products of a backward; operands: gradients of the losses, log-sum-exps, hidden, weight, targets, bias."""
    grads, lse, hidden, weight, targets, *bias = operands
    *terms, chunk_tokens = options
    head = head_of(hidden, weight, bias[0] if bias else None, targets, LossTerms(*terms), chunk_tokens)
    return HeadWork(head, grads, lse, needs_hidden=needs_dx, needs_bias=needs_db)


def _grads(operands: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *options, needs_dx, needs_dw, needs_db = rest
    hidden, weight = operands[2:4]
    work = _work(operands, options, needs_dx, needs_db)
    dw = work.weight_grad(weight.dtype) if needs_dw else None
    found = work.run()
    return _or_empty(found.hidden, hidden), _or_empty(dw, weight), _or_empty(found.bias, operands[1])


def _fake_grads(operands: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, needs_dx, needs_dw, needs_db = rest
    hidden, weight = operands[2:4]
    dx = hidden.new_empty(hidden.shape if needs_dx else (0,))
    dw = weight.new_empty(weight.shape if needs_dw else (0,))
    return dx, dw, operands[1].new_empty(weight.shape[0] if needs_db else 0)


_grads_op = define_operator(
    f"head_grads(Tensor[] operands, {_OPTIONS}, bool needs_dx, bool needs_dw, bool needs_db) "
    f"-> (Tensor, Tensor, Tensor)",
    _grads,
    _fake_grads,
)
"""``dx``, ``dW`` and ``db``; what is not needed is empty."""


def _backward(operands: list[Tensor], key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *options, needs_dx, needs_db = rest
    refuse_graphs_of_torch(operands[0])
    work = _work(operands, options, needs_dx, needs_db)
    handle_in_backward(key).deliver_by(HeadWgrad, 0, (work,))
    found = work.run()
    return _or_empty(found.hidden, operands[2]), _or_empty(found.bias, operands[1])


def _fake_backward(operands: list[Tensor], key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, needs_dx, needs_db = rest
    dx, _, db = _fake_grads(operands, needs_dx, False, needs_db)
    return dx, db


_backward_op = make_effectful_op(
    "head_backward",
    f"Tensor[] operands, Tensor key, {_OPTIONS}, bool needs_dx, bool needs_db",
    _backward,
    returns="(Tensor, Tensor)",
    fake=_fake_backward,
)
"""``dx`` and ``db``; ``dW`` goes into ``main_grad``."""


def _in_forward(operands: list[Tensor], key: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, needs_dx, needs_db = rest
    announced, hidden, weight, targets, *bias = operands
    *terms, chunk_tokens = options
    refuse_graphs_of_torch(hidden)
    handle = handle_of(key)
    if checkpointed_regions():
        raise RuntimeError(
            f'{handle.module.describe()}: mode="in_forward" in compiled code inside torch.utils.checkpoint writes '
            f'main_grad twice: leave the head out of the region, or use mode="recompute"'
        )
    with torch.no_grad():
        head = head_of(hidden, weight, bias[0] if bias else None, targets, LossTerms(*terms), chunk_tokens)
        work = HeadWork(head, announced.expand(targets.shape), None, needs_hidden=needs_dx, needs_bias=needs_db)
        ahead = write_ahead(handle.use(HeadWgrad, 0, handle.registered(0)), (work,))
        found = work.run()
    assert found.losses is not None, "no log-sum-exp was given"
    return found.losses, _or_empty(found.hidden, hidden), _or_empty(found.bias, announced), ahead


def _fake_in_forward(operands: list[Tensor], key: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, needs_dx, needs_db = rest
    announced, hidden, weight, *_ = operands
    dx = hidden.new_empty(hidden.shape if needs_dx else (0,))
    db = announced.new_empty(weight.shape[0] if needs_db else 0)
    losses = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
    return losses, dx, db, torch.empty(1, dtype=torch.uint8, device="cpu")


_in_forward_op = make_effectful_op(
    "head_in_forward",
    f"Tensor[] operands, Tensor key, {_OPTIONS}, bool needs_dx, bool needs_db",
    _in_forward,
    returns="(Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_in_forward,
)
"""Losses, ``dx``, ``db`` and the token; ``dW`` goes into ``main_grad``."""


def _came(operands: list[Tensor], key: Tensor, ignore_index: int) -> Tensor:
    grads, announced, targets, ahead = operands
    handle = handle_in_backward(key)
    poison = poison_of(grads, announced, targets, ignore_index, handle.module.describe())
    weight = handle.only_weight_wanted()
    if weight is not None:
        deliver_written(handle.use(HeadWgrad, 0, [weight]), ahead, poison)
    return poison


_came_op = make_effectful_op(
    "head_came",
    "Tensor[] operands, Tensor key, int ignore_index",
    _came,
    fake=lambda operands, *rest: operands[1].new_empty(1),
)
"""Backward has come: what is added to the gradients, [1]."""
