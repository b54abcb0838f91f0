"""Predicts which unit a forward enters next, from the order of the last forward.

Only the time of a gather depends on the prediction. A wrong one costs a gather. All ranks predict alike, because all
run the same units in the same order.
"""

from typing import Generic, TypeVar

__all__ = ["ForwardOrder"]

_Unit = TypeVar("_Unit")


class ForwardOrder(Generic[_Unit]):
    """The order in which the last outermost forward, and the current one, have entered units."""

    def __init__(self) -> None:
        self._recorded: list[_Unit] = []
        self._current: list[_Unit] = []

    def begin(self) -> None:
        """An outermost forward starts."""
        if self._current:
            self._recorded = self._current
        self._current = []

    def enter(self, unit: _Unit) -> _Unit | None:
        """A unit's forward starts. Returns the unit that followed the last time; None if the order has changed."""
        index = len(self._current)
        self._current.append(unit)
        if index + 1 < len(self._recorded) and self._recorded[index] is unit:
            return self._recorded[index + 1]
        return None

    def first(self, count: int) -> list[_Unit]:
        """The first ``count`` units of the current or last forward, the outermost among them."""
        return self._current[:count]

    def came_last(self, unit: _Unit) -> bool:
        """Whether ``unit`` is the last of both the last forward and the current one."""
        return bool(self._recorded) and len(self._current) == len(self._recorded) and self._recorded[-1] is unit
