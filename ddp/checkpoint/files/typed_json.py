"""Reads and writes values of the manifest, and checks that each value has the type that belongs in its place.

JSON holds numbers, strings and lists. A dtype is stored as its name; a tensor of one element as its value and dtype.
"""

import reprlib
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["dtype_name", "dtype_named", "from_json", "integers", "to_json", "typed"]

T = TypeVar("T")


def typed(kind: type[T], value: Any) -> T:
    """``value`` of JSON, if it is of this type. There are no conversions: JSON's true is no number."""
    if type(value) is not kind:
        raise TypeError(f"{reprlib.repr(value)} in place of a {kind.__name__}")
    return value


def integers(value: Any) -> tuple[int, ...]:
    """A list of JSON, of integers."""
    return tuple([typed(int, each) for each in typed(list, value)])


def dtype_name(dtype: torch.dtype) -> str:
    """Without ``torch.``: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The dtype that ``dtype_name`` gives this name."""
    dtype = getattr(torch, typed(str, name), None)
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
        return torch.tensor(value["tensor"], dtype=dtype_named(value["dtype"]), device="cpu")
    return value
