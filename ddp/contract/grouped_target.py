"""``GroupedWgradTarget``: where the weight gradients of a grouped product go. ``target.py`` for all experts at once."""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...kernels.wgrad import GroupedWgradOperand as Operand
from ...kernels.wgrad import grouped_wgrad, wgrad_features
from . import capturing
from .capturing import BackwardCapture, Delivery
from .delayed import DelayedWgrad, absorb_late_sum
from .main_grad import add_to_grad, hand_over, open_for_write, record_of
from .target import Place, WgradQueueLike, WgradTarget, live_queue

__all__ = ["GroupedWgradTarget", "fresh_grouped_wgrads"]


class GroupedWgradTarget:
    """Where the gradients of a grouped product's weights go: one kernel writes all of them.

    Each expert's weight has its own flag and record, may be frozen alone, and its own first write overwrites. A packed
    weight is one parameter with one ``main_grad``.

    weights  the experts' weights [N, K] each, or one packed weight [E, N, K]
    names    of the weights, for errors

    The other arguments are those of ``WgradTarget``.
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
            WgradTarget(weight, f"{owner}, {name}", fused=fused, queue=queue, rows_apart=True)
            for weight, name in zip(weights, names, strict=True)
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
        """``WgradTarget.resolve`` for each weight whose gradient is wanted, None for the rest."""
        return [target.resolve() if want else None for target, want in zip(self._targets, wanted, strict=True)]

    def deliver(
        self,
        places: Sequence[Place | None],
        dy: Operand,
        x: Operand,
        offsets: Tensor,
        backward: int,
    ) -> list[Tensor | None]:
        """In backward: ``main_grad_e (+)= dy_e^T x_e``, now or in the queue, and the flags; returns what autograd gets.

        =======  =======  =============================================================
        places            from ``resolve``; weights with None are left out
        dy       [T, N]   gradient of the output
        x        [T, K]   input of the forward; or both quantised along each expert's rows
        offsets  [E + 1]  the rows of each expert, on the device
        =======  =======  =============================================================
        """
        if capturing.active is not None:
            return self._note(capturing.active, places, dy, x, offsets)
        records = [None if place is None else record_of(place.weight) for place in places]
        if self._queue is not None:
            mine = [place is not None for place in places]
            known = [record for record in records if record is not None]
            write, alive = partial(self._write, mine), partial(self._alive, mine)
            queue = live_queue(self._queue, self._owner)
            queue.put(DelayedWgrad(write, (dy, x, offsets), known, self._owner, backward, alive))
        else:
            self._accumulate(places, dy, x, offsets, backward)
        delayed = self._queue is not None
        return [
            None if place is None else hand_over(place.weight, record, delayed=delayed, fused=self._fused)
            for place, record in zip(places, records, strict=True)
        ]

    def _note(
        self,
        capture: BackwardCapture,
        places: Sequence[Place | None],
        dy: Operand,
        x: Operand,
        offsets: Tensor,
    ) -> list[Tensor | None]:
        """``deliver`` in a backward that is captured."""
        mine = [place is not None for place in places]
        if self._fused:
            places = [
                target.resolve_for_write() if own else None for target, own in zip(self._targets, mine, strict=True)
            ]
        weights = [place.weight for place in places if place is not None]

        def compute(overwrite: Sequence[bool]) -> list[Tensor | None]:
            if not self._fused:
                gradients = fresh_grouped_wgrads(dy, x, offsets, mine, weights[0].dtype, packed=self._packed)
                return [gradient for gradient, own in zip(gradients, mine, strict=True) if own]
            bits = iter(overwrite)
            self._write_products(places, [own and next(bits) for own in mine], dy, x, offsets)
            return [None] * len(weights)

        capture.note(Delivery(self._owner, weights, fused=self._fused, queue=self._queue, compute=compute))
        return [None] * len(places)

    def deliver_in_graph(self, wanted: Sequence[bool], dy: Tensor, x: Tensor, offsets: Tensor, backward: int) -> None:
        """``resolve`` and ``deliver`` in a compiled backward: see ``WgradTarget.deliver_in_graph``."""
        wanted = [
            own and target.check_in_graph().requires_grad  # False: frozen after the forward
            for own, target in zip(wanted, self._targets, strict=True)
        ]
        places = self.resolve(wanted)
        unwritten = [own and place is None for own, place in zip(wanted, places, strict=True)]
        if True in unwritten:  # FSDP2 has no accumulator, and takes ``.grad`` after this graph
            weights = [target.alive()[0] for target in self._targets]
            gradients = fresh_grouped_wgrads(dy, x, offsets, unwritten, weights[0].dtype, packed=self._packed)
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    add_to_grad(weight, gradient, None)
        if any(place is not None for place in places):
            self.deliver(places, dy, x, offsets, backward)

    def _alive(self, mine: Sequence[bool]) -> list[Tensor]:
        targets = [target for own, target in zip(mine, self._targets, strict=True) if own]
        return [weight for target in targets for weight in target.alive()]

    def _write(
        self,
        mine: Sequence[bool],
        entry: DelayedWgrad,
        dy: Operand,
        x: Operand,
        offsets: Tensor,
    ) -> None:
        """Compute the delayed gradients ``entry``."""
        places = [target.resolve_for_write() if own else None for own, target in zip(mine, self._targets, strict=True)]
        if self._fused:
            self._accumulate(places, dy, x, offsets, entry.backward)
        else:
            dtype = next(place.weight.dtype for place in places if place is not None)
            gradients = fresh_grouped_wgrads(dy, x, offsets, mine, dtype, packed=self._packed)
            for place, gradient in zip(places, gradients, strict=True):
                if place is not None and gradient is not None:
                    add_to_grad(place.weight, gradient, record_of(place.weight))
        for place in places:
            if place is not None:
                absorb_late_sum(place.weight, record_of(place.weight), entry)

    def _accumulate(
        self,
        places: Sequence[Place | None],
        dy: Operand,
        x: Operand,
        offsets: Tensor,
        backward: int,
    ) -> None:
        overwrite = [
            place is not None and open_for_write(place.weight, record_of(place.weight), backward) for place in places
        ]
        self._write_products(places, overwrite, dy, x, offsets)

    def _write_products(
        self,
        places: Sequence[Place | None],
        overwrite: Sequence[bool],
        dy: Operand,
        x: Operand,
        offsets: Tensor,
    ) -> None:
        main_grads = [None if place is None else place.accumulator for place in places]
        if self._packed:
            (packed,) = main_grads
            assert packed is not None, "a packed weight whose gradient is not wanted has no place"
            grouped_wgrad(dy, x, packed, offsets, overwrite=overwrite[0])
        elif not self._tied:
            grouped_wgrad(dy, x, main_grads, offsets, overwrite=overwrite)
        else:  # experts share a weight: one kernel gives no order of writes, so each expert gets a kernel of its own
            for expert, main_grad in enumerate(main_grads):
                alone = [main_grad if other == expert else None for other in range(len(main_grads))]
                grouped_wgrad(dy, x, alone, offsets, overwrite=overwrite)


def fresh_grouped_wgrads(
    dy: Operand,
    x: Operand,
    offsets: Tensor,
    wanted: Sequence[bool],
    dtype: torch.dtype,
    *,
    packed: bool,
) -> list[Tensor | None]:
    """``dy_e^T x_e`` as new tensors, for autograd: [N, K] for each expert wanted, or one packed [E, N, K].

    An expert without rows gets zeros. Sums are fp32 and rounded once where ``dtype`` is fp32 or ``dy``'s dtype, and of
    quantised operands.
    """
    experts = offsets.shape[0] - 1 if packed else sum(wanted)
    summed = dy.dtype if isinstance(dy, Tensor) else torch.float32
    into = dtype if dtype in (torch.float32, summed) else summed
    buffer = offsets.new_empty(experts, wgrad_features(dy), wgrad_features(x), dtype=into)
    if packed or experts == len(wanted):
        grouped_wgrad(dy, x, buffer, offsets, overwrite=True)
    elif experts:
        parts = iter(buffer.unbind())
        grouped_wgrad(dy, x, [next(parts) if want else None for want in wanted], offsets, overwrite=True)
    buffer = buffer.to(dtype)
    if packed:
        return [buffer]
    found = iter(buffer.unbind())
    return [next(found) if want else None for want in wanted]
