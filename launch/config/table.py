"""A table of a configuration: its class says the range of each key in the key's type."""

import dataclasses
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import torch

from .error import require

__all__ = ["Count", "Natural", "NotNegative", "Positive", "Range", "Share", "Table", "at_most", "require_defaults"]


class Range(NamedTuple):
    """A part of an ``Annotated`` type: which values a key may have."""

    holds: Callable[[Any], bool]
    remedy: str


def at_most(most: int) -> Range:
    """The largest value of a key."""
    return Range(lambda value: value <= most, f"must be at most {most}")


Count = Annotated[int, Range(lambda value: value >= 1, "must be at least 1")]
Natural = Annotated[int, Range(lambda value: value >= 0, "must not be negative")]
Positive = Annotated[float, Range(lambda value: value > 0.0, "must be positive")]
NotNegative = Annotated[float, Range(lambda value: value >= 0.0, "must not be negative")]
Share = Annotated[float, Range(lambda value: 0.0 <= value < 1.0, "must lie in [0, 1)")]


class Table:
    """Base of the dataclasses. Each raises ``ConfigError`` for impossible values when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for limit in _ranges(hint):
                values = value if isinstance(value, tuple) else [value]
                self.require(all(limit.holds(each) for each in values if each is not None), name, limit.remedy)
        self.check()

    def check(self) -> None:
        """What several keys must be together."""

    def dtype(self, name: str) -> Any:
        """The dtype of torch that the key ``name`` names; None where it names none."""
        value = getattr(self, name)
        return None if value is None else getattr(torch, value)

    def require(self, condition: bool, name: str, remedy: str) -> None:
        """Raise ``ConfigError`` with the key's path and value, unless ``condition`` holds."""
        table = type(self).__name__.removesuffix("Config").lower()
        require(condition, f"{table}.{name}", getattr(self, name), remedy)


def require_defaults(table: Any, key: str, names: Iterable[str], remedy: str) -> None:
    """Raise ``ConfigError`` for one of the fields ``names`` that has another value than its default.

    key  of the table in the file
    """
    defaults = {entry.name: entry.default for entry in dataclasses.fields(table)}
    for name in names:
        require(getattr(table, name) == defaults[name], f"{key}.{name}", getattr(table, name), remedy)


def _ranges(hint: Any) -> list[Range]:
    """The ranges in a type, those of its members too: ``Count | None``, ``tuple[Share, Share]``."""
    own = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)]
    return own + [each for member in typing.get_args(hint) for each in _ranges(member)]
