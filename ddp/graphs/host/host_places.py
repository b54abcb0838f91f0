"""``Place``: values that a program reads together, and whether they are others now."""

import enum
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["ABSENT", "SIMPLE", "Place", "attributes_of", "is_same", "kept"]

SIMPLE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, range)
"""Values that are equal wherever they are."""
ABSENT = object()
"""In the place of a name that is not there."""


class Place:
    """Values that are read together.

    read   their present values by name
    path   the name of what holds them, for messages
    items  they are items of a container, and no attributes
    """

    __slots__ = ("_items", "_path", "_read", "_values", "names")

    def __init__(self, read: Callable[[], Mapping[Any, Any]], path: str, *, items: bool = False) -> None:
        self._read, self._path, self._items = read, path, items
        self.take()

    def take(self) -> None:
        """Keep what is there now."""
        now = self._read()
        self.names, self._values = list(now), list(map(kept, now.values()))

    def labeled(self) -> list[tuple[str, Any]]:
        """The kept names and values, each with a name for messages."""
        found = [(self._label(name), value) for name, value in zip(self.names, self._values, strict=True)]
        return [*((self._path, name) for name in self.names), *found] if self._items else found

    def _label(self, name: Any) -> str:
        if self._items:
            return f"{self._path}[{name!r}]"
        return ".".join(part for part in (self._path, name) if part)

    def change(self) -> str | None:
        """The name of what is another value now; None where there is none."""
        now, names, values = self._read(), self.names, self._values
        if len(now) != len(values):
            return self._path if self._items else self._label(next(iter(now.keys() ^ set(names))))
        if not all(map(operator.is_, now.values(), values)) or not all(map(operator.is_, now, names)):
            for at, (name, value) in enumerate(now.items()):
                if not (is_same(value, values[at]) and is_same(name, names[at])):
                    return self._label(name)
            self.take()  # equal numbers that were made anew
        return None


def kept(value: Any) -> Any:
    """``value``; tensors with a graph weakly, as a kept loss would keep its activations."""
    return weakref.ref(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def is_same(value: Any, before: Any) -> bool:
    """Whether ``before``, as ``kept``, is this object or an equal value. Other objects equal themselves alone."""
    if value is before or (type(before) is weakref.ref and before() is value):
        return True
    if type(value) is not type(before):
        return False
    if isinstance(value, tuple):
        return len(value) == len(before) and all(map(is_same, value, before))
    if isinstance(value, types.MethodType):  # each look at a method makes another
        return value.__self__ is before.__self__ and value.__func__ is before.__func__
    is_number = type(value).__module__ == "numpy" and type(value).__hash__ is not None  # an array has no hash
    return (isinstance(value, SIMPLE) or is_number) and bool(value == before)


def attributes_of(value: Any, named: Callable[[str, Any], bool]) -> dict[str, Any]:
    """An object's own attributes that are ``named``, in its ``__dict__`` or in slots."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return {name: item for name, item in found.items() if named(name, item)}
