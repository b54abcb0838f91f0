"""``WeightAsks``: weights that modules ask for one by one (``../unit/weight_unit.py``) in the life of an iteration.

A module's requests stand in place of a unit's hooks::

    materialize_group_for_forward    1  gather the group and the next one, and wait
    (the module's forward ends)      3  free the memory
    materialize_group_for_backward   4  gather the group again, and the one that comes next in backward
    grad_buffer                      5  whole gradients take memory
    finalize_group_grads             6  free the memory, gather ahead;  7  keep the gradients, or launch their reduction
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ddp.torch_internals import are_saves_packed, current_backward, delivers_to_all
from ..unit.unit import Unit
from ..unit.weight_unit import WeightUnit
from .hooks import ForwardTrace, UnitForward, delivers_to_any

if TYPE_CHECKING:
    from .root import Root

__all__ = ["WeightAsks"]


class WeightAsks:
    """What ``root`` does for modules that ask for weights."""

    def __init__(self, root: "Root") -> None:
        self._here = weakref.ref(root)
        self._asked: dict[WeightUnit, UnitForward] = {}  # by forwards that have not ended
        # Forwards that have left a graph, of the last outermost forward and of recomputes. Backward asks for the last
        # first; it does not say which forward it asks for.
        self._forwards: dict[Unit, list[tuple[UnitForward, ForwardTrace]]] = {}
        self._entered: tuple[UnitForward, ForwardTrace] | None = None  # that backward asked for last

    @property
    def _root(self) -> "Root":
        root = self._here()
        assert root is not None, "it owns this object"
        return root

    # ---- Forward. ----

    def for_forward(self, unit: WeightUnit) -> None:
        """A module asks for its weights in forward."""
        if are_saves_packed() and _trains(unit):
            raise RuntimeError(
                f"{unit.label} is asked for under hooks on saved tensors (torch.utils.checkpoint with "
                f"use_reentrant=False, save_on_cpu): the module would get another tensor in backward, which gathers "
                f"nothing; recompute with use_reentrant=True, or pass distributed_weights=False"
            )
        self._root.gather_for_forward(unit)
        self._root.gathers.wait(unit)
        self._asked[unit] = self._root.forward_inside(unit)

    def forward_ended(self, unit: WeightUnit) -> None:
        """The forward of the module has ended, or raised."""
        forward = self._asked.pop(unit, None)
        if forward is None:
            return
        has_graph, trace = torch.is_grad_enabled(), self._root.trace
        kept = self._forwards.get(unit, [])
        if trace.task == -1:
            # Backwards of earlier forwards are predicted alike, and those that recomputed are over.
            kept = [each for each in kept if each[1] is trace or (not has_graph and each[1].task == -1)]
        if has_graph:
            trace.add(forward)
            kept = [*kept, (forward, trace)]
        self._forwards[unit] = kept
        self._root.release_after_forward(unit, has_graph=has_graph)

    # ---- Backward. ----

    def enter(self, unit: WeightUnit) -> None:
        """A module asks for its weights in backward, or for memory of their gradient; the first of these enters."""
        task = current_backward()
        forward, trace = self._last_forward(unit, task)
        if forward.entered == task:
            return
        before, self._entered = self._entered, (forward, trace)
        if before is not None and before[0].entered == task and not _trains(before[0].unit):
            self._leave(*before, task)  # nobody hands over gradients of frozen weights
        forward.entered = task
        self._root.pre_backward(forward, trace, task, delivers=delivers_to_all())

    def delivers_to(self, param: nn.Parameter) -> bool:
        """The backward under way delivers a gradient to ``param``: not where ``autograd.grad`` goes through."""
        return delivers_to_all() or delivers_to_any([param])

    def finalize(self, unit: WeightUnit, wgrads: Sequence[Tensor | None]) -> None:
        """A module hands over gradients, of a group's weights in their order."""
        self.enter(unit)
        task = current_backward()
        for pair, wgrad in zip(unit.pairs, wgrads, strict=True):
            if wgrad is not None and pair.whole.requires_grad and self.delivers_to(pair.whole):
                unit.deliver(pair.whole, wgrad)
        for bucket in unit.buckets:
            if bucket.trainable:
                bucket.record_stream()
        self._leave(*self._last_forward(unit, task), task)

    def _leave(self, forward: UnitForward, trace: ForwardTrace, task: int) -> None:
        """Backward has passed a forward that it has entered."""
        forward.passed = task
        if trace.task != -1:  # a recomputed forward is passed once
            self._forwards[forward.unit].remove((forward, trace))
        self._root.post_backward(forward, trace, task)

    def _last_forward(self, unit: WeightUnit, task: int) -> tuple[UnitForward, ForwardTrace]:
        kept = self._forwards.get(unit, [])
        for forward, trace in reversed(kept):
            if not trace.is_passed(forward, task):
                return forward, trace
        if not kept:
            raise RuntimeError(f"backward asks for {unit.label}, and no forward of its module has left a graph")
        # One backward goes through several outermost forwards. It has passed the last one, and an earlier one is alike.
        for forward, _ in kept:
            forward.entered = forward.passed = -1
        return kept[-1]


def _trains(unit: Unit) -> bool:
    return any(pair.whole.requires_grad for pair in unit.pairs)
