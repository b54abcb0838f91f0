"""Reads and writes values of the manifest, and checks that each value has the type that belongs in its place.

JSON holds numbers, strings and lists. A dtype is stored as its name; a tensor of one element as its value and dtype.
"""

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["dtype_name", "from_json", "structured", "to_json"]


def structured(kind: Any, value: Any, what: str) -> Any:
    """A value of JSON as ``kind``: a dataclass or NamedTuple of such, a dict, a tuple, a dtype, or a plain type.

    There are no conversions: JSON's true is no number. Raises ``TypeError``, and ``ValueError`` for what no dtype is
    called; ``what`` names the value in the error. Further keys are left out.
    """
    return _reader_of(kind)(value, what)


@functools.cache
def _reader_of(kind: Any) -> Callable[[Any, str], Any]:
    """``structured`` for one kind. A manifest has many values of few kinds, so that each kind is looked at once."""
    if kind is Any:
        return lambda value, what: value
    if kind is torch.dtype:
        return lambda value, what: _dtype_named(value)
    inner = [_reader_of(each) for each in typing.get_args(kind) if each not in (None, ...)]
    if isinstance(kind, types.UnionType):
        return lambda value, what: None if value is None else inner[0](value, what)
    origin = typing.get_origin(kind)
    if origin is dict:
        return lambda value, what: {
            key: inner[1](each, f"{what}['{key}']") for key, each in _expect(dict, value, what).items()
        }
    if origin is tuple:
        return lambda value, what: tuple([inner[0](each, what) for each in _expect(list, value, what)])
    if hasattr(kind, "_fields"):
        items = [_reader_of(hint) for hint in typing.get_type_hints(kind).values()]
        return lambda value, what: kind(
            *(read(each, what) for read, each in zip(items, _expect(list, value, what), strict=True))
        )
    if dataclasses.is_dataclass(kind):
        return _reader_of_dataclass(kind)
    return lambda value, what: _expect(kind, value, what)


def _reader_of_dataclass(kind: Any) -> Callable[[Any, str], Any]:
    readers = {name: _reader_of(hint) for name, hint in typing.get_type_hints(kind).items()}

    def read(value: Any, what: str) -> Any:
        content = _expect(dict, value, what)
        fields = {name: reader(content[name], f"{what}.{name}") for name, reader in readers.items()}
        try:
            return kind(**fields)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    return read


def _expect(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{reprlib.repr(value)} as {what}")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """Without ``torch.``: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _dtype_named(name: Any) -> torch.dtype:
    dtype = getattr(torch, _expect(str, name, "a dtype"), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{reprlib.repr(name)} is no dtype")
    return dtype


def to_json(value: Any, what: str) -> Any:
    """A hyperparameter or scalar state as a value of JSON.

    Takes None, numbers, strings, tensors of one element, and lists and tuples of these. Raises ``ValueError`` for
    anything else; ``what`` names the value in the error.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(each, what) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    raise ValueError(f"{what} is a {type(value).__name__}, which a checkpoint cannot hold as JSON")


def from_json(value: Any) -> Any:
    """The value that ``to_json`` was given; tensors are on the CPU, lists come back as tuples."""
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if isinstance(value, dict):
        if not isinstance(value["tensor"], bool | int | float):
            raise TypeError(f"{reprlib.repr(value['tensor'])} as the value of a tensor")
        return torch.tensor(value["tensor"], dtype=_dtype_named(value["dtype"]), device="cpu")
    return value
