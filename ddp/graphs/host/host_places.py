"""``Place``: values that a program reads together, and whether they are others now."""

import enum
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ABSENT",
    "HOOKS",
    "SIMPLE",
    "Place",
    "address_of",
    "attributes_of",
    "contents",
    "items_of",
    "named_attributes",
    "own_attributes",
    "state_of_module",
]

SIMPLE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, range)
"""Values that are equal wherever they are."""


class _Absent:
    """In the place of a name that is not there."""


ABSENT = _Absent()
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HELD = ("_parameters", "_buffers", "_modules", *HOOKS)


class Place:
    """Values that are read together.

    read      their present list
    describe  a name for each
    path      a name for all
    """

    __slots__ = ("_describe", "_path", "_read", "names", "values")

    def __init__(self, read: Callable[[], Any], describe: Callable[[], list[str]], path: str) -> None:
        self._read, self._describe, self._path = read, describe, path
        self.take()

    def take(self) -> None:
        """Keep what is there now. Tensors with a graph are held weakly: a kept loss would keep its activations."""
        self.values = list(map(_kept, self._read()))
        self.names = self._describe()

    def change(self) -> str | None:
        """A name of what is another value now; None where there is none."""
        now, values = self._read(), self.values
        if len(now) == len(values) and all(map(operator.is_, now, values)):
            return None
        if len(now) != len(values):
            name = (set(self._describe()) ^ set(self.names) or {self._path}).pop()
            return self._path if name.startswith(f"{self._path}[") else name
        for at, (value, before) in enumerate(zip(now, values, strict=True)):
            if value is before or (type(before) is weakref.ref and before() is value):
                continue
            if not _equal(value, before):
                return self._describe()[at]
            values[at] = value
        return None


def _kept(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def _equal(value: Any, before: Any) -> bool:
    """Whether an equal value was made anew. Other objects are equal to themselves alone."""
    if type(value) is not type(before):
        return False
    if isinstance(value, tuple | frozenset):
        return len(value) == len(before) and (
            value == before
            if isinstance(value, frozenset)
            else all(a is b or _equal(a, b) for a, b in zip(value, before, strict=True))
        )
    if isinstance(value, types.MethodType):  # each look at a method makes another
        return value.__self__ is before.__self__ and value.__func__ is before.__func__
    is_number = type(value).__module__ == "numpy" and type(value).__hash__ is not None  # an array has no hash
    return (isinstance(value, SIMPLE) or is_number) and bool(value == before)


def contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return [ABSENT]


def items_of(names: Mapping[str, Any], keys: Iterable[str]) -> list[Any]:
    return [names.get(key, ABSENT) for key in keys]


def own_attributes(value: Any) -> Mapping[str, Any]:
    try:
        own: Mapping[str, Any] = vars(value)
    except TypeError:  # it has slots, or is not Python's
        return {}
    return own


def state_of_module(module: Mapping[str, Any]) -> list[Any]:
    """Mode, parameters, buffers, children and hooks, of a module's ``vars``."""
    return [module["training"], *(item for name in _HELD if module[name] for item in module[name].values())]


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def attributes_of(value: Any) -> list[str]:
    """Names of an object's own attributes."""
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return [*own_attributes(value), *(name for name in slots if hasattr(value, name))]


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    found = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__")]


def named_attributes(
    value: Any, path: str, named: frozenset[str]
) -> tuple[Callable[[], list[Any]], Callable[[], list[str]]]:
    def names() -> list[str]:
        return [name for name in attributes_of(value) if name in named]

    return lambda: [getattr(value, name, ABSENT) for name in names()], lambda: [f"{path}.{name}" for name in names()]
