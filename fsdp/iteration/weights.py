"""``WeightAsks``: weights that modules ask for one by one (``../unit/weight_unit.py``) in the life of an iteration.

A module's requests stand in place of a unit's hooks::

    materialize_group_for_forward    1  gather the group and the next one, and wait
    (the module's forward ends)      3  free the memory
    materialize_group_for_backward   4  gather the group again, and the one that comes next in backward
    grad_buffer                      5  whole gradients take memory
    finalize_group_grads             6  free the memory;  7  keep the gradients, or launch their reduction
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...ddp.torch_internals import are_saves_packed, current_backward, delivers_to_all
from ..unit.weight_unit import WeightUnit
from .hooks import delivers_to_any

if TYPE_CHECKING:
    from .root import Root

__all__ = ["WeightAsks"]


class WeightAsks:
    """What ``root`` does for modules that ask for weights."""

    def __init__(self, root: "Root") -> None:
        self._here = weakref.ref(root)
        self._running: set[WeightUnit] = set()  # whose modules have asked in a forward that has not ended
        # Of the last forward of each that has left a graph: ``ForwardTrace.asked``.
        self._asked: dict[WeightUnit, list[WeightUnit]] = {}
        self._frozen: WeightUnit | None = None  # the weights that backward asked for last, if nobody hands over theirs

    @property
    def _root(self) -> "Root":
        root = self._here()
        assert root is not None, "it owns this object"
        return root

    def for_forward(self, unit: WeightUnit) -> None:
        """A module asks for its weights in forward."""
        if are_saves_packed() and _trains(unit):
            raise RuntimeError(
                f"{unit.label} is asked for under hooks on saved tensors (torch.utils.checkpoint with "
                f"use_reentrant=False, save_on_cpu): the module would get another tensor in backward, which gathers "
                f"nothing; recompute with use_reentrant=True, or pass distributed_weights=False"
            )
        self._pass_frozen(unit)
        root = self._root
        root.gather_for_forward(unit)
        root.gathers.wait(unit)
        self._running.add(unit)

    def forward_ended(self, unit: WeightUnit) -> None:
        """The forward of the module, or of one around it, has ended or raised."""
        has_graph = torch.is_grad_enabled()  # not known when it was asked, in the forward of a function of autograd
        if has_graph and unit in self._running:
            unit.hands_over = _trains(unit)
            self._asked[unit] = asked = self._root.trace.asked
            asked.append(unit)
        self._running.discard(unit)
        self._root.release_after_forward(unit, has_graph=has_graph)

    def enter(self, unit: WeightUnit) -> None:
        """A module asks for its weights in backward, or for memory of their gradient; the first of these enters."""
        self._pass_frozen(unit)
        root = self._root
        if unit.hands_over:
            trains = any(self.delivers_to(pair.whole) for pair in unit.pairs)
            root.enter(unit, current_backward(), trains=trains, delays=False)
        asked = self._asked.get(unit, [])
        while unit in asked and asked[-1] is not unit:
            asked.pop()  # backward goes past it
        for each in (unit, *asked[-2:-1]):  # and ahead of use what forward has asked for before
            root.gathers.gather(each)
        root.gathers.wait(unit)
        if not unit.hands_over:
            self._frozen = unit
            self._passes(unit)

    def delivers_to(self, param: Tensor) -> bool:
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
        if not self._passes(unit):
            self._root.leave(unit)

    def _passes(self, unit: WeightUnit) -> bool:
        """Backward passes one use of the weights; returns whether it comes again."""
        asked = self._asked.get(unit, [])
        if asked[-1:] == [unit]:
            asked.pop()
        return unit in asked

    def _pass_frozen(self, unit: WeightUnit) -> None:
        """A request for ``unit``: backward has passed the frozen weights that it asked for before."""
        if self._frozen is not None and self._frozen is not unit:
            self._root.gathers.release(self._frozen)
        self._frozen = None


def _trains(unit: WeightUnit) -> bool:
    return any(pair.whole.requires_grad for pair in unit.pairs)
