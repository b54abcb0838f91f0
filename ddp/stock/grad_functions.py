"""torch's functions on sharded gradients: element-wise ones on this rank's elements, all others on whole gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    make_subclass,
    tree_leaves,
    tree_map,
)
from .grad_reads import VIEWS, name_of, refuse, shard_of, writes

__all__ = ["on_elements", "on_whole"]


def on_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on this rank's elements. Results are shards of the same elements; what it writes keeps its class."""
    name = func.__name__
    if name in VIEWS:
        return _view(func, args, kwargs)
    values = [*args, *kwargs.values()]
    if name.startswith("_foreach_"):
        columns = [index for index, each in enumerate(values) if isinstance(each, list | tuple)]
        if len(columns) > 1:
            return _by_rows(func, values, kwargs, columns)
        made = disabled_torch_function(func, (), args, kwargs)
        grads = values[columns[0]]
        return made if writes(func) else [_marked(each, [grad]) for each, grad in zip(made, grads, strict=True)]
    one_tensor = not any(isinstance(each, Tensor) for each in values[1:])
    if (name in ("max", "min") and one_tensor) or (name == "where" and len(values) == 1):
        return on_whole(func, args, kwargs)
    written = values[0] if writes(func) else kwargs.get("out")
    local = values if name in ("to", "type_as") else _local(func, values, written)
    if local is None:
        return on_whole(func, args, kwargs)
    named = dict(zip(kwargs, local[len(args) :], strict=True))
    made = disabled_torch_function(func, (), tuple(local[: len(args)]), named)
    if isinstance(made, bool):  # equal, allclose: on all ranks
        return bool(torch.full_like(_first(values), made, dtype=torch.bool).all())
    return made if written is not None else tree_map(lambda leaf: _marked(leaf, values), made)


def _by_rows(func: Any, values: Sequence[Any], kwargs: Any, columns: Sequence[int]) -> Any:
    """A function of several lists, one row after the other: what is gathered for a row needs memory."""
    made = []
    for row in zip(*(values[index] for index in columns), strict=True):
        local = _local(func, row, row[0] if writes(func) else None)
        lists = {index: [each] for index, each in zip(columns, local or row, strict=True)}
        given = [lists.get(index, each) for index, each in enumerate(values)]
        count = len(values) - len(kwargs)
        args, named = tuple(given[:count]), dict(zip(kwargs, given[count:], strict=True))
        found = on_whole(func, args, named) if local is None else disabled_torch_function(func, (), args, named)
        if not writes(func):
            made.append(found[0] if local is None else _marked(found[0], row))
    return made if made else None


def _local(func: Any, values: Sequence[Any], written: Any) -> Sequence[Any] | None:
    """This rank's elements of each operand.

    None where these do not give the result: it has another shape than the whole gradient, or ``written``, which
    ``func`` changes in place, is a whole tensor. Raises ``RuntimeError`` for shards of different elements.
    """
    like = _first(values)
    if like is None or len(values) == 1:
        return values
    found = list(values)
    for index, each in enumerate(values):
        if shard_of(each) is not None:
            if not each.shard.is_same_shard(like.shard):
                refuse(like, f"{name_of(func)} of shards of different elements, the other one {each.shard},")
            if each.whole_shape != like.whole_shape or each.shape != like.shape:
                return None
        elif isinstance(each, Tensor) and each is written:
            if like.shard.flat and each.shape == like.whole_shape:
                return None
            if each.shape != like.shape:
                refuse(like, f"{name_of(func)} of a tensor of another shape, {tuple(each.shape)},")
        elif isinstance(each, Tensor):
            found[index] = _part(each, like)
            if found[index] is None:
                return None
    return found


