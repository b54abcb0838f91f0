"""Where a weight gradient goes: the consumer's side of the contract, in the order that the contract asks for."""

from typing import Protocol

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..kernels import wgrad_accumulate
from .delayed_wgrad import DelayedWgrad
from .main_grad import accumulator_of, add_to_grad, check_provided, hand_over, open_for_write, record_of

__all__ = ["WgradQueueLike", "WgradTarget"]


class WgradQueueLike(Protocol):
    """Where delayed weight gradients wait."""

    def put(self, entry: DelayedWgrad) -> None:
        """Append one."""


class WgradTarget:
    """Where the gradient of one weight goes, for one forward and backward of one module.

    It refers to the weight's Python object weakly, since the object that comes out of ``ctx.saved_tensors`` may be a
    copy without attributes (saved-tensor hooks, recompute, offload), and since an autograd graph must not keep a weight
    alive. In backward ``resolve`` runs before any GEMM, ``deliver`` after the input gradient.

    owner  the module, for errors
    fused  into ``main_grad``; otherwise (delayed weight gradients only) into ``.grad``
    queue  where the weight gradient waits for its turn; None: it is computed in backward
    """

    __slots__ = ("_fused", "_owner", "_queue", "_weight")

    def __init__(self, weight: Tensor, owner: str, *, fused: bool = True, queue: WgradQueueLike | None = None) -> None:
        self._weight = TensorWeakRef(weight)
        self._owner = owner
        self._fused = fused
        self._queue = queue

    def refers_to(self, weight: Tensor) -> bool:
        """Whether this is ``weight``'s target."""
        return self._weight() is weight

    def resolve(self) -> tuple[Tensor, Tensor | None]:
        """The weight's object, and its checked accumulator where this backward writes one.

        Raises ``RuntimeError`` that names the module for a weight that is gone, a missing ``main_grad``, or one that
        cannot be written: see ``accumulator_of``.
        """
        weight = self._alive_weight()
        if not self._fused:
            return weight, None
        if self._queue is None:
            return weight, accumulator_of(weight, self._owner)
        check_provided(weight, self._owner)
        return weight, None  # a lazy provider's memory is taken when the delayed gradient is written, not before

    def deliver(self, weight: Tensor, main_grad: Tensor | None, dy: Tensor, x: Tensor, backward: int) -> Tensor | None:
        """In backward: ``main_grad (+)= dy^T x``, now or later, and the flag; returns what autograd must be handed.

        dy [T, N], x [T, K]; ``weight`` [N, K] and ``main_grad`` [N, K] come from ``resolve``. ``backward`` is the graph
        task, in reentrant recompute the one around it.
        """
        record = record_of(weight)
        if self._queue is not None:
            records = () if record is None else (record,)
            self._queue.put(DelayedWgrad(self._write, (dy, x), records, self._owner, backward, self.refers_to))
        elif main_grad is not None:
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, backward))
        return hand_over(weight, record, delayed=self._queue is not None, fused=self._fused)

    def _write(self, entry: DelayedWgrad, dy: Tensor, x: Tensor) -> None:
        """A delayed weight gradient's turn has come."""
        weight = self._alive_weight()
        record = record_of(weight)
        if self._fused:
            main_grad = accumulator_of(weight, self._owner)
            wgrad_accumulate(dy, x, main_grad, overwrite=open_for_write(weight, record, entry.backward))
        else:
            add_to_grad(weight, (dy.t() @ x).to(weight.dtype), record, last=entry.is_last_of(record))

    def _alive_weight(self) -> Tensor:
        weight: Tensor | None = self._weight()
        if weight is None:
            raise RuntimeError(f"{self._owner}: the weight was freed between forward and backward")
        return weight
