"""Which unit comes next: recorded forwards, and the graphs that are open for backward.

Nothing depends on it but when a gather is issued. A guess that was wrong costs a gather; all ranks guess alike, since
all run the same units in the same order.
"""

import weakref
from typing import Generic, TypeVar

__all__ = ["BackwardOrder", "ForwardOrder"]

_Unit = TypeVar("_Unit")
_Use = TypeVar("_Use")


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


class BackwardOrder(Generic[_Use]):
    """The uses of units that a backward may come to, the last first.

    It holds them weakly: a use lives as long as the graph of its forward.
    """

    def __init__(self) -> None:
        self._open: list[weakref.ref[_Use]] = []

    def push(self, use: _Use) -> None:
        """A forward has ended, and its graph is open."""
        self._open.append(weakref.ref(use))

    def begin(self) -> None:
        """The outermost forward starts: forget graphs that are gone."""
        self._open = [reference for reference in self._open if reference() is not None]

    def enter(self, use: _Use) -> None:
        """Backward has come to this use, and is done with those after it."""
        while self._open:
            found = self._open[-1]()
            if found is use:
                return
            if found is not None and not any(reference() is use for reference in self._open):
                return  # it was entered before
            self._open.pop()

    def before(self, use: _Use, count: int) -> list[_Use]:
        """The uses that backward comes to next, at most ``count``, as far as their graphs are open.

        Where backward has entered another use since it entered this one, that is the first of them.
        """
        found: list[_Use] = []
        index = next((i for i in range(len(self._open) - 1, -1, -1) if self._open[i]() is use), len(self._open))
        while index > 0 and len(found) < count:
            index -= 1
            following = self._open[index]()
            if following is not None:
                found.append(following)
        return found
