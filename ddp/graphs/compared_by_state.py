"""``ComparedByState``: objects that are equal where their class and all attributes are.

Copies of weights, compiled code and graphs that were made under one recipe serve every equal one. A dataclass compares
its fields alone: not what a subclass without the decorator sets in ``__init__``, nor fields with ``compare=False``.
"""

import dataclasses
from typing import Any

from torch import Tensor

__all__ = ["ComparedByState"]

_STATE = "_compared"
_CACHES = frozenset((_STATE, "_specs"))


class ComparedByState:
    """Base class. The first comparison or ``seal`` takes the attributes, and none can be set after it.

    Raises ``TypeError`` for a subclass that defines ``__eq__`` or ``__hash__``, and for attributes that may change in
    place (lists, dicts, sets, arrays).
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__eq__", "__hash__"):
            ours = getattr(ComparedByState, name)
            if vars(cls).get(name) not in (None, ours):
                raise TypeError(
                    f"{cls.__name__} defines {name}: recipes are equal where their class and all attributes are, and "
                    f"graphs and kept weights of one serve the other; leave it out"
                )
            setattr(cls, name, ours)  # of the class itself: a dataclass then makes none

    def seal(self) -> tuple[tuple[str, Any], ...]:
        """The attributes, which stay as they are from now on."""
        found: tuple[tuple[str, Any], ...] | None = self.__dict__.get(_STATE)
        if found is None:
            found = self.__dict__[_STATE] = _state_of(self)
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and isinstance(other, ComparedByState) and self.seal() == other.seal()

    def __hash__(self) -> int:
        return hash((type(self), self.seal()))

    def __setattr__(self, name: str, value: Any) -> None:
        if _STATE in self.__dict__:
            raise _fixed(self, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _STATE in self.__dict__:
            raise _fixed(self, name)
        super().__delattr__(name)


def _fixed(recipe: object, name: str) -> dataclasses.FrozenInstanceError:
    return dataclasses.FrozenInstanceError(
        f"{type(recipe).__name__}.{name} was changed after the recipe was used, and what was computed under it would "
        f"stay: make another recipe"
    )


def _state_of(recipe: object) -> tuple[tuple[str, Any], ...]:
    names = {name for name in vars(recipe) if name not in _CACHES}
    for cls in type(recipe).__mro__:
        slots = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    names = {name for name in names - {"__dict__", "__weakref__"} if hasattr(recipe, name)}  # a slot may be unset
    values = {name: getattr(recipe, name) for name in sorted(names)}
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{type(recipe).__name__}.{name} is a {type(value).__name__}, which may change in place, and nobody "
                f"would see that what was computed under the recipe is no more right: use a tuple, or another value "
                f"that has a hash"
            ) from None
    return tuple((name, _comparable(value)) for name, value in values.items())


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):  # equal to itself alone: tuples compare the numbers first, and then the same object
        return id(value), value
    return tuple(map(_comparable, value)) if type(value) is tuple else value
