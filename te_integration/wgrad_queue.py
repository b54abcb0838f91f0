"""``WgradQueue``: delayed weight gradients, and the orders in which they can be computed.

A backward with delayed weight gradients computes the input gradients only, and ends earlier. The weight gradients are
independent work that fits anywhere later in the schedule. If they are computed in bucket order, the reduction of each
bucket overlaps the weight gradients of the next bucket.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from ..ddp.contract.delay_blocks import delaying_into
from ..ddp.contract.delayed import DelayedWgrad
from ..ddp.contract.module import forms_of
from ..ddp.torch_internals import weak_method

__all__ = ["Filling", "RunRecord", "WgradQueue", "delayed_wgrad", "drain_modules", "fill_wait", "filling"]


class RunRecord(NamedTuple):
    """A weight gradient that was computed: an entry of ``WgradQueue.log``."""

    owner: str
    microbatch: int
    bucket: int


class WgradQueue:
    """Delayed weight gradients of one module, one pipeline chunk, or a whole model.

    The entries of one backward form a microbatch; a nested backward of reentrant recompute belongs to the outer one.
    Microbatches are numbered in the order of their backwards, unless ``microbatch`` gives the number. The entries of
    one parameter run in the order in which they were queued. Threads may drain one queue; they take turns.

    If a module with pending entries was freed, draining computes all other entries, drops these, and raises
    ``RuntimeError`` with the name of the module.

    fill_waits  a backward that waits for tensor-parallel ranks, or for rows of experts, first computes a half of what
                is pending, the oldest entries: so the next wait has work too. Leave it off in a pipeline whose
                schedule says when weight gradients are computed

    Keep a reference to the queue until it is drained: modules and graphs refer to it weakly. If a queue with pending
    entries is freed, the next optimizer step over their weights raises an error that names them.
    """

    def __init__(self, *, fill_waits: bool = False) -> None:
        self.fill_waits = fill_waits
        self._entries: deque[DelayedWgrad] = deque()
        self._retired: list[DelayedWgrad] = []  # another stream still reads their tensors
        self._draining = threading.RLock()
        self._named_microbatch: int | None = None
        self._backward = -1  # graph task of the latest entry
        self._microbatch = -1
        self.fill: Callable[[], None] = weak_method(self.drain_half)
        """``drain_half``, as a graph may hold it: it holds the queue weakly. No ``weakref.ref``: where torch compiles
        the forward of a function of autograd, ``ctx`` would get the queue in its place (2.14)."""
        self.log: list[RunRecord] | None = None
        """Set this to a list to record each computed weight gradient, in order."""

    def __len__(self) -> int:
        """Number of pending weight gradients."""
        return len(self._entries)

    def __iter__(self) -> Iterator[DelayedWgrad]:
        """Pending weight gradients in the order in which they were queued."""
        return iter(tuple(self._entries))

    def __deepcopy__(self, memo: dict[int, Any]) -> "WgradQueue":
        """An empty queue: pending entries belong to the parameters of the original."""
        return WgradQueue(fill_waits=self.fill_waits)

    def __reduce__(self) -> Any:
        return WgradQueue, (), {"fill_waits": self.fill_waits}

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for entry in vars(self).get("_entries", ()):
                entry.lose()

    def put(self, entry: DelayedWgrad) -> None:
        """Append an entry. Backward calls this."""
        if self._named_microbatch is not None:
            self._microbatch = self._named_microbatch
        else:
            if entry.backward != self._backward:
                self._microbatch += 1
            self._backward = entry.backward
        entry.pending.microbatch = self._microbatch
        self._entries.append(entry)
        entry.pending.compute = weak_method(self.run, entry)

    def run(self, entry: DelayedWgrad) -> None:
        """Compute this entry now, if it still waits: a step needs its gradient."""
        with self._draining:
            if entry in self._entries:
                self._run_one(entry)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """All backwards in this context belong to microbatch ``index``."""
        before, self._named_microbatch = self._named_microbatch, index
        try:
            yield
        finally:
            self._named_microbatch = before

    @property
    def pending_microbatches(self) -> list[int]:
        """Microbatches with pending weight gradients, oldest first."""
        return list(dict.fromkeys(entry.pending.microbatch for entry in self._entries))

    @property
    def pending_owners(self) -> list[str]:
        """Modules with pending weight gradients, in the order in which they queued them."""
        return list(dict.fromkeys(entry.pending.owner for entry in self._entries))

    def drain(self) -> None:
        """Compute everything in bucket order, so that each bucket is complete, and reduced, as early as possible."""
        self._run(lambda entry: True, key=_bucket_of)

    def drain_half(self) -> None:
        """Compute the older half of what is pending, rounded up, in queue order.

        Backward waits twice a layer of experts, and the layer's weight gradients come between the two waits: a queue
        that the second one empties has nothing for the first one of the layer before.
        """
        entries = tuple(self._entries)
        older = entries[: -(-len(entries) // 2)]
        self._run(lambda entry: entry in older, key=lambda entry: 0)

    def drain_microbatch(self, index: int) -> None:
        """Compute the entries of microbatch ``index``, if any, in bucket order."""
        self._run(lambda entry: entry.pending.microbatch == index, key=_bucket_of)

    def drain_oldest_microbatch(self) -> None:
        """Compute the entries of the oldest pending microbatch, if any, in queue order."""
        entries = tuple(self._entries)
        if entries:
            oldest = entries[0].pending.microbatch
            self._run(lambda entry: entry.pending.microbatch == oldest, key=lambda entry: 0)

    def drain_module(self, module: nn.Module) -> None:
        """Compute the entries of the weights of ``module`` and its children, in queue order."""
        mine = set(map(id, module.parameters()))
        self._run(
            lambda entry: any(id(form) in mine for weight in entry.weights() for form in forms_of(weight)),
            key=lambda entry: 0,
        )

    def clear(self) -> None:
        """Drop all pending entries, when an iteration is abandoned."""
        while self._entries:
            self._entries.popleft().drop()

    def check_empty(self) -> None:
        """Raise ``RuntimeError`` that names the modules whose weight gradients are still pending."""
        if self._entries:
            raise RuntimeError(
                f"{len(self)} delayed weight gradients were never computed, of {', '.join(self.pending_owners)}: call "
                f"drain(), or backward_dw() of each module, before the step ends"
            )

    def _run(self, chosen: Callable[[DelayedWgrad], bool], key: Callable[[DelayedWgrad], int]) -> None:
        with self._draining:
            entries = tuple(self._entries)  # a concurrent backward may append
            orphans = [entry for entry in entries if entry.is_orphaned]
            mine = [entry for entry in entries if not entry.is_orphaned and chosen(entry)]
            for entry in sorted(mine, key=key):  # stable sort: queue order within a key
                self._run_one(entry)
            for entry in orphans:
                self._entries.remove(entry)
            try:
                for entry in orphans:
                    entry.run()  # raises, and names the module
            finally:
                for entry in orphans:
                    entry.drop()

    def _run_one(self, entry: DelayedWgrad) -> None:
        entry.run()
        self._entries.remove(entry)
        if self.log is not None:
            self.log.append(RunRecord(entry.pending.owner, entry.pending.microbatch, _bucket_of(entry)))
        # Not before run(): another stream joins the backward's capture, if there is one, by waiting for the backward.
        # Until then nothing on this stream tells that no event may be asked.
        self._retired = [each for each in (*self._retired, entry) if each.in_use]


Filling: TypeAlias = Callable[[], None] | None
"""What waits of the backward call, to compute a half of a queue; None: there is none."""


def filling(queue: WgradQueue | None) -> Filling:
    """The queue's ``fill``; None unless it has ``fill_waits``."""
    return None if queue is None or not queue.fill_waits else queue.fill


