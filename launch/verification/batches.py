"""A batch: nested tuples, lists and mappings whose tensors have the rows of the batch in dim 0."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...ddp.torch_internals import tree_leaves, tree_map

__all__ = ["count_rows", "cut", "own_copy", "part_of_tokens", "to_double"]


def count_rows(batch: Any) -> int:
    """Rows of the batch: size of dim 0 of its first tensor that has dims. Raises ``ValueError`` if there is none."""
    for each in tree_leaves(batch):
        if isinstance(each, Tensor) and each.dim() > 0:
            return each.size(0)
    raise ValueError(
        f"the batch, a {type(batch).__name__}, has no tensor with rows: pass a tensor, or a tuple, list or mapping of "
        f"tensors whose dim 0 is the batch"
    )


def cut(batch: Any, rows: int, start: int, end: int) -> Any:
    """Rows [start, end) of a batch of ``rows``. Tensors of another dim 0 belong to no row and stay whole.

    A list of ``rows`` entries without tensors (strings) is cut as well.
    """

    def has_rows(each: Any) -> bool:
        if isinstance(each, Tensor):
            return each.dim() > 0 and each.size(0) == rows
        is_list = isinstance(each, list) and len(each) == rows
        return is_list and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(each))

    return tree_map(lambda each: each[start:end] if has_rows(each) else each, batch, is_leaf=has_rows)


def part_of_tokens(batch: Any, part: int, parts: int) -> Any:
    """The ``part``-th of ``parts`` equal parts of each row: of all tensors with as many tokens, in dim 1, as the first.

    Raises ``ValueError`` for a number of tokens that does not divide.
    """
    length = next((x.size(1) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim() > 1), 0)
    if not length or length % parts:
        raise ValueError(f"rows of {length} tokens cannot be divided over {parts} context-parallel ranks")

    def own(each: Any) -> Any:
        has_tokens = isinstance(each, Tensor) and each.dim() > 1 and each.size(1) == length
        return each.chunk(parts, 1)[part] if has_tokens else each

    return tree_map(own, batch)


def own_copy(batch: Any) -> Any:
    """The same batch in memory of its own, on the CPU, without a graph. A mapping becomes a dict."""

    def copied(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.detach().to("cpu", copy=True).requires_grad_(each.requires_grad)
        return copy.copy(each)

    return tree_map(copied, dict(batch) if isinstance(batch, Mapping) else batch)


def to_double(batch: Any) -> Any:
    """The batch with floating-point tensors in fp64."""
    return tree_map(
        lambda each: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each, batch
    )
