"""Reads and writes values of the manifest, and checks that each value has the type that belongs in its place.

JSON holds numbers, strings and lists. A dtype is stored as its name; a tensor of one element as its value and dtype.
"""

import math
import reprlib
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["dtype_name", "dtype_named", "expect", "from_json", "shape_from_json", "to_json"]

_MOST_DIMS = 64

T = TypeVar("T")


def expect(wanted: type[T], value: Any, what: str) -> T:
    """``value``, if it has exactly this type (JSON's true is no number). Raises ``TypeError``."""
    if type(value) is not wanted:
        raise TypeError(f"{reprlib.repr(value)} as {what}")
    return value


def shape_from_json(sizes: Any, name: str) -> tuple[int, ...]:
    """The shape of the tensor ``name``. Raises ``TypeError`` or ``ValueError`` for a shape that no tensor can have."""
    shape = tuple(expect(int, size, f"a size of '{name}'") for size in expect(list, sizes, f"the shape of '{name}'"))
    if len(shape) > _MOST_DIMS or min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= 2**62:
        raise ValueError(f"'{name}' has shape {reprlib.repr(shape)}")
    return shape


def dtype_name(dtype: torch.dtype) -> str:
    """Without ``torch.``: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of this name. Raises ``TypeError`` or ``ValueError`` for anything else."""
    dtype = getattr(torch, expect(str, name, "a dtype"), None)
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
