"""Weight gradients of a layer's captured backward: what the capture notes, and what each replay says.

This serves graphs of single layers (``te_integration/graphs``), whose replays are parts of an eager iteration. A
graphed step (``ddp/graphs/training_step.py``) needs none of it: its capture runs the Python of a whole iteration, and
after each replay every flag, record and bucket is as between two eager iterations.

A replay runs kernels and no Python. So a capture computes nothing for a provider: no flag is set, no record is opened,
nothing is queued. A forward that is captured gives its products a ``CapturedTarget``, which hands them to the running
``BackwardCapture``, which keeps a ``Delivery``. Around each replay the deliveries are opened and handed over as an
eager backward would do:

    capture   CapturedTarget.deliver --> BackwardCapture.note --> Delivery.compute   (in the graph)
    replay    open_deliveries (beta) --> the graph --> settle_kept, Delivery.hand_over  (flag, queue, return value)
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import target
from .delayed import DelayedTarget, DelayedWgrad, absorb_late_sum, add_to_grad, live_queue
from .main_grad import Demand, Place, WgradTarget, accumulator_of, hand_over, open_for_write, record_of

__all__ = [
    "BackwardCapture",
    "CapturedTarget",
    "Delivery",
    "FirstWrites",
    "Kept",
    "noting",
    "open_deliveries",
    "settle_kept",
]

Compute = Callable[[Sequence[bool]], Sequence[Tensor | None]]
Kept = list[tuple[Tensor, Tensor]]
"""Accumulators whose content a replay overwrites though it must add, each with a copy of that content."""


class FirstWrites:
    """Which captured write of a weight overwrites (beta = 0): the first of the captured order, and no other.

    in_order  False: graphs are replayed any number of times in an iteration, so that no write is known to be the first
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._written: set[int] = set()

    def take(self, weight: Tensor) -> bool:
        """Called once for each captured write of ``weight``; returns whether that write overwrites."""
        record = record_of(weight)
        first = id(weight) not in self._written
        self._written.add(id(weight))
        return self._in_order and first and record is not None and record.first_write_overwrites


class Delivery:
    """The weight gradients of one product in a captured backward.

    owner    the module, for errors
    weights  whose gradients the product gives
    fused    they go into ``main_grad``; False (delayed ones only): into ``.grad``
    queue    they are delayed into this queue; None: the backward computes them
    compute  called in the capture with "overwrites" for each weight: computes into ``main_grad``, or returns gradients
    """

    def __init__(
        self, owner: str, weights: Sequence[Tensor], *, fused: bool, queue: "weakref.ref[Any] | None", compute: Compute
    ) -> None:
        self.owner, self.weights, self.fused = owner, tuple(weights), fused
        self._queue = queue
        self._compute: Compute | None = compute
        self.overwrites: tuple[bool, ...] = ()
        """The captured beta of each weight's write: True is 0."""
        self.gradients: tuple[Tensor | None, ...] = ()
        """Unfused: the gradients, which each replay computes anew."""
        self._places = tuple(self._accumulator(weight).data_ptr() for weight in weights) if fused else ()

    @property
    def delayed(self) -> bool:
        """Whether the gradients wait in a queue."""
        return self._queue is not None

    @torch.no_grad()
    def compute(self, first_writes: FirstWrites) -> None:
        """Compute the gradients in the graph that is being captured. Lets go of the operands."""
        assert self._compute is not None, "computed once, in the capture"
        compute, self._compute = self._compute, None
        self.overwrites = tuple(self.fused and first_writes.take(weight) for weight in self.weights)
        self.gradients = tuple(compute(self.overwrites))

    def open(self, backward: int) -> Kept:
        """Before a replay: decide each write's beta anew. The captured beta stays; what it does wrong is mended.

        Captured as an addition, but now the first write: the accumulator is zeroed. Captured as the first write, but
        now an addition (the order is run twice in an iteration, or an eager backward wrote before): the content is
        returned, and ``settle_kept`` adds it after the replay. That costs a copy and an addition, and where
        ``main_grad`` is bf16 one more rounding.
        """
        kept: Kept = []
        if not self.fused:
            return kept
        for weight, captured, place in zip(self.weights, self.overwrites, self._places, strict=True):
            accumulator = self._accumulator(weight)
            if accumulator.data_ptr() != place:
                raise RuntimeError(
                    f"{self.owner}: main_grad of a weight has moved since its backward was captured (the model was "
                    f"wrapped anew?): capture again, with make_graphed_callables over the wrapped model"
                )
            overwrites = open_for_write(weight, record_of(weight), backward)
            if overwrites and not captured:
                accumulator.zero_()
            elif captured and not overwrites:
                kept.append((accumulator, accumulator.clone()))
        return kept

    def hand_over(self) -> list[Tensor | None]:
        """In the backward that replays: set flags, and return what autograd gets for each weight."""
        return [hand_over(weight, record_of(weight), fused=self.fused) for weight in self.weights]

    def put(self, replay: Callable[[], None], operands: tuple[Tensor, ...], backward: int) -> DelayedWgrad:
        """In the backward that replays: queue the delayed gradients; returns the entry.

        replay    computes them, and those of other deliveries of the same graph, where that has not happened yet
        operands  memory that ``replay`` reads and eager code fills
        """
        assert self._queue is not None, "delayed"
        queue = live_queue(self._queue, self.owner)

        def write(entry: DelayedWgrad, *_: Tensor) -> None:
            replay()
            for weight, gradient in zip(self.weights, self.gradients, strict=True):
                if gradient is not None:
                    add_to_grad(weight, gradient.clone(), record_of(weight))
                absorb_late_sum(weight, record_of(weight), entry)

        records = [record for record in map(record_of, self.weights) if record is not None]
        entry = DelayedWgrad(write, operands, records, self.owner, backward, lambda: self.weights)
        queue.put(entry)
        return entry

    def _accumulator(self, weight: Tensor) -> Tensor:
        return accumulator_of(weight, self.owner, rows_apart=True)


