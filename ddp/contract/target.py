"""``WgradTarget``: where a weight gradient goes. The consumer's side of the contract, in the right order."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ...kernels import grouped_wgrad_accumulate, wgrad_accumulate
from ...kernels.wgrad import WgradOperand, wgrad_product
from ..torch_internals import has_tensor_hooks
from . import capturing
from .capturing import BackwardCapture, Delivery
from .delayed import DelayedWgrad, settle
from .main_grad import (
    accumulator_of,
    add_to_grad,
    check_provided,
    hand_over,
    has_main_grad,
    is_foreign,
    open_for_write,
    record_of,
)
from .torch_ddp import refuse_delay
from .torch_fsdp import TorchShards

__all__ = ["GroupedWgradTarget", "Place", "WgradQueueLike", "WgradTarget", "fresh_grouped_wgrads"]


class WgradQueueLike(Protocol):
    """A queue of delayed weight gradients."""

    def put(self, entry: DelayedWgrad) -> None:
        """Append ``entry``."""


def live_queue(queue: "weakref.ref[WgradQueueLike]", owner: str) -> WgradQueueLike:
    """The queue; raises ``RuntimeError`` where it was freed."""
    live = queue()
    if live is None:
        raise RuntimeError(
            f"{owner}: the WgradQueue that this forward delayed into was let go before backward, and nobody would "
            f"compute what it delays: keep the queue until it is drained"
        )
    return live


class Place(NamedTuple):
    """Where a weight's gradient goes. A backward looks it up before it computes any product."""

    weight: Tensor
    """The weight's Python object, which carries the contract's attributes."""
    accumulator: Tensor | None
    """The checked ``main_grad``; None where this backward does not write it."""