def fill_wait(waiting: Filling) -> None:
    """While a collective runs, compute a half of what the queue holds."""
    if waiting is not None:
        waiting()


def drain_modules(model: nn.Module) -> None:
    """Compute, in bucket order, what the modules of ``model`` have delayed into their own queues."""
    found = (getattr(module, "wgrad_queue", None) for module in model.modules())
    queues = dict.fromkeys(queue for queue in found if isinstance(queue, WgradQueue))
    waiting = [(entry.pending.order, entry, queue) for queue in queues for entry in queue]
    for _, entry, queue in sorted(waiting, key=lambda item: item[0]):
        queue.run(entry)  # unless another thread has drained it


def _bucket_of(entry: DelayedWgrad) -> int:
    """Index of the first bucket, in launch order, that waits for the gradient."""
    return entry.pending.order[0]


@contextmanager
def delayed_wgrad(queue: WgradQueue) -> Iterator[WgradQueue]:
    """Forwards in this context delay the weight gradients of all maingrad modules into ``queue``::

        with delayed_wgrad(queue):
            loss = model(batch)
        loss.backward()   # input gradients only
        queue.drain()     # weight gradients; the reduction of each bucket overlaps those of the next bucket

    Only the forward must run in this context; the backward may run at any later time. A module with
    ``delay_wgrad_compute=True`` keeps using its own queue. A module whose parameters belong to another provider raises
    ``RuntimeError``: Megatron asks only once, when it wraps a model, which gradients are delayed.

    Activation recompute: under reentrant checkpointing, the forward that builds the graph runs in backward, outside
    this context, so backward computes the weight gradients. Under non-reentrant checkpointing, the recompute delays if
    the first forward did.
    """
    with delaying_into(queue):
        yield queue