def open_deliveries(deliveries: Sequence[Delivery], backward: int) -> Kept:
    """``Delivery.open`` for all deliveries of one graph."""
    return [kept for delivery in deliveries for kept in delivery.open(backward)]


def settle_kept(kept: Kept) -> None:
    """After the replay: add what the accumulators held before."""
    for accumulator, content in kept:
        accumulator.add_(content)


class BackwardCapture:
    """Notes the weight gradients of one backward that is captured.

    params  of the captured layer
    """

    def __init__(self, first_writes: FirstWrites, params: Sequence[Tensor]) -> None:
        self._first_writes = first_writes
        self._params = set(map(id, params))
        self.deliveries: list[Delivery] = []
        """In the order of the backward."""

    def note(self, delivery: Delivery) -> None:
        """Compute the gradients in the graph, or, where they are delayed, keep them for a graph of their own.

        Raises ``ValueError`` for a weight that is no parameter of the layer: no replay would report its gradient.
        """
        if not self._params.issuperset(map(id, delivery.weights)):
            raise ValueError(
                f"{delivery.owner} is used by a captured layer that does not register it: make it a submodule of the "
                f"layer (no list, no closure), or leave the layer out of the graphs"
            )
        self.deliveries.append(delivery)
        if not delivery.delayed:
            delivery.compute(self._first_writes)


class CapturedTarget:
    """The gradients go to a capture, which does with each what the target that it stands for would do.

    around   the target of an eager forward
    capture  of the layer, held weakly: modules keep the targets of their last forwards
    """

    def __init__(self, around: WgradTarget, capture: "weakref.ref[BackwardCapture]") -> None:
        self._target = around
        self._capture = capture

    def serves(self, weights: Sequence[Tensor], queue: object | None) -> bool:
        """Whether another forward of the same capture may use this target."""
        return self._target.serves(weights, queue)

    def demand(self, weight_node: Any) -> Demand:
        """A captured backward computes every gradient of its layer, and each replay asks the engine again."""
        return Demand.ACCUMULATE

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """As the target does."""
        return self._target.resolve(wanted)

    def deliver(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> list[Tensor | None]:
        """Leave the gradients with the capture. Autograd gets nothing."""
        eager = self._target
        mine = [place is not None for place in places]
        if eager.fused:
            places = [place and eager.place_for_write(number, place.weight) for number, place in enumerate(places)]
        weights = [place.weight for place in places if place is not None]

        def compute(overwrite: Sequence[bool]) -> list[Tensor | None]:
            if not eager.fused:
                found = eager.wgrad.gradients(mine, weights[0].dtype, *operands)
                return [gradient for gradient, own in zip(found, mine, strict=True) if own]
            betas = iter(overwrite)
            accumulators = [place and place.accumulator for place in places]
            eager.wgrad.accumulate(accumulators, [own and next(betas) for own in mine], *operands)
            return [None] * len(weights)

        queue = eager.queue if isinstance(eager, DelayedTarget) else None
        capture = self._capture()
        assert capture is not None, "it is under way"
        capture.note(Delivery(eager.owner, weights, fused=eager.fused, queue=queue, compute=compute))
        return [None] * len(places)


@contextmanager
def noting(capture: BackwardCapture) -> Iterator[None]:
    """In this block, forwards of all threads give new products a ``CapturedTarget``.

    Not of this thread alone: CUDA backwards, and what they compute again, run on threads of autograd's.
    """
    if target.captured is not None:
        raise RuntimeError("another layer is being captured in this process: capture one model at a time")
    target.captured = partial(CapturedTarget, capture=weakref.ref(capture))
    try:
        yield
    finally:
        target.captured = None
