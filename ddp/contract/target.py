"""``WgradTarget``: where a weight gradient goes. The consumer's side of the contract, in the right order."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ...kernels.wgrad import WgradOperand, wgrad_accumulate, wgrad_product
from ..torch_internals import has_tensor_hooks
from . import capturing
from .capturing import BackwardCapture, Delivery
from .delayed import DelayedWgrad, absorb_late_sum
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

__all__ = ["Place", "WgradQueueLike", "WgradTarget", "live_queue"]


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
        if not weight.requires_grad:  # frozen after the forward: autograd drops the gradient
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
        if not weight.requires_grad:
            return  # frozen after the forward
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
        absorb_late_sum(weight, record, entry)

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
