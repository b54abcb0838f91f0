"""Where a weight gradient goes: the consumer's side of the contract, in the order that the contract asks for."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ...kernels import grouped_wgrad_accumulate, wgrad_accumulate
from ..torch_internals import has_tensor_hooks
from .delayed import DelayedWgrad
from .main_grad import (
    accumulator_of,
    add_to_grad,
    check_provided,
    hand_over,
    hand_over_sum,
    has_main_grad,
    open_for_write,
    record_of,
)
from .record import GradRecord
from .torch_ddp import refuse_delay
from .torch_fsdp import TorchShards

__all__ = ["GroupedWgradTarget", "Place", "WgradQueueLike", "WgradTarget", "fresh_grouped_wgrads"]


class WgradQueueLike(Protocol):
    """Where delayed weight gradients wait."""

    def put(self, entry: DelayedWgrad) -> None:
        """Append one."""


def live_queue(queue: "weakref.ref[WgradQueueLike]", owner: str) -> WgradQueueLike:
    """Raise ``RuntimeError`` where nobody has kept it."""
    live = queue()
    if live is None:
        raise RuntimeError(
            f"{owner}: the WgradQueue that this forward delayed into was let go before backward, and nobody would "
            f"compute what it delays: keep the queue until it is drained"
        )
    return live


Place: TypeAlias = tuple[Tensor, Tensor | None]
"""Where a weight's gradient goes, looked up before any product of a backward: the object that carries the contract's
attributes, and its checked accumulator where this backward writes it. A plain tuple: every product makes one."""


class WgradTarget:
    """Where the gradient of one weight goes, for one forward and backward of one module.

    It refers to the weight's Python object weakly, since the object that comes out of ``ctx.saved_tensors`` may be a
    copy without attributes (saved-tensor hooks, recompute, offload), and since an autograd graph must not keep a weight
    alive. In backward ``resolve`` runs before any GEMM, ``deliver`` after the input gradient.

    owner       the module, for errors
    fused       into ``main_grad``; otherwise (delayed weight gradients only) into ``.grad``
    queue       where the weight gradient waits for its turn, held weakly: modules keep targets, and whoever drains the
                queue keeps that; None: it is computed in backward
    rows_apart  ``main_grad`` need not be contiguous: see ``accumulator_of``

    Under torch's FSDP2 the accumulator is FSDP2's: see ``TorchShards``. Raises ``RuntimeError`` there for a queue.
    """

    __slots__ = ("_fused", "_owner", "_queue", "_rows_apart", "_torch_shards", "_weight")

    def __init__(
        self,
        weight: Tensor,
        owner: str,
        *,
        fused: bool = True,
        queue: WgradQueueLike | None = None,
        rows_apart: bool = False,
    ) -> None:
        self._weight = TensorWeakRef(weight)
        self._owner = owner
        self._fused = fused
        self._queue = None if queue is None else weakref.ref(queue)
        self._rows_apart = rows_apart
        self._torch_shards = None if has_main_grad(weight) else TorchShards.of(weight)
        if queue is not None and self._torch_shards is not None:
            raise self._torch_shards.refuse_delay(owner)
        if queue is not None and not has_main_grad(weight):
            refuse_delay(owner, weight)

    def refers_to(self, weight: Tensor) -> bool:
        """Whether this is ``weight``'s target."""
        return self._weight() is weight

    def alive(self) -> tuple[Tensor, ...]:
        """The weight, or nothing where it was freed."""
        weight = self._weight()
        return () if weight is None else (weight,)

    def resolve(self) -> Place | None:
        """The weight's object, and its checked accumulator where this backward writes one; None: autograd delivers it.

        Raises ``RuntimeError`` that names the module for a weight that is gone, a missing ``main_grad``, or one that
        cannot be written: see ``accumulator_of``; and for a hook on a weight whose gradient is delayed.
        """
        if self._torch_shards is not None:
            weight = self._alive_weight()
            accumulator = self._torch_shards.accumulator(weight)
            return None if accumulator is None else (weight, accumulator)
        weight = self._alive_weight()
        if has_tensor_hooks(weight):  # somebody wants to see the gradient, since after the forward
            self._check_seen()
            return None
        if self._fused and self._queue is None:
            return self.resolve_for_write()
        if self._fused:
            check_provided(weight, self._owner)
        return weight, None  # a lazy provider's memory is taken when a delayed gradient is written, not before

    def resolve_for_write(self) -> Place:
        """The same where the gradient is written at once: a delayed one's turn has come."""
        weight = self._alive_weight()
        return weight, accumulator_of(weight, self._owner, rows_apart=self._rows_apart) if self._fused else None

    def deliver(self, weight: Tensor, main_grad: Tensor | None, dy: Tensor, x: Tensor, backward: int) -> Tensor | None:
        """In backward: ``main_grad (+)= dy^T x``, now or later, and the flag; returns what autograd must be handed.

        dy [T, N], x [T, K]; ``weight`` [N, K] and ``main_grad`` [N, K] come from ``resolve``. ``backward`` is the graph
        task, in reentrant recompute the one around it.
        """
        record = record_of(weight)
        if self._queue is not None:
            records = () if record is None else (record,)
            queue = live_queue(self._queue, self._owner)
            queue.put(DelayedWgrad(self._write, (dy, x), records, self._owner, backward, self.alive))
        elif main_grad is not None:
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, backward))
        return hand_over(weight, record, delayed=self._queue is not None, fused=self._fused)

    def _write(self, entry: DelayedWgrad, dy: Tensor, x: Tensor) -> None:
        """A delayed weight gradient's turn has come."""
        weight, main_grad = self.resolve_for_write()
        record = record_of(weight)
        if main_grad is not None:
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, entry.backward))
        else:
            add_to_grad(weight, (dy.t() @ x).to(weight.dtype), record)
        _settle(weight, record, entry)

    def _check_seen(self) -> None:
        if self._queue is not None:
            raise RuntimeError(
                f"{self._owner}: a hook on the weight (register_hook) wants to see its gradient in backward, and that "
                f"is delayed; remove the hook and change .grad or main_grad before the step, or let this module "
                f"compute its gradients in backward"
            )

    def _alive_weight(self) -> Tensor:
        weight: Tensor | None = self._weight()
        if weight is None:
            raise RuntimeError(f"{self._owner}: the weight was freed between forward and backward")
        return weight


