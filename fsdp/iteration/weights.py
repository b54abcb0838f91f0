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
        self._forwards: dict[WeightUnit, list[tuple[UnitForward, ForwardTrace]]] = {}
        self._entered: WeightUnit | None = None  # that backward asked for last

    @property
    def _root(self) -> "Root":
        root = self._here()
        assert root is not None, "it owns this object"
        return root

    # ---- Forward. ----

    def for_forward(self, unit: WeightUnit) -> None:
        """A module asks for its weights in forward."""
        if are_saves_packed() and any(pair.whole.requires_grad for pair in unit.pairs):
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
        has_graph = torch.is_grad_enabled()
        if has_graph:
            trace = self._root.trace
            trace.add(forward)
            kept = self._forwards.get(unit, [])
            if trace.task == -1:
                kept = [each for each in kept if each[1] is trace]  # backwards of earlier ones are predicted alike
            self._forwards[unit] = [*kept, (forward, trace)]
        self._root.release_after_forward(unit, has_graph=has_graph)

    # ---- Backward. ----

    def enter(self, unit: WeightUnit) -> None:
        """A module asks for its weights in backward, or for memory of their gradient; the first of these enters."""
        forward, trace = self._last_forward(unit)
        task = current_backward()
        if forward.entered == task:
            return
        before, self._entered = self._entered, unit
        if before is not None and before is not unit and not any(pair.whole.requires_grad for pair in before.pairs):
            self._leave(before, task)  # nobody hands over gradients of frozen weights
        forward.entered = task
        self._root.pre_backward(forward, trace, task, delivers=delivers_to_all())

    def delivers_to(self, param: nn.Parameter) -> bool:
        """The backward under way delivers a gradient to ``param``: not where ``autograd.grad`` goes through."""
        return delivers_to_all() or delivers_to_any([param])

    def finalize(self, unit: WeightUnit, wgrads: Sequence[Tensor | None]) -> None:
        """A module hands over gradients, of a group's weights in their order."""
        self.enter(unit)
        for pair, wgrad in zip(unit.pairs, wgrads, strict=True):
            if wgrad is not None and pair.whole.requires_grad and self.delivers_to(pair.whole):
                unit.deliver(pair.whole, wgrad)
        for bucket in unit.buckets:
            if bucket.trainable:
                bucket.record_stream()
        self._leave(unit, current_backward())

    def _leave(self, unit: WeightUnit, task: int) -> None:
        """Backward has passed the last forward of the group that it has entered."""
        forward, trace = self._last_forward(unit)
        if forward.entered != task:
            return  # of a backward that has ended
        forward.passed = task
        if trace.task != -1:  # a recomputed forward is passed once
            self._forwards[unit].remove((forward, trace))
        self._root.post_backward(forward, trace, task)

    def _last_forward(self, unit: WeightUnit) -> tuple[UnitForward, ForwardTrace]:
        task = current_backward()
        for forward, trace in reversed(self._forwards.get(unit, [])):
            if not trace.is_passed(forward, task):
                return forward, trace
        raise RuntimeError(
            f"backward asks for {unit.label} more often than its module's forwards have: each backward asks once for "
            f"each forward that has left a graph"
        )
