"""Which unit a forward enters next: as recorded the last time.

Nothing depends on it but when a gather is issued. A guess that was wrong costs a gather; all ranks guess alike, since
all run the same units in the same order.
"""

from typing import Generic, TypeVar

__all__ = ["ForwardOrder"]

_Unit = TypeVar("_Unit")


class ForwardOrder(Generic[_Unit]):
    """The units in the order in which the last whole forward entered them."""

    def __init__(self) -> None:
        self._recorded: list[_Unit] = []
        self._current: list[_Unit] = []

    def begin(self) -> None:
        """The outermost forward starts."""
        if self._current:
            self._recorded = self._current
        self._current = []

    def enter(self, unit: _Unit) -> _Unit | None:
        """A unit's forward starts; returns the unit that followed it the last time, if all went as it does now."""
        index = len(self._current)
        self._current.append(unit)
        if index + 1 < len(self._recorded) and self._recorded[index] is unit:
            return self._recorded[index + 1]
        return None

    def first(self, count: int) -> list[_Unit]:
        """The units that the last forward entered first; the outermost, in which they all run, is among them."""
        return self._current[:count]

    def came_last(self, unit: _Unit) -> bool:
        """Whether no other followed it in the last forward."""
        return bool(self._recorded) and len(self._current) == len(self._recorded) and self._recorded[-1] is unit
