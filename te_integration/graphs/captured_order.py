"""``CapturedOrder``: what the graphs of one order share, the order of their replays above all.

Memory that is free after one graph serves later ones. A replay out of turn would read what another graph has written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.streams import current_stream
from ...ddp.contract.capturing import FirstWrites
from ...ddp.contract.delayed import DelayedWgrad
from ...ddp.graphs.capture import GraphPool

__all__ = ["CapturedOrder", "ReplayError", "StaticBuffers"]


class ReplayError(RuntimeError):
    """A graphed callable was called with what, or when, its graphs do not allow."""


class CapturedOrder:
    """Checks that graphs are replayed in the captured order. After the last step comes the first.

    The first step may be replayed at any time, because an iteration may be given up, unless delayed weight gradients
    are pending. Replays may be on several streams, each behind all before it.

    pool      memory and stream of the captures
    is_given  the program gave the order: the first captured write of a weight is the first of each iteration
    shares    there are several microbatches: their outputs and gradients share memory where the order allows it. That
              takes a copy at the end of a graph; a copy of each microbatch would stay otherwise
    """

    def __init__(self, pool: GraphPool, *, is_given: bool, shares: bool) -> None:
        self.pool = pool
        self.shares = shares
        self.buffers = StaticBuffers()
        self.first_writes = FirstWrites(in_order=is_given)
        self.steps: list[str] = []
        """One name for each graph, in the order of their capture. A step is an index of this list."""
        self._freed: set[int] = set()
        self._next = 0
        self._stream: torch.cuda.Stream | None = None  # of the latest replay
        self._delayed: list[DelayedWgrad] = []

    def append(self, name: str) -> int:
        """Add a graph that was captured; returns its step."""
        self.steps.append(name)
        return len(self.steps) - 1

    def remove(self, step: int) -> None:
        """The graph was freed: the others are replayed without it."""
        self._freed.add(step)

    def record_delayed(self, entries: Sequence[DelayedWgrad]) -> None:
        """A replay has queued delayed weight gradients, which a later step computes."""
        self._delayed = [entry for entry in (*self._delayed, *entries) if entry.waits]

    def enter(self, step: int) -> None:
        """Before a replay: have the current stream wait for the replays before.

        Raises ``ReplayError`` unless it is this step's turn, and where its graph was freed.
        """
        if step in self._freed:
            raise ReplayError(f"{self.steps[step]} comes after reset(), which has freed its graph: call reset() later")
        if step != self._next:
            self._check_turn(step)
        self.wait()

    def wait(self) -> None:
        """Have the current stream wait for all replays so far."""
        if self.pool.stream is not None:
            stream = current_stream(self.pool.device)
            if self._stream is not None and self._stream is not stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def leave(self, step: int) -> None:
        """The graph was replayed."""
        self._next = (step + 1) % len(self.steps)

    def _from(self, start: int) -> int:
        """The first step from ``start`` on that was not freed."""
        count = len(self.steps)
        return next(step % count for step in range(start, start + count) if step % count not in self._freed)

    def _check_turn(self, step: int) -> None:
        expected, first = self._from(self._next), self._from(0)
        if step == expected:
            return
        if step != first:
            raise ReplayError(
                f"{self.steps[step]} was called where {self.steps[expected]} comes in the captured order: keep to that "
                f"order, or begin anew with {self.steps[first]} after an iteration that was given up"
            )
        pending = [entry for entry in self._delayed if entry.waits]
        if pending:
            raise ReplayError(
                f"{self.steps[step]} begins anew while {len(pending)} delayed weight gradients are pending, of "
                f"{pending[0].pending.owner}: call backward_dw() of each callable first, or clear() the queues of its "
                f"modules"
            )


class StaticBuffers:
    """Memory that eager code fills before a replay. A buffer has a new user when the order needs the last one no more.

    ``take`` and ``give_back`` are called while an order is captured, entry by entry. A buffer that is given back after
    entry i serves entries behind i. Replays in the captured order then never fill a buffer that is still to be read.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}
        self.nbytes = 0
        """Memory of all buffers."""

    def take(self, like: Tensor) -> Tensor:
        """A buffer of the shape, strides, dtype and device of ``like``, with any content."""
        free = self._free.get(_kind(like))
        if free:
            return free.pop()
        buffer = torch.empty_like(like, requires_grad=False)
        self.nbytes += buffer.nbytes
        return buffer

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """No entry from here on reads these buffers."""
        for buffer in buffers:
            self._free.setdefault(_kind(buffer), []).append(buffer)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