class WgradTarget:
    """Where the gradient of one weight goes. In backward, ``resolve`` runs before any GEMM, ``deliver`` after ``dx``.

    A target refers to the weight's Python object weakly. An autograd graph must not keep a weight alive, and the object
    that ``ctx.saved_tensors`` returns may be a copy without attributes (saved-tensor hooks, recompute, offload).

    owner       the module, for errors
    fused       the gradient goes into ``main_grad``; False (delayed weight gradients only): into ``.grad``
    queue       the gradient is delayed into this queue, which is held weakly; None: it is computed in backward
    rows_apart  ``main_grad`` need not be contiguous: see ``accumulator_of``

    Under torch's FSDP2 the accumulator is FSDP2's: see ``TorchShards``. A queue raises ``RuntimeError`` there.
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
        """Whether this is the target of ``weight``."""
        return self._weight() is weight

    def serves(self, weight: Tensor, fused: bool) -> bool:
        """Whether this is the target of ``weight`` with this option."""
        return self._weight() is weight and self._fused is fused

    def alive(self) -> tuple[Tensor, ...]:
        """The weight in a tuple; an empty tuple where the weight was freed."""
        weight = self._weight()
        return () if weight is None else (weight,)

    def resolve(self) -> Place | None:
        """Where this backward's gradient goes; None: autograd delivers it.

        Raises ``RuntimeError`` that names the module: for a weight that was freed, for a missing or unfit ``main_grad``
        (see ``accumulator_of``), and for a tensor hook on a weight whose gradient is delayed.
        """
        if self._torch_shards is not None:
            weight = self._alive_weight()
            accumulator = self._torch_shards.accumulator(weight)
            return None if accumulator is None else Place(weight, accumulator)
        weight = self._alive_weight()
        if has_tensor_hooks(weight):  # registered after the forward: the hook must get the gradient
            self._refuse_hook_on_delayed()
            return None
        if self._fused and self._queue is None:
            return self.resolve_for_write()
        if self._fused:
            check_provided(weight, self._owner)
        return Place(weight, None)  # a lazy provider allocates when the delayed gradient is written, and not now

    def resolve_for_write(self) -> Place:
        """``resolve`` for a gradient that is written right after: in backward, or when a delayed one is computed."""
        weight = self._alive_weight()
        return Place(weight, accumulator_of(weight, self._owner, rows_apart=self._rows_apart) if self._fused else None)

    def deliver(
        self, weight: Tensor, main_grad: Tensor | None, dy: WgradOperand, x: WgradOperand, backward: int
    ) -> Tensor | None:
        """In backward: ``main_grad (+)= dy^T x``, now or in the queue, and the flag; returns what autograd gets.

        weight, main_grad  [N, K] both: the ``Place`` that ``resolve`` returned
        dy, x              [T, N] and [T, K]: gradient of the output, input of the forward; or both quantised
        backward           number of the running backward; in reentrant recompute of the backward around it
        """
        if capturing.active is not None:
            self._note(capturing.active, weight, main_grad, dy, x)
            return None
        record = record_of(weight)
        if self._queue is not None:
            records = () if record is None else (record,)
            queue = live_queue(self._queue, self._owner)
            queue.put(DelayedWgrad(self._write, (dy, x), records, self._owner, backward, self.alive))
        elif main_grad is not None:
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, backward))
        return hand_over(weight, record, delayed=self._queue is not None, fused=self._fused)

    def _note(
        self,
        capture: BackwardCapture,
        weight: Tensor,
        main_grad: Tensor | None,
        dy: WgradOperand,
        x: WgradOperand,
    ) -> None:
        """``deliver`` in a backward that is captured."""
        if self._fused and main_grad is None:
            main_grad = self.resolve_for_write().accumulator

        def compute(overwrite: Sequence[bool]) -> list[Tensor | None]:
            if main_grad is None:
                return [wgrad_product(dy, x, weight.dtype)]
            wgrad_accumulate(dy, x, main_grad, overwrite=overwrite[0])
            return [None]

        capture.note(Delivery(self._owner, (weight,), fused=self._fused, queue=self._queue, compute=compute))

    def deliver_in_graph(self, dy: WgradOperand, x: WgradOperand, backward: int) -> None:
        """``resolve`` and ``deliver`` in a compiled backward, which returns no gradient to autograd.

        Raises ``RuntimeError`` where autograd must have the gradient, for a reason that came after the compilation.
        """
        weight = self.check_in_graph()
        if self._torch_shards is None and self._fused and self._queue is None:
            self.deliver(*self.resolve_for_write(), dy, x, backward)
            return
        place = self.resolve()
        if place is not None:
            self.deliver(*place, dy, x, backward)
        else:  # FSDP2 has no accumulator, and takes ``.grad`` when backward has passed the module's inputs
            add_to_grad(weight, wgrad_product(dy, x, weight.dtype), None)

    def check_in_graph(self) -> Tensor:
        """The weight; raises ``RuntimeError`` where a compiled backward cannot deliver its gradient."""
        weight = self._alive_weight()
        hooked = has_tensor_hooks(weight)
        if hooked or is_foreign(weight):
            what = "a hook (register_hook)" if hooked else "a main_grad of others"
            raise RuntimeError(
                f"{self._owner}: the weight got {what} after the layer was compiled, and the compiled backward has no "
                f"gradient to hand over; call torch.compiler.reset() then, so that the layer is compiled again"
            )
        return weight

    def _write(self, entry: DelayedWgrad, dy: WgradOperand, x: WgradOperand) -> None:
        """Compute the delayed gradient ``entry``."""
        weight, main_grad = self.resolve_for_write()
        record = record_of(weight)
        if main_grad is not None:
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, entry.backward))
        else:
            add_to_grad(weight, wgrad_product(dy, x, weight.dtype), record)
        settle(weight, record, entry)

    def _refuse_hook_on_delayed(self) -> None:
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
        self, places: Sequence[Place | None], dy: Tensor, x: Tensor, offsets: Tensor, backward: int
    ) -> list[Tensor | None]:
        """In backward: ``main_grad_e (+)= dy_e^T x_e``, now or in the queue, and the flags; returns what autograd gets.

        =======  =======  =============================================================
        places            from ``resolve``; weights with None are left out
        dy       [T, N]   gradient of the output
        x        [T, K]   input of the forward
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
        self, capture: BackwardCapture, places: Sequence[Place | None], dy: Tensor, x: Tensor, offsets: Tensor
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
        for own, target in zip(wanted, self._targets, strict=True):
            if own:
                target.check_in_graph()
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

    def _write(self, mine: Sequence[bool], entry: DelayedWgrad, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
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
                settle(place.weight, record_of(place.weight), entry)

    def _accumulate(
        self, places: Sequence[Place | None], dy: Tensor, x: Tensor, offsets: Tensor, backward: int
    ) -> None:
        overwrite = [
            place is not None and open_for_write(place.weight, record_of(place.weight), backward) for place in places
        ]
        self._write_products(places, overwrite, dy, x, offsets)

    def _write_products(
        self, places: Sequence[Place | None], overwrite: Sequence[bool], dy: Tensor, x: Tensor, offsets: Tensor
    ) -> None:
        main_grads = [None if place is None else place.accumulator for place in places]
        if self._packed:
            (packed,) = main_grads
            assert packed is not None, "a packed weight whose gradient is not wanted has no place"
            grouped_wgrad_accumulate(dy, x, packed, offsets, overwrite=overwrite[0])
        elif not self._tied:
            grouped_wgrad_accumulate(dy, x, main_grads, offsets, overwrite=overwrite)
        else:  # experts share a weight: one kernel gives no order of writes, so each expert gets a kernel of its own
            for expert, main_grad in enumerate(main_grads):
                alone = [main_grad if other == expert else None for other in range(len(main_grads))]
                grouped_wgrad_accumulate(dy, x, alone, offsets, overwrite=overwrite)


def fresh_grouped_wgrads(
    dy: Tensor, x: Tensor, offsets: Tensor, wanted: Sequence[bool], dtype: torch.dtype, *, packed: bool
) -> list[Tensor | None]:
    """``dy_e^T x_e`` as new tensors, for autograd: [N, K] for each expert wanted, or one packed [E, N, K].

    An expert without rows gets zeros. Sums are fp32 and rounded once where ``dtype`` is fp32 or ``dy``'s dtype.
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
