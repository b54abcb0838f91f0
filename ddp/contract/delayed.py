"""The weight gradient of one product, which waits for its turn."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .late_grads import note_lost, note_over, note_waiting
from .recompute import current_checkpoint
from .record import GradRecord, PendingWgrad

__all__ = ["DelayedWgrad", "delay_blocks", "delaying_into", "queue_of_block"]

_sequence = itertools.count()


class DelayedWgrad:
    """``dy`` [T, N] and ``x`` [T, K] of one product, and how to write the gradients of the weights that it serves.

    One weight, or the experts of a grouped product, whose operands are ``dy``, ``x`` and the experts' offsets. Weights
    are held weakly, tensors until the product is done. It may run on another CUDA stream than the backward that made
    it: the stream is looked up when it runs, and waits for the one on which the tensors were made.

    write     called with this entry and the operands
    operands  ``dy`` first
    records   those of the weights that our provider has
    backward  the graph task that it belongs to
    weights   those it serves, as far as they are alive
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "_operands",
        "_producer",
        "_records",
        "_versions",
        "_write",
        "backward",
        "bucket_index",
        "pending",
        "sequence",
        "weights",
    )

    def __init__(
        self,
        write: Callable[..., None],
        operands: tuple[Tensor, ...],
        records: Sequence[GradRecord],
        owner: str,
        backward: int,
        weights: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._write = write
        self._operands: tuple[Tensor, ...] | None = operands
        self._versions = [operand._version for operand in operands]
        self._records = records
        dy = operands[0]
        self._producer = torch.cuda.current_stream(dy.device) if dy.is_cuda else None
        self._done: torch.cuda.Event | None = None
        self.backward = backward
        self.pending = PendingWgrad(owner)
        """Whose it is, and of which microbatch; each of the records has it."""
        self.bucket_index = min([record.bucket_index for record in records], default=0)
        """Place in the launch order of the bucket that waits for it first."""
        self.weights = weights
        self.sequence = next(_sequence)
        """Later entries have larger ones, whatever their queue: uses of one weight are added in this order."""
        for record in records:
            record.pending.append(self.pending)
        if not records:
            note_waiting(self)

    @property
    def owner(self) -> str:
        """The module, for errors."""
        return self.pending.owner

    def serves(self, weight: Tensor) -> bool:
        """Whether it is a gradient of this weight."""
        return any(own is weight for own in self.weights())

    @property
    def is_orphaned(self) -> bool:
        """Whether every weight that it serves was freed: nobody can read the gradient."""
        return self.weights is not tuple and not self.weights()

    def is_last_of(self, record: GradRecord) -> bool:
        """Whether no other weight gradient of this microbatch is pending there."""
        return not any(
            other is not self.pending and other.microbatch == self.pending.microbatch for other in record.pending
        )

    @torch.no_grad()
    def run(self) -> None:
        """Write the product, and tell the provider."""
        operands = self._operands
        if operands is None:
            raise RuntimeError(f"{self.pending.owner}: this delayed weight gradient was computed or dropped already")
        if [operand._version for operand in operands] != self._versions:
            raise RuntimeError(
                f"{self.pending.owner}: the input or the output gradient of a delayed weight gradient was changed in "
                f"place before it was computed (an input buffer that was filled again?); call backward_dw() or drain() "
                f"first, or clear() the queue to give it up"
            )
        current = None if self._producer is None else torch.cuda.current_stream(operands[0].device)
        if current == self._producer:
            self._write(self, *operands)
            self._operands = None
        else:
            assert current is not None and self._producer is not None, "both are streams, or both are None"
            current.wait_stream(self._producer)
            self._write(self, *operands)
            # Freed now, this memory would go to the producer's next kernels: whoever holds the entry frees it later.
            self._done = torch.cuda.Event()
            self._done.record(current)
        if not self._records:
            note_over(self)
        for record in self._records:
            record.delayed_wgrad_done(self.pending)

    def drop(self) -> None:
        """Give the gradient up, in an iteration that is abandoned."""
        self._operands = None
        note_over(self)
        for record in self._records:
            record.pending.remove(self.pending)

    def lose(self) -> None:
        """Nobody can compute it any more: what waits for it says so, and does not go on as if it had come."""
        self._operands = None
        self.pending.lost = True
        if not self._records:
            note_lost(self)

    @property
    def in_use(self) -> bool:
        """Whether another stream still reads the tensors after ``run``."""
        return self._done is not None and not self._done.query()


# ---- Who delays, beside modules that always do: forwards in a ``delayed_wgrad`` block. ----


class _DelayBlocks(threading.local):
    """Of the thread that asks."""

    def __init__(self) -> None:
        # Attributes of each thread's own: torch.compile guards no default that a class holds for all threads.
        self.queue: Any = None
        """That of the innermost block."""
        self.region: Any = None
        """The checkpointed region in which that block was entered; None outside of regions."""
        self.num_entered = 0
        """Blocks so far: whoever asks twice knows whether there was one in between."""


delay_blocks = _DelayBlocks()
_around: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Checkpointed regions whose first forward ran in a block: its queue."""


def queue_of_block() -> Any:
    """Where a forward that runs now delays to: the queue of the innermost block around it, or None.

    A recompute goes by the block around the region's first forward, and not by one around the backward: it must save
    what that forward did. Blocks inside the region are entered again.
    """
    queue = delay_blocks.queue
    if torch.compiler.is_compiling() or (queue is None and not _around):
        return queue
    checkpoint = current_checkpoint()
    if checkpoint is None:
        return queue
    region, again = checkpoint
    if queue is not None and delay_blocks.region is region:
        return queue
    if again:
        return _around.get(region)
    if queue is not None:
        _around[region] = queue
    return queue


@contextmanager
def delaying_into(queue: Any) -> Iterator[None]:
    """Forwards of this thread delay the weight gradients of all our modules into ``queue``."""
    before = delay_blocks.queue, delay_blocks.region
    checkpoint = None if torch.compiler.is_compiling() else current_checkpoint()
    delay_blocks.queue, delay_blocks.region = queue, None if checkpoint is None else checkpoint[0]
    delay_blocks.num_entered += 1
    try:
        yield
    finally:
        delay_blocks.queue, delay_blocks.region = before
