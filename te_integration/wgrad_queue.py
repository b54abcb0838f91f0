"""``WgradQueue``: weight gradients that were put off, and the orders in which they can be computed.

A backward whose weight gradients are delayed runs the input gradients only, and is over sooner. The rest is independent
work that fits anywhere later in the schedule; drained in bucket order, each bucket's reduction runs under the weight
gradients of the next.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from ..ddp.contract.delayed import DelayedWgrad, delaying_into
from ..ddp.contract.module import forms_of

__all__ = ["RunRecord", "WgradQueue", "delayed_wgrad", "drain_modules"]


class RunRecord(NamedTuple):
    """One weight gradient that was computed, for ``WgradQueue.log``."""

    owner: str
    microbatch: int
    bucket: int


class WgradQueue:
    """Delayed weight gradients of one module, one pipeline chunk, or a whole model.

    Entries of one backward form a microbatch, reentrant recompute included; microbatches are numbered as their
    backwards come, or named by ``microbatch``. For one parameter entries run in the order in which they were queued.
    Threads that drain one queue do so one after the other. Draining raises ``RuntimeError`` that names a module whose
    weights were freed, after it has computed the others, and its entries are gone then.

    Keep it until it is drained: modules and graphs refer to it weakly. What is pending in a queue that is let go is
    refused by name in the next step over its weights.
    """

    def __init__(self) -> None:
        self._entries: deque[DelayedWgrad] = deque()
        self._retired: list[DelayedWgrad] = []  # tensors that another stream still reads
        self._draining = threading.RLock()
        self._named_microbatch: int | None = None
        self._backward = -1  # graph task of the latest entry
        self._microbatch = -1
        self.log: list[RunRecord] | None = None
        """Set to a list to record what runs, in order."""

    def __len__(self) -> int:
        """Number of pending weight gradients."""
        return len(self._entries)

    def __iter__(self) -> Iterator[DelayedWgrad]:
        """Pending weight gradients in the order in which they were queued."""
        return iter(tuple(self._entries))

    def __deepcopy__(self, memo: dict[int, Any]) -> "WgradQueue":
        """An empty queue: what is pending belongs to the original's parameters."""
        return WgradQueue()

    def __reduce__(self) -> Any:
        return WgradQueue, ()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for entry in vars(self).get("_entries", ()):
                entry.lose()

    def put(self, entry: DelayedWgrad) -> None:
        """Append one; called from backward."""
        if self._named_microbatch is not None:
            self._microbatch = self._named_microbatch
        else:
            if entry.backward != self._backward:
                self._microbatch += 1
            self._backward = entry.backward
        entry.pending.microbatch = self._microbatch
        self._entries.append(entry)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Backwards in here belong to microbatch ``index``, however many there are."""
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
        """Compute everything, in bucket order: a bucket is complete, and its reduction launched, as early as can be."""
        self._run(lambda entry: True, key=lambda entry: entry.bucket_index)

    def drain_microbatch(self, index: int) -> None:
        """Compute one microbatch's, in bucket order; nothing where it has none."""
        self._run(lambda entry: entry.pending.microbatch == index, key=lambda entry: entry.bucket_index)

    def drain_oldest_microbatch(self) -> None:
        """Compute the oldest microbatch's, in the order in which they were queued; nothing where none is pending."""
        entries = tuple(self._entries)
        if entries:
            oldest = entries[0].pending.microbatch
            self._run(lambda entry: entry.pending.microbatch == oldest, key=lambda entry: 0)

    def drain_module(self, module: nn.Module) -> None:
        """Compute those of ``module``'s weights, children's included, in the order in which they were queued."""
        mine = set(map(id, module.parameters()))
        self._run(
            lambda entry: any(id(form) in mine for weight in entry.weights() for form in forms_of(weight)),
            key=lambda entry: 0,
        )

    def clear(self) -> None:
        """Give up everything that is pending, in an iteration that is abandoned."""
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
            entries = tuple(self._entries)  # backwards may queue more meanwhile
            orphans = [entry for entry in entries if entry.is_orphaned]
            mine = [entry for entry in entries if not entry.is_orphaned and chosen(entry)]
            for entry in sorted(mine, key=key):  # stable: queued order within a key
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
        self._retired = [retired for retired in self._retired if retired.in_use]
        entry.run()
        self._entries.remove(entry)
        if self.log is not None:
            self.log.append(RunRecord(entry.pending.owner, entry.pending.microbatch, entry.bucket_index))
        if entry.in_use:
            self._retired.append(entry)


def drain_modules(model: nn.Module) -> None:
    """Compute everything that the modules of ``model`` have delayed in queues of their own, in bucket order."""
    found = (getattr(module, "wgrad_queue", None) for module in model.modules())
    queues = dict.fromkeys(queue for queue in found if isinstance(queue, WgradQueue))
    waiting = [(entry.bucket_index, entry.sequence, entry, queue) for queue in queues for entry in queue]
    for _, _, entry, queue in sorted(waiting, key=lambda item: item[:2]):
        with queue._draining:
            if entry in queue._entries:  # and not drained by another thread since
                queue._run_one(entry)


@contextmanager
def delayed_wgrad(queue: WgradQueue) -> Iterator[WgradQueue]:
    """Forwards in here delay the weight gradients of all our modules into ``queue``::

        with delayed_wgrad(queue):
            loss = model(batch)
        loss.backward()   # input gradients only
        queue.drain()     # weight gradients; each bucket's reduction runs under the next bucket's

    It speaks of forwards, so that a backward may come at any time later. A module with ``delay_wgrad_compute=True``
    keeps using its own queue. Raises ``RuntimeError`` in a module whose parameters belong to a foreign provider, since
    Megatron asks once, when it wraps, which gradients are delayed. Inside reentrant recompute the forward that counts
    runs in backward, outside the block, and weight gradients are computed there. Recompute without reentrance delays as
    its first forward did, whether its backward runs in a block or not.
    """
    with delaying_into(queue):
        yield queue
