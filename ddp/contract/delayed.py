"""Weight gradients that are computed some time after backward: ``DelayedTarget`` and its entries in a queue.

A backward puts a ``DelayedWgrad`` into a queue. Everything else it does at once: errors, the flag, what autograd gets.
So the parameter's hook runs before the gradient exists, and our provider hears of the gradient a second time::

    backward  DelayedTarget.deliver --> DelayedWgrad, which is pending in each weight's record --> queue; hand_over
    hook      clears the flag; a parameter with something pending is not ready yet
    later     queue.drain() --> DelayedWgrad.run --> DelayedTarget._compute: main_grad (+)= dW
                  --> GradRecord.delayed_wgrad_done --> the provider's on_delayed_wgrad: the parameter may be ready now

"Later" is a drain or ``backward_dw()``. Under our ``DistributedDataParallel`` it is the first read of ``.grad``, or the
step, at the latest (``compute_pending``).

The queue holds its entries, and these hold the operands and the target. Nothing here holds the queue: the target of a
graph, and what a record lists as pending, refer to it weakly.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..torch_internals import has_tensor_hooks
from .main_grad import (
    Place,
    WgradProduct,
    WgradTarget,
    add_to_main_grad,
    check_provided,
    hand_over,
    has_main_grad,
    record_of,
)
from .record import GradRecord, PendingWgrad
from .torch_wrappers import TorchShards, in_torch_ddp, refuse_delay

__all__ = [
    "DelayedTarget",
    "DelayedWgrad",
    "Operands",
    "WgradQueueLike",
    "absorb_late_sum",
    "add_to_grad",
    "compute_pending",
    "live_queue",
]

_sequence = itertools.count()


class QuantizedOperand(Protocol):
    """An operand of a weight gradient in several tensors: transposed, and quantised along the tokens."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the operand."""


Operands = Sequence[Tensor | QuantizedOperand]
"""What a product's weight gradients are computed from: ``dy`` [T, N] and ``x`` [T, K], or both quantised; of a grouped
product the experts' offsets [E + 1] too."""


class WgradQueueLike(Protocol):
    """A queue of delayed weight gradients."""

    def put(self, entry: "DelayedWgrad") -> None:
        """Append ``entry``."""