def _part(operand: Tensor, like: Any) -> Tensor | None:
    """This rank's elements of a plain operand; None if it does not broadcast to the whole gradient's shape."""
    if operand.ndim == 0:
        return operand
    shape = like.whole_shape or ()
    sizes = zip(reversed(operand.shape), reversed(shape))  # noqa: B905
    fits = operand.ndim <= len(shape) and all(size in (1, whole) for size, whole in sizes)
    if operand.shape == like.shape and not (fits and like.shard.flat):
        return operand
    return like.shard.cut(operand.expand(shape)).view(like.shape) if fits else None


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view, or a copy, of all elements in their order. The program gives the sizes of what it sees: see ``flat``."""

    def seen(leaf: Any) -> Any:
        if shard_of(leaf) is None:
            return leaf
        return torch.empty(leaf.whole_shape if leaf.shard.flat else leaf.shape, dtype=leaf.dtype, device="meta")

    values, (seen_args, seen_kwargs) = [*args, *kwargs.values()], tree_map(seen, (args, kwargs))
    grad, found = values[0], func(*seen_args, **seen_kwargs)
    if shard_of(grad) is None:
        return found
    whole_shape, sizes = None, found.shape
    if found.ndim == 1:
        whole_shape, sizes = (math.prod(grad.shard.shape),), (-1,)
    elif found.shape == seen(grad).shape:
        whole_shape, sizes = grad.whole_shape, grad.shape
    if found.dtype is not grad.dtype or (whole_shape is None and grad.shard.flat):
        return on_whole(func, args, kwargs)
    viewed = _marked(disabled_torch_function(Tensor.reshape, (), (grad, sizes), {}), values)
    viewed.whole_shape = whole_shape
    return viewed


def _first(given: Any) -> Any:
    """The first shard; None without one."""
    return next((leaf for leaf in tree_leaves(given) if shard_of(leaf) is not None), None)


def _marked(found: Any, given: Any) -> Any:
    """``found`` as a shard of the same elements as the shard in ``given``."""
    like = _first(given)
    return found if like is None else like.marked(found)


# ---- Functions of whole gradients. ----


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on whole gradients. Raises ``RuntimeError`` where it would write to one of these copies."""
    if func.__name__ == "dot" and not kwargs:  # its operands may be this rank's elements
        return torch.mul(*args).sum()
    if func is Tensor.__setitem__:
        grad, index, value = args
        if shard_of(grad) is None:
            if not _first(args).shard.flat:
                return disabled_torch_function(func, (), args, kwargs)
        elif getattr(index, "dtype", None) is torch.bool and index.shape in (grad.shape, grad.whole_shape):
            return grad.masked_fill_(index, value)
    for each in _written(func, args, kwargs):
        if shard_of(each) is not None:
            refuse(each, name_of(func))
    wholes: list[Tensor] = []

    def gathered(leaf: Any) -> Any:
        if shard_of(leaf) is None:
            return leaf
        wholes.append(leaf.full_tensor().view(leaf.whole_shape))
        return wholes[-1]

    args, kwargs = tree_map(gathered, (args, kwargs))
    return _as_views(func(*args, **kwargs), wholes)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What ``func`` changes in place."""
    return tree_leaves([args[0] if writes(func) else None, kwargs.get("out")])  # type: ignore[no-any-return]


class _GatheredView(Tensor):
    """A view of a gathered gradient, such as a row: to write to it would change no gradient, and raises."""

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, _GatheredView) for each in _written(func, args, kwargs)):
            raise RuntimeError(
                f"{name_of(func)} would change a copy: rows, transposes and other views of a sharded gradient are of "
                f"the gathered one. Change gradients by element-wise functions in place, or change "
                f"grad.full_tensor() and put it, or this rank's part of it, into .grad"
            )
        views: list[Any] = []

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, _GatheredView):
                return leaf
            views.append(leaf)
            return disabled_torch_function(Tensor.detach, (), (leaf,), {})

        args, kwargs = tree_map(plain, (args, kwargs))
        return _as_views(func(*args, **kwargs), views)


def _as_views(found: Any, wholes: Sequence[Tensor]) -> Any:
    """Mark the results that are views of ``wholes``."""

    def marked(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf._is_view() and leaf.untyped_storage()._cdata in storages
        return make_subclass(_GatheredView, leaf, False) if is_view else leaf

    with DisableTorchFunctionSubclass():
        storages = {each.untyped_storage()._cdata for each in wholes}
        return tree_map(marked, found)
