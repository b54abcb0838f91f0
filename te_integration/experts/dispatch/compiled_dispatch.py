"""Dispatch and combine in a form that ``torch.compile`` takes into its graph: one operator for each way of the rows.

A transport qualifies if the host knows beforehand how many rows a rank receives at most, and reads nothing. Operators
have an ordered effect, as ``compiled_wgrad.py`` explains: all ranks exchange in one order, and a compiler that dropped,
merged or repeated an exchange on one of them would leave the others waiting. What the transport keeps of a way is a
list of tensors in a graph. Legend: as in ``transport.py``; T tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels import unpermute_rows
from ....kernels.permutation.operators import permute_rows_op
from ...dense.compiled_wgrad import can_compile, key_of, named_by, refuse_graphs_of_torch
from ...torch_internals import is_tracing_recomputed, make_effectful_op
from ..moe_permutation import RowIdMap
from .capacity import Capacity, Slots
from .symmetric import Route, SymmetricExchange

__all__ = ["Place"]


class _Form(NamedTuple):
    """How graphs see what a transport keeps of a way."""

    transport: type[Any]
    tensors: Callable[[Any], list[Tensor]]
    """``sent`` -> tensors; the last has the rows of each local expert."""
    restored: Callable[[Sequence[Tensor], int], Any]
    """Such tensors and R -> ``sent``."""
    empty: Callable[[Tensor, int, int, int], list[Tensor]]
    """Tensors of the same shapes: of the counts [E], R, S and E / ep."""


_FORMS = (
    _Form(
        Capacity,
        lambda sent: [*sent[:-1], *sent.sorting],
        lambda tensors, rows: Slots(tensors[0], tensors[1], tensors[2], RowIdMap(*tensors[3:])),
        lambda counts, rows, received, num_local: [
            counts.new_empty(received),
            counts.new_empty(rows),
            counts.new_empty(rows, dtype=torch.bool),
            counts.new_empty(received, 1),
            counts.new_empty(received),
            counts.new_empty(num_local),
        ],
    ),
    _Form(
        SymmetricExchange,
        lambda sent: [sent.plan, sent.splits],
        lambda tensors, rows: Route(tensors[0], tensors[1], rows),
        lambda counts, rows, received, num_local: [
            counts.new_empty(2 * counts.shape[0] + 1, dtype=torch.int32),
            counts.new_empty(num_local),
        ],
    ),
)


class Place:
    """A transport as graphs name it."""

    def __init__(self, transport: Any) -> None:
        self.form = next((at for at, form in enumerate(_FORMS) if type(transport) is form.transport), -1)
        """Index in ``_FORMS``; -1: it needs eager code."""
        self.transport = transport
        self.key = key_of(self)

    @property
    def is_usable(self) -> bool:
        """Whether the graph that is traced can name it: ``num_received`` may need a first call."""
        if self.form < 0 or self.transport.num_received is None or not can_compile():
            return False
        return not torch.compiler.is_compiling() or not is_tracing_recomputed()

    def send(self, tensors: Sequence[Tensor], counts: Tensor) -> tuple[list[Tensor], Tensor, Any]:
        """``TokenTransport.send`` of rows that have not travelled before. Differentiable."""
        transport, num_sent = self.transport, len(tensors)
        sizes = transport.num_received, transport.num_local
        found = _send_op(tensors, self.key, counts, [], self.form, *sizes)
        sent = found[num_sent:]
        return found[:num_sent], sent[-1], _FORMS[self.form].restored(sent, tensors[0].shape[0])

    def send_back(self, rows: Tensor, sent: Any, places: Tensor) -> Tensor:
        """``TokenTransport.send_back``, and the sum over the copies of each token: [S, D] -> [T, D]. Differentiable.

        places  [T, k] of ``RowIdMap``. The same operator sums, for a compiler keeps results of operators with effects
                for backward, and copies are k times larger
        """
        of_way = _FORMS[self.form].tensors(sent)
        (returned,) = _back_op([rows], self.key, of_way, self.form, places.numel(), places)
        return returned  # type: ignore[no-any-return]


# ---- The operators. ----


def _transport_of(key: Tensor, like: Tensor) -> Any:
    refuse_graphs_of_torch(like)
    place: Place | None = named_by(key)
    if place is None:
        raise RuntimeError("a TokenDispatcher was freed between its compiled forward and the backward: keep it")
    return place.transport


def _send(
    tensors: list[Tensor],
    key: Tensor,
    counts: Tensor | None,
    sent: Sequence[Tensor],
    form: int,
    received: int,
    num_local: int,
) -> list[Tensor]:
    transport, (_, flat, restored, _) = _transport_of(key, tensors[0]), _FORMS[form]
    if counts is None:
        arrived: list[Tensor] = transport.send(tensors, sent[-1], restored(sent, 0))[0]
        return arrived
    arrived, _, way = transport.send(tensors, counts)
    return [*arrived, *flat(way)]


def _fake_send(
    tensors: list[Tensor],
    key: Tensor,
    counts: Tensor | None,
    sent: Sequence[Tensor],
    form: int,
    received: int,
    num_local: int,
) -> list[Tensor]:
    arrived = [tensor.new_empty(received, *tensor.shape[1:]) for tensor in tensors]
    return arrived if counts is None else [*arrived, *_FORMS[form].empty(counts, len(tensors[0]), received, num_local)]


def _back(
    tensors: list[Tensor], key: Tensor, sent: Sequence[Tensor], form: int, rows: int, places: Tensor | None
) -> list[Tensor]:
    back: list[Tensor] = _transport_of(key, tensors[0]).send_back(tensors, _FORMS[form].restored(sent, rows))
    return back if places is None else [unpermute_rows(back[0], places)]


_send_op: Any = make_effectful_op(
    "send_rows",
    "Tensor[] tensors, Tensor key, Tensor? counts, Tensor[] sent, int form, SymInt received, int num_local",
    _send,
    returns="Tensor[]",
    fake=_fake_send,
)
"""Received rows, and behind those of a first way what the transport keeps of it; ``sent``: rows go that way again."""

_back_op: Any = make_effectful_op(
    "send_rows_back",
    "Tensor[] tensors, Tensor key, Tensor[] sent, int form, SymInt rows, Tensor? places",
    _back,
    returns="Tensor[]",
    fake=lambda tensors, key, sent, form, rows, places: [
        tensor.new_empty(rows if places is None else places.shape[0], *tensor.shape[1:]) for tensor in tensors
    ],
)
"""[S, ...] each -> [R, ...]; with ``places`` [T, k] the sums [T, D] of the one tensor's rows."""


# ---- The gradient of each is the other one. ----


def _keep_sent(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, key, _, _, ctx.form, *_ = inputs
    ctx.save_for_backward(key, *output[len(tensors) :])
    ctx.rows, ctx.num_sent = tensors[0].shape[0], len(tensors)


def _grad_of_sent(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    key, *sent = ctx.saved_tensors
    # All go back if one needs it, as in eager code: x may need none on one rank.
    return _back_op(grads[: ctx.num_sent], key, sent, ctx.form, ctx.rows, None), None, None, [], None, None, None


def _keep_returned(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    (rows,), key, sent, ctx.form, _, places = inputs
    ctx.save_for_backward(key, places, *sent)
    ctx.received = rows.shape[0]


def _grad_of_returned(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    key, places, *sent = ctx.saved_tensors
    rows = permute_rows_op(grads[0], places)
    again = _send_op([rows], key, None, sent, ctx.form, ctx.received, 0)
    return again, None, [None] * len(sent), None, None, None


if _send_op is not None:
    torch.library.register_autograd("maingrad::send_rows", _grad_of_sent, setup_context=_keep_sent)
    torch.library.register_autograd("maingrad::send_rows_back", _grad_of_returned, setup_context=_keep_returned)