def _settle(weight: Tensor, record: GradRecord | None, entry: DelayedWgrad) -> None:
    """After a delayed weight gradient was written: a tied weight may have owners that fuse and owners that do not."""
    if record is not None and record.sum_in_grad and entry.is_last_of(record):
        hand_over_sum(weight, record)


class GroupedWgradTarget:
    """Where the gradients of a grouped product's weights go: one product for all of them, each by its own row.

    The weights are the experts' [N, K], or one packed [E, N, K]. What the contract says of a weight it says of each
    expert alone: its flag, its record, whether its first write overwrites, and whether it is frozen; a packed weight's
    ``main_grad`` is written as it is, without a view for each expert. The other arguments are ``WgradTarget``'s.

    names  of the weights, for errors
    """

    __slots__ = ("_fused", "_owner", "_packed", "_queue", "_targets", "_tied")

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        owner: str,
        *,
        packed: bool,
        fused: bool = True,
        queue: WgradQueueLike | None = None,
    ) -> None:
        self._targets = tuple(
            [
                WgradTarget(weight, f"{owner}, {name}", fused=fused, queue=queue, rows_apart=True)
                for weight, name in zip(weights, names, strict=True)
            ]
        )
        self._owner = owner
        self._packed = packed
        self._fused = fused
        self._queue = None if queue is None else weakref.ref(queue)
        self._tied = len(set(map(id, weights))) < len(weights)

    def refers_to(self, weights: Sequence[Tensor]) -> bool:
        """Whether this is the target of ``weights``, in this order."""
        return len(self._targets) == len(weights) and all(map(WgradTarget.refers_to, self._targets, weights))

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """The place of each weight whose gradient is wanted: see ``WgradTarget.resolve``."""
        return [target.resolve() if want else None for target, want in zip(self._targets, wanted, strict=True)]

    def deliver(
        self, places: Sequence[Place | None], dy: Tensor, x: Tensor, offsets: Tensor, backward: int
    ) -> list[Tensor | None]:
        """In backward: ``main_grad_e (+)= dy_e^T x_e``, now or later, and the flags; what autograd must be handed.

        =======  =======  =============================================================
        places            from ``resolve``; nothing is done for a None
        dy       [T, N]   gradient of the output
        x        [T, K]   input of the forward
        offsets  [E + 1]  the rows of each expert, on the device
        =======  =======  =============================================================
        """
        records = [None if place is None else record_of(place[0]) for place in places]
        if self._queue is not None:
            mine = [place is not None for place in places]
            ours = tuple([record for record in records if record is not None])
            write, alive = partial(self._write, mine), partial(self._alive, mine)
            queue = live_queue(self._queue, self._owner)
            queue.put(DelayedWgrad(write, (dy, x, offsets), ours, self._owner, backward, alive))
        else:
            self._accumulate(places, dy, x, offsets, backward)
        delayed = self._queue is not None
        return [
            None if place is None else hand_over(place[0], record, delayed=delayed, fused=self._fused)
            for place, record in zip(places, records, strict=True)
        ]

    def _alive(self, mine: Sequence[bool]) -> list[Tensor]:
        targets = [target for own, target in zip(mine, self._targets, strict=True) if own]
        return [weight for target in targets for weight in target.alive()]

    def _write(self, mine: Sequence[bool], entry: DelayedWgrad, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
        """The turn of delayed weight gradients has come."""
        places = [target.resolve_for_write() if own else None for own, target in zip(mine, self._targets, strict=True)]
        if self._fused:
            self._accumulate(places, dy, x, offsets, entry.backward)
        else:
            dtype = next(place[0].dtype for place in places if place is not None)
            gradients = fresh_grouped_wgrads(dy, x, offsets, mine, dtype, packed=self._packed)
            for place, gradient in zip(places, gradients, strict=True):
                if place is not None and gradient is not None:
                    add_to_grad(place[0], gradient, record_of(place[0]))
        for place in places:
            if place is not None:
                _settle(place[0], record_of(place[0]), entry)

    def _accumulate(
        self, places: Sequence[Place | None], dy: Tensor, x: Tensor, offsets: Tensor, backward: int
    ) -> None:
        main_grads = [None if place is None else place[1] for place in places]
        overwrite = [place is not None and open_for_write(place[0], record_of(place[0]), backward) for place in places]
        if self._packed:
            (packed,) = main_grads
            assert packed is not None, "a packed weight whose gradient is not wanted has no place"
            grouped_wgrad_accumulate(dy, x, packed, offsets, overwrite=overwrite[0])
        elif not self._tied:
            grouped_wgrad_accumulate(dy, x, main_grads, offsets, overwrite=overwrite)
        else:  # experts of one weight: within a product nothing says who writes first
            for expert, main_grad in enumerate(main_grads):
                alone = [main_grad if other == expert else None for other in range(len(main_grads))]
                grouped_wgrad_accumulate(dy, x, alone, offsets, overwrite=overwrite)


def fresh_grouped_wgrads(
    dy: Tensor, x: Tensor, offsets: Tensor, wanted: Sequence[bool], dtype: torch.dtype, *, packed: bool
) -> list[Tensor | None]:
    """``dy_e^T x_e`` as tensors of their own, for autograd: [N, K] for each expert wanted, or one packed [E, N, K].

    An expert without rows gets zeros. Summed in fp32 and rounded once where ``dtype`` is fp32 or that of ``dy``.
    """
    experts = offsets.shape[0] - 1 if packed else sum(wanted)
    into = dtype if dtype in (torch.float32, dy.dtype) else dy.dtype
    buffer = dy.new_empty(experts, dy.shape[1], x.shape[1], dtype=into)
    if packed or experts == len(wanted):
        grouped_wgrad_accumulate(dy, x, buffer, offsets, overwrite=True)
    elif experts:
        parts = iter(buffer.unbind())
        grouped_wgrad_accumulate(dy, x, [next(parts) if want else None for want in wanted], offsets, overwrite=True)
    buffer = buffer.to(dtype)
    if packed:
        return [buffer]
    found = iter(buffer.unbind())
    return [next(found) if want else None for want in wanted]
