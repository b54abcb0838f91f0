"""A batch: nested tuples, lists and mappings whose tensors have the rows of the batch in dim 0."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["count_rows", "cut", "own_copy", "to_double"]


def count_rows(batch: Any) -> int:
    """Rows of the batch: size of dim 0 of its first tensor that has dims. Raises ``ValueError`` if there is none."""
    for tensor in _tensors(batch):
        if tensor.dim() > 0:
            return tensor.size(0)
    raise ValueError(
        f"the batch, a {type(batch).__name__}, has no tensor with rows: pass a tensor, or a tuple, list or mapping of "
        f"tensors whose dim 0 is the batch"
    )


def cut(batch: Any, rows: int, start: int, end: int) -> Any:
    """Rows [start, end) of a batch of ``rows``. Tensors of another dim 0 belong to no row and stay whole.

    A list of ``rows`` entries without tensors (strings) is cut as well.
    """
    if isinstance(batch, Mapping):
        return {key: cut(value, rows, start, end) for key, value in batch.items()}
    if isinstance(batch, list) and len(batch) == rows and not any(True for _ in _tensors(batch)):
        return batch[start:end]
    if isinstance(batch, tuple | list):
        return _like(batch, [cut(value, rows, start, end) for value in batch])
    return _map(batch, lambda each: each[start:end] if each.dim() > 0 and each.size(0) == rows else each)


def own_copy(batch: Any) -> Any:
    """The same batch in memory of its own, on the CPU, without a graph."""
    return _map(batch, lambda tensor: tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad))


def to_double(batch: Any) -> Any:
    """The batch with floating-point tensors in fp64."""
    return _map(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed. A mapping becomes a dict, as a model takes it by keyword."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return _like(batch, [_map(value, change) for value in batch])
    return copy.copy(batch)


def _like(batch: Any, values: list[Any]) -> Any:
    """A tuple or list of the class of ``batch``; a NamedTuple takes its values one by one."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