class DelayedTarget(WgradTarget):
    """The gradients wait in a queue, and are then written to ``main_grad``, or are summed for ``.grad``.

    fused  False: they are for ``.grad``
    queue  is held weakly: modules must not keep it alive

    Raises ``RuntimeError`` for weights whose gradients torch's own wrappers reduce in backward.
    """

    __slots__ = ("fused", "queue")

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        wgrad: WgradProduct,
        owner: str,
        *,
        fused: bool,
        queue: WgradQueueLike,
    ) -> None:
        super().__init__(weights, names, wgrad, owner)
        self.fused = fused
        self.queue = weakref.ref(queue)
        for weight, name in zip(weights, self._names, strict=True):
            if not has_main_grad(weight):
                if TorchShards.of(weight) is not None:
                    raise TorchShards.refuse_delay(name)
                refuse_delay(name, weight)

    def serves(self, weights: Sequence[Tensor], queue: object | None) -> bool:
        """Never inside torch's ``DistributedDataParallel``: a new target refuses it by name."""
        return queue is not None and self.queue() is queue and self.refers_to(weights) and not in_torch_ddp()

    def place(self, number: int) -> Place | None:
        """As ``WgradTarget``'s, but a hook on the weight is an error: it would see no gradient in this backward."""
        weight = self.alive(number)
        if has_tensor_hooks(weight):
            raise RuntimeError(
                f"{self._names[number]}: a hook on the weight (register_hook) wants to see its gradient in backward, "
                f"and that is delayed; remove the hook and change .grad or main_grad before the step, or let this "
                f"module compute its gradients in backward"
            )
        if not weight.requires_grad:
            return None
        if self.fused:
            check_provided(weight, self._names[number])
        return Place(weight, None)  # a lazy provider allocates when the delayed gradient is written, and not now

    def deliver(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> list[Tensor | None]:
        """In backward: queue the gradients, and set the flags. Returns what autograd gets."""
        mine = [place is not None for place in places]
        records = [record_of(place.weight) for place in places if place is not None]
        known = [record for record in records if record is not None]
        # The queue must not keep the graph of the input, which keeps the weights.
        kept = tuple(each.detach() if isinstance(each, Tensor) else each for each in operands)
        compute, alive = partial(self._compute, mine), partial(self._alive, mine)
        entry = DelayedWgrad(compute, kept, known, self.owner, backward, alive)
        live_queue(self.queue, self.owner).put(entry)
        return [place and hand_over(place.weight, record_of(place.weight), fused=self.fused) for place in places]

    def _compute(self, mine: Sequence[bool], entry: "DelayedWgrad", *operands: Any) -> None:
        """Compute the delayed gradients ``entry``. Raises ``RuntimeError`` for a weight that was freed."""
        weights = [self.alive(number) for number, own in enumerate(mine) if own]
        if self.fused:
            places = [
                self.place_for_write(number, self.alive(number)) if own else None for number, own in enumerate(mine)
            ]
            self.accumulate(places, operands, entry.backward)
        else:
            found = self.wgrad.gradients(mine, weights[0].dtype, *operands)
            for weight, gradient in zip(weights, (each for each in found if each is not None), strict=True):
                add_to_grad(weight, gradient, record_of(weight))
        for weight in weights:
            absorb_late_sum(weight, record_of(weight), entry)

    def _alive(self, mine: Sequence[bool]) -> list[Tensor]:
        """The weights of a delayed gradient; none where one was freed, so that the queue drops the entry."""
        found = [reference() for reference, own in zip(self._references, mine, strict=True) if own]
        return [] if any(weight is None for weight in found) else found


class DelayedWgrad:
    """The weight gradient ``dy^T x`` of one product, not computed yet: its operands, and how to write the result.

    The product has one weight, or it is a grouped product with one weight for each expert. Weights are held weakly.
    Operands are held until the gradient is computed. ``run`` may be called on another CUDA stream than the stream of
    the backward that made the operands; the running stream then waits for the producing stream.

    write     called with this entry and the operands; writes the gradients
    operands  see ``Operands``
    records   our provider's records of the weights; none for weights of a foreign provider, or without provider
    owner     the module, for errors
    backward  number of the backward (``current_backward``) that made the operands
    weights   returns the weights; none of them where one was freed
    """

    def __init__(
        self,
        write: Callable[..., None],
        operands: Operands,
        records: Sequence[GradRecord],
        owner: str,
        backward: int,
        weights: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._write = write
        self._operands: Operands | None = operands
        tensors = _tensors(operands)
        self._versions = [tensor._version for tensor in tensors]
        self._records = records
        dy = tensors[0]
        self._producer = torch.cuda.current_stream(dy.device) if dy.is_cuda else None
        self._done: torch.cuda.Event | None = None
        self.backward = backward
        self.pending = PendingWgrad(owner)
        """The module and the microbatch of this gradient; every record in ``records`` lists it too."""
        # The gradients of one weight are added in the order of creation.
        self.pending.order = min([record.bucket_index for record in records], default=0), next(_sequence)
        self.weights = weights
        for record in records:
            record.pending.append(self.pending)
        if not records:  # under a wrapper of ours, its records count what is pending
            _register_once()
            _waiting.add(self)

    def serves(self, weight: Tensor) -> bool:
        """Whether this is a gradient of ``weight``."""
        return any(own is weight for own in self.weights())

    @property
    def is_orphaned(self) -> bool:
        """Whether every weight was freed, so that nobody can read the gradient."""
        return self.weights is not tuple and not self.weights()

    def is_last_of(self, record: GradRecord) -> bool:
        """Whether ``record`` lists no other pending weight gradient of the same microbatch."""
        return not any(
            other is not self.pending and other.microbatch == self.pending.microbatch for other in record.pending
        )

    @torch.no_grad()
    def run(self) -> None:
        """Write the gradients and tell the provider.

        Raises ``RuntimeError`` when called twice, and where an operand was changed in place since backward.
        """
        operands = self._operands
        if operands is None:
            raise RuntimeError(f"{self.pending.owner}: this delayed weight gradient was computed or dropped already")
        tensors = _tensors(operands)
        if [tensor._version for tensor in tensors] != self._versions:
            raise RuntimeError(
                f"{self.pending.owner}: the input or the output gradient of a delayed weight gradient was changed in "
                f"place before it was computed (an input buffer that was filled again?); call backward_dw() or drain() "
                f"first, or clear() the queue to give it up"
            )
        current = None if self._producer is None else torch.cuda.current_stream(tensors[0].device)
        if current == self._producer:
            self._write(self, *operands)
            self._operands = None
        else:
            assert current is not None and self._producer is not None, "both are streams, or both are None"
            current.wait_stream(self._producer)
            self._write(self, *operands)
            # Freed now, the operands' memory would go to the producing stream's next kernels while this stream still
            # reads it. The queue keeps the entry until ``in_use`` is False. A capture asks no event, so there the
            # allocator is told, which gives such memory to nobody until the capture has ended.
            if torch.cuda.is_current_stream_capturing():
                for tensor in tensors:
                    tensor.record_stream(current)
                self._operands = None
            else:
                self._done = torch.cuda.Event()
                self._done.record(current)
        _waiting.discard(self)
        for record in self._records:
            record.delayed_wgrad_done(self.pending)

    def drop(self) -> None:
        """Give the gradient up, because its iteration is abandoned."""
        self._operands = None
        _waiting.discard(self)
        for record in self._records:
            record.pending.remove(self.pending)

    def lose(self) -> None:
        """The queue is gone and nobody will compute this gradient. A step that needs the gradient will raise."""
        self._operands = None
        self.pending.lost = True
        if not self._records:
            _waiting.discard(self)
            _lost.append(self)

    @property
    def waits(self) -> bool:
        """Whether this gradient is still to be computed: neither computed, nor given up, nor lost."""
        return self._operands is not None

    @property
    def in_use(self) -> bool:
        """Whether, after ``run``, another stream may still read the operands. CUDA forbids to ask in a capture."""
        return self._done is not None and (torch.cuda.is_current_stream_capturing() or not self._done.query())


def live_queue(reference: "weakref.ref[Any]", owner: str) -> Any:
    """The queue, or ``RuntimeError``: nobody would compute what ``owner`` delays."""
    queue = reference()
    if queue is None:
        raise RuntimeError(
            f"{owner}: the WgradQueue that this forward delayed into was let go before backward, and nobody would "
            f"compute what it delays: keep the queue until it is drained"
        )
    return queue


def _tensors(operands: Operands) -> list[Tensor]:
    return [tensor for each in operands for tensor in ((each,) if isinstance(each, Tensor) else each.tensors)]


def compute_pending(records: Iterable[GradRecord]) -> None:
    """Compute what queues of ours still hold of these parameters, in bucket order."""
    waiting = {id(each): each for record in records for each in record.pending}
    for pending in sorted(waiting.values(), key=lambda each: each.order):
        if pending.compute is not None:
            pending.compute()


def add_to_grad(weight: Tensor, gradient: Tensor, record: GradRecord | None) -> None:
    """Sum a delayed gradient that is not fused, as autograd sums it in ``.grad``. Never assign over one.

    Our provider keeps the sum beside ``.grad``, which may show this iteration's gradient already.
    """
    gradient = gradient.to(weight.dtype)  # a product computes all its slices in one dtype
    if record is None:
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    else:
        record.late_sum = gradient if record.late_sum is None else record.late_sum.add_(gradient)


def absorb_late_sum(weight: Tensor, record: GradRecord | None, entry: DelayedWgrad) -> None:
    """After the microbatch's last delayed gradient was written: absorb what unfused owners of the weight have added."""
    if record is not None and record.late_sum is not None and entry.is_last_of(record):
        grad, record.late_sum = record.late_sum, None
        add_to_main_grad(record, grad)


# ---- Without a wrapper of ours, a step while a gradient is not computed yet would lack that gradient, which would then
# ---- be added to the next iteration's .grad: refuse the step. Globals, because torch's hook serves every optimizer.

_waiting: "weakref.WeakSet[DelayedWgrad]" = weakref.WeakSet()
_lost: list[DelayedWgrad] = []
"""Their queues were freed: the next step over their weights lacks these gradients for good."""


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _waiting and not _lost:
        return
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    step = f"{type(optimizer).__name__}.step()"
    _lost[:] = [entry for entry in _lost if entry.weights()]
    for entry in (*_lost, *_waiting):
        if not any(id(weight) in params for weight in entry.weights()):
            continue
        if entry.pending.lost:
            _lost.remove(entry)
        raise RuntimeError(
            f"{step} while a delayed weight gradient of {entry.pending.owner} is pending: it would be missing here, "
            f"and be added to the next iteration's .grad; call backward_dw() or drain its WgradQueue before the step, "
            f"or clear() the queue to give it up; a queue that is let go before has lost it"
        )
