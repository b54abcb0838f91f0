"""``DelayedWgrad``: the weight gradient of one product, computed some time after backward; and who delays."""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..torch_internals import checkpointed_region
from .main_grad import hand_over_sum
from .record import GradRecord, PendingWgrad

__all__ = [
    "DelayedWgrad",
    "Operands",
    "absorb_late_sum",
    "compute_pending",
    "current_checkpoint",
    "delay_blocks",
    "delaying_into",
    "live_queue",
    "queue_of_block",
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
            # reads it. The queue keeps the entry until ``in_use`` is False.
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
        """Whether, after ``run``, another stream still reads the operands."""
        return self._done is not None and not self._done.query()


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


def absorb_late_sum(weight: Tensor, record: GradRecord | None, entry: DelayedWgrad) -> None:
    """After a delayed gradient was written: absorb the sum that unfused owners of a tied weight have added to."""
    if record is not None and record.late_sum is not None and entry.is_last_of(record):
        hand_over_sum(record)


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
                f"{step} without a delayed weight gradient of {entry.pending.owner}, whose WgradQueue was let go "
                f"before it was drained: keep the queue, and drain() it before the step; zero_grad() begins this "
                f"iteration anew"
            )
        raise RuntimeError(
            f"{step} while a delayed weight gradient of {entry.pending.owner} is pending: it would be missing here, "
            f"and be added to the next iteration's .grad; call backward_dw() or drain its WgradQueue before the step, "
            f"or clear() the queue to give it up"
        )


# ---- Modules with delay_wgrad_compute always delay. All others delay in a ``delayed_wgrad`` block, kept here. ----


class _DelayBlocks(threading.local):
    """The ``delayed_wgrad`` blocks of one thread."""

    def __init__(self) -> None:
        # Set here and not as class attributes: torch.compile does not guard class attributes.
        self.queue: Any = None
        """The innermost block's queue."""
        self.region: Any = None
        """The checkpointed region in which the innermost block was entered; None outside of regions."""
        self.num_entered = 0
        """Number of blocks entered so far; a caller that reads it twice knows whether a block came in between."""


delay_blocks = _DelayBlocks()
_around: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""The queue of each checkpointed region whose first forward ran in a block."""


def queue_of_block() -> Any:
    """The queue that a forward of this thread delays to now: the innermost block's, or None.

    In a recompute the block around the region's first forward counts, and a block around the backward does not: the
    recompute must save the same tensors as the first forward. A block inside the region is entered again and counts.
    """
    queue = delay_blocks.queue
    if torch.compiler.is_compiling() or (queue is None and not _around):
        return queue
    checkpoint = current_checkpoint()
    if checkpoint is None:
        return queue
    region, is_recompute = checkpoint
    if queue is not None and delay_blocks.region is region:
        return queue
    if is_recompute:
        return _around.get(region)
    if queue is not None:
        _around[region] = queue
    return queue


@contextmanager
def delaying_into(queue: Any) -> Iterator[None]:
    """In this block, forwards of this thread delay all weight gradients of our modules into ``queue``."""
    before = delay_blocks.queue, delay_blocks.region
    checkpoint = None if torch.compiler.is_compiling() else current_checkpoint()
    delay_blocks.queue, delay_blocks.region = queue, None if checkpoint is None else checkpoint[0]
    delay_blocks.num_entered += 1
    try:
        yield
    finally:
        delay_blocks.queue, delay_blocks.region = before


# ---- Which region of torch.utils.checkpoint a forward runs in. Non-reentrant checkpointing uses only the saved tensors
# ---- of a recompute: the backwards of the first forward read them in the order in which the first forward saved its
# ---- own. So a module must save the same tensors in the recompute, whatever has changed in between. torch checks
# ---- shapes and dtypes only.


def current_checkpoint() -> tuple[Any, bool] | None:
    """The innermost region around this thread's forward, and whether the forward is its recompute. None outside.

    A region is an object that lives as long as the graph of its first forward. Raises ``RuntimeError`` where this torch
    version does not show the region.
    """
    try:
        return checkpointed_region()
    except LookupError:
        raise RuntimeError(
            f"torch {torch.__version__} does not show which checkpointed region a forward belongs to, and its "
            f"recompute could not be told to delay weight gradients alike: use delay_wgrad_compute=True or "
            f"fuse_wgrad_accumulation=True of each module inside, or use_reentrant=True, with delayed_wgrad"
        ) from None
