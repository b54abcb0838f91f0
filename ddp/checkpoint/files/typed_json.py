"""Reads and writes values of the manifest, and checks that each value has the type that belongs in its place.

JSON holds numbers, strings and lists. A dtype is stored as its name; a tensor of one element as its value and dtype.
"""

import dataclasses
import functools
import reprlib
import types
import typing
from typing import Any

import torch
from torch import Tensor

__all__ = ["dtype_name", "from_json", "structured", "to_json"]


def structured(kind: Any, value: Any, what: str) -> Any:
    """A value of JSON as ``kind``: a dataclass or NamedTuple of such, a dict, a tuple, a dtype, or a plain type.

    There are no conversions: JSON's true is no number. Raises ``TypeError``, and ``ValueError`` for what no dtype is
    called; ``what`` names the value in the error. Further keys are left out.
    """
    inner = typing.get_args(kind)
    if kind is Any or (value is None and type(None) in inner):
        return value
    if isinstance(kind, types.UnionType):
        return structured(inner[0], value, what)
    if kind is torch.dtype:
        return _dtype_named(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints, content = _hints(kind), _expect(dict, value, what)
        fields = {name: structured(hint, content[name], f"{what}.{name}") for name, hint in hints.items()}
        try:
            return kind(**fields)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    if hasattr(kind, "_fields"):
        pairs = zip(_hints(kind).values(), _expect(list, value, what), strict=True)
        return kind(*(structured(hint, each, what) for hint, each in pairs))
    if typing.get_origin(kind) is dict:
        return {key: structured(inner[1], each, f"{what}['{key}']") for key, each in _expect(dict, value, what).items()}
    if typing.get_origin(kind) is tuple:
        return tuple(structured(inner[0], each, what) for each in _expect(list, value, what))
    return _expect(kind, value, what)


_hints = functools.cache(typing.get_type_hints)


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
