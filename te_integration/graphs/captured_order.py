"""``CapturedOrder``: the graphs that share memory, in the order of their capture, which replays must keep to.

Memory that is free after one graph serves later ones. A replay out of turn would read what another graph has written.
"""

from typing import NamedTuple

import torch

from ...ddp.contract.delayed import DelayedWgrad
from ...ddp.torch_internals import current_raw_stream
from ..pipeline.order import Kind

__all__ = ["CapturedOrder", "Place", "ReplayError", "Step"]


class ReplayError(RuntimeError):
    """A graphed callable was called with what, or when, its graphs do not allow."""


class Place(NamedTuple):
    """Which forward and backward a graph belongs to."""

    chunk: int
    """From 1; 0 without an order."""
    microbatch: int
    """From 0."""
    layer: int
    """From 0, in its chunk; without an order, the index of the module."""
    type_name: str

    def __str__(self) -> str:
        if self.chunk == 0:
            return f"module {self.layer} ({self.type_name})"
        return f"layer {self.layer} ({self.type_name}) of chunk {self.chunk}, microbatch {self.microbatch}"


class Step(NamedTuple):
    """One graph."""

    kind: Kind
    place: Place

    def __str__(self) -> str:
        return f"the {self.kind.value} of {self.place}"


class CapturedOrder:
    """Where replays are in the captured order. After the last step comes the first.

    The first step may be replayed at any time, because an iteration may be given up, unless delayed weight gradients
    are pending. Replays may be on several streams, each behind all before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = -1 if device.index is None else device.index
        self.steps: list[Step] = []
        self._gone: set[int] = set()
        self._next = 0
        self._stream: int | None = None  # raw stream of the latest replay
        self._entries: list[DelayedWgrad] = []

    def append(self, step: Step) -> int:
        """Add a step that was captured; returns its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def remove(self, index: int) -> None:
        """The graph was freed: the others are replayed without it."""
        self._gone.add(index)

    @property
    def next(self) -> int:
        """Index of the step whose turn it is."""
        while self._next in self._gone:
            self._next += 1
        if self._next >= len(self.steps):
            self._next = 0
            while self._next in self._gone:
                self._next += 1
        return self._next

    def record_delayed(self, entry: DelayedWgrad) -> None:
        """A replay has queued a delayed weight gradient, which a later step computes."""
        self._entries = [*self.pending, entry]

    @property
    def pending(self) -> list[DelayedWgrad]:
        """Delayed weight gradients that were neither computed nor given up."""
        return [entry for entry in self._entries if entry.waits]

    def check(self, index: int) -> None:
        """Raise ``ReplayError`` unless it is this step's turn."""
        expected = self.next
        if index == expected:
            return
        step = self.steps[index]
        if index > 0 and not self._gone.issuperset(range(index)):
            raise ReplayError(
                f"{step} was called where {self.steps[expected]} comes in the captured order; graphs share memory, and "
                f"are replayed in the order of their capture. After an iteration that was given up, begin with "
                f"{self.steps[0]}"
            )
        pending = self.pending
        if pending:
            raise ReplayError(
                f"{step} begins anew while {len(pending)} delayed weight gradients are pending, of {pending[0].owner}: "
                f"call backward_dw() of each callable first, or clear() the queues of its modules to give them up. "
                f"More microbatches in flight need an order that says so"
            )

    def enter(self, index: int) -> None:
        """Before the work of a step: ``check``, and have the current stream wait for the replays before."""
        self.check(index)
        if self._device.type != "cuda":
            return
        raw = current_raw_stream(self._index)
        if self._stream is not None and raw != self._stream:
            before = torch.cuda.ExternalStream(self._stream, device=self._device)
            torch.cuda.current_stream(self._device).wait_stream(before)
        self._stream = raw

    def leave(self, index: int) -> None:
        """The step was replayed."""
        self._next = index + 1
