"""``ShardedGrad``: ``.grad`` of a sharded parameter, whose reads give the whole gradient's answer.

torch's ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` compute a norm of each gradient, or look for Inf and
NaN. Programs log means, extrema and histograms of ``.grad``, and of copies, views and products of ``.grad``. Over one
rank's shard these results would be wrong and differ between ranks. ``grad_reads.py`` says which function does what.
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    let_foreach_take,
    make_subclass,
    tree_leaves,
    tree_map,
)
from .grad_reads import NORMS, VIEWS, Handling, handling_of, name_of, refuse, shard_of, writes
from .over_ranks import whole
from .shard_info import ShardInfo, local_shape

__all__ = [
    "PlaceholderGrad",
    "ShardedGrad",
    "adopt_grad",
    "being_reduced",
    "changed_too_early",
    "make_placeholder_grads",
    "make_sharded_grad",
    "step_began",
    "step_ended",
]


class _Sums(Protocol):
    def arrive(self) -> None: ...
    def note_scaler(self) -> None: ...


being_reduced: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Each ``GradShard`` whose sums a reduction under way is about to change. Only between microbatches of an iteration."""


_UNSCALE: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)


class _Step(threading.local):
    optimizer: int | None = None
    """``id`` of the optimizer over shards that is in its step; of the outermost, if one steps within another."""


_step = _Step()


def step_began(optimizer: object) -> None:
    """An optimizer's step begins: results of functions on gradients are plain tensors until ``step_ended``."""
    if _step.optimizer is None:
        _step.optimizer = id(optimizer)


def step_ended(optimizer: object | None) -> None:
    """An optimizer's step is over. None: any step is over, also one that has raised."""
    if optimizer is None or _step.optimizer == id(optimizer):
        _step.optimizer = None


class ShardedGrad(Tensor):
    """This rank's shard of a gradient: ``.grad`` of a ``ShardedParameter``, and element-wise results of it.

    **Element-wise functions return shards**: ``g * 2``, ``g.abs()``, ``g.isnan()``, ``g.clone()``, ``g.float()``; so do
    ``detach()``, ``data`` and ``view(-1)``. A shard may become ``.grad``. A plain operand of this shard's shape is this
    rank's elements; of an operand in the parameter's shape, or one that broadcasts to it, the same elements are taken.

    **Norms cover all ranks of the outermost unit**, each element counted once: ``norm()``, ``torch.norm``,
    ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch._foreach_norm``; and so do
    ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and the check for Inf and NaN of ``torch.amp.GradScaler``, so
    that all ranks skip the same steps. The norm of an expert's gradient includes the experts that other ranks have at
    its place. A list of norms takes one collective.

    **Every other function runs on whole gradients**: sums, extrema, norms along dims, indices, transposes, matrix
    products, ``torch.cat``, ``item()``, ``numpy()``. Gradients are gathered one after the other; tensors beside them
    are used as they are. Results are plain, and equal on all ranks of the parameter's mesh. Functions in place that are
    not element-wise raise ``RuntimeError``, and so do writes to views of what was gathered, such as ``g[0].zero_()``.

    Norms and functions on whole gradients are collective: all ranks call them, in the same order.

    **Shapes are local**: ``shape`` and ``numel()`` are of the rank's own elements, and ``numel()`` may be 0;
    ``shard.shape`` is the parameter's shape. ``full_tensor()`` is the whole gradient, ``to_local()`` the rank's
    elements.

    Between microbatches, every function first waits for a reduction under way into this tensor. Within an optimizer's
    ``step`` every function but norms of all elements is local and returns plain tensors.

    A deep copy has memory of its own. Pickling raises ``TypeError``, because process groups cannot be pickled.
    """

    shard: ShardInfo
    whole_shape: tuple[int, ...] | None
    """The shape that all ranks' elements have together; one dim after ``view(-1)``. None: this shape is of this rank's
    elements alone, and there is no whole tensor."""
    sums: "Callable[[], _Sums | None] | None" = None
    """Weak reference to the ``GradShard`` of which this tensor is a view."""

    is_sparse = False  # optimizers read it of each gradient; an attribute saves a call into torch

    @staticmethod  # torch looks it up for each tensor of a list; a static method needs no binding
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if being_reduced:
            _arrive(args, kwargs)
        if func in NORMS:
            if func is _UNSCALE:
                _note_scaler(args[0])
            found = NORMS[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if len(types) > 1 and torch.is_grad_enabled() and any(issubclass(each, nn.Parameter) for each in types):
            return NotImplemented  # the check of ShardedParameter decides
        handling = handling_of(func)
        if handling is Handling.PLAIN or _step.optimizer is not None:
            return disabled_torch_function(func, types, args, kwargs)
        return (_elementwise if handling is Handling.ELEMENTWISE else _on_whole)(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """A shard of the same memory. Setting ``data`` copies the values, because reductions write into this memory."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        with torch.no_grad():
            self.copy_(adopt_grad(data, self.shard))

    def to_local(self) -> Tensor:
        """A plain tensor of this rank's elements, in the same memory."""
        if being_reduced:
            _arrive((self,), {})
        return disabled_torch_function(Tensor.detach, (), (self,), {})  # type: ignore[no-any-return]

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor of the parameter's shape, on every rank. Collective."""
        if self.whole_shape is None:
            refuse(self, f"A whole of {tuple(self.shape)}, which is of this rank's elements alone,")
        return whole(self.to_local(), self.shard)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard}):\n{self.to_local()!r}"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedGrad":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copied = _as_shard(self.to_local().clone(), self.shard, self.whole_shape)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded gradient is not pickled ({self.shard}): save grad.full_tensor(), or grad.to_local() for this "
            f"rank's elements alone; copy it by copy.deepcopy()"
        )


def _arrive(args: Any, kwargs: Any) -> None:
    """Wait for reductions into the sums of which the arguments are views."""
    for leaf in tree_leaves((args, kwargs)):
        sums = leaf.sums() if isinstance(leaf, ShardedGrad) and leaf.sums is not None else None
        if sums is not None:
            sums.arrive()


def _note_scaler(grads: Sequence[Tensor]) -> None:
    """Tell the sums of which the gradients are views: an optimizer is to step, unless the scaler skips its step."""
    for grad in grads:
        sums = grad.sums() if isinstance(grad, ShardedGrad) and grad.sums is not None else None
        if sums is not None:
            sums.note_scaler()


def _first(given: Any) -> "ShardedGrad":
    return next(leaf for leaf in tree_leaves(given) if isinstance(leaf, ShardedGrad))


# ---- Element-wise functions. ----


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on this rank's elements. Results are shards of the same elements; what it writes stays what it is."""
    name = func.__name__
    if name.startswith("_foreach_"):
        return _foreach(func, args, kwargs)
    if name in VIEWS:
        return _view(func, args, kwargs)
    values = [*args, *kwargs.values()]
    alone = not any(isinstance(each, Tensor) for each in values[1:])
    if alone and (name in ("max", "min") or (len(values) == 1 and name == "where")):  # of one tensor: no element-wise ones
        return _on_whole(func, args, kwargs)
    written = values[0] if writes(func) else kwargs.get("out")
    operands = values[:1] if name in ("to", "type_as") else values
    found = _local(func, operands, written)
    if found is None:
        return _on_whole(func, args, kwargs)
    like, local = found
    made = _local_call(func, [*local, *values[len(local) :]], kwargs)
    return made if like is None or written is not None else tree_map(lambda leaf: _marked(leaf, like), made)


def _local_call(func: Any, values: Sequence[Any], names: Any) -> Any:
    """``func`` as on plain tensors, with its positional arguments and behind them those called ``names``."""
    count = len(values) - len(names)
    return disabled_torch_function(func, (), tuple(values[:count]), dict(zip(names, values[count:], strict=True)))


def _foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """``_elementwise`` for each row of a function's lists."""
    values = [*args, *kwargs.values()]
    columns = [index for index, each in enumerate(values) if isinstance(each, list | tuple)]
    in_place = writes(func)
    if in_place and len(columns) == 1:
        return disabled_torch_function(func, (), args, kwargs)
    rows = list(zip(*(values[index] for index in columns), strict=True))
    found = [_local(func, row, row[0] if in_place else None) for row in rows]
    if None in found:  # one row after the other: whole gradients need memory
        made = [_with_rows(values, columns, [row]) for row in rows]
        made = [_on_whole(func, given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))) for given in made]
        return None if in_place else [each for row in made for each in row]
    made = _local_call(func, _with_rows(values, columns, [local for _, local in found]), kwargs)
    return made if in_place else [_marked(each, like) for each, (like, _) in zip(made, found, strict=True)]


def _with_rows(values: Sequence[Any], columns: Sequence[int], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """``values``, whose lists are replaced by those that consist of ``rows``."""
    lists = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    return [lists.get(index, each) for index, each in enumerate(values)]


def _local(func: Any, values: Sequence[Any], written: Any) -> tuple[Any, Sequence[Any]] | None:
    """The first shard among ``values``, and for each operand its elements that are this rank's.

    None where these do not give the result: it has another shape than the whole gradient, or ``written``, which
    ``func`` changes in place, is a whole tensor. Raises ``RuntimeError`` for shards of different elements.
    """
    like = next((each for each in values if isinstance(each, ShardedGrad)), None)
    if like is None or len(values) == 1:
        return like, values
    found = list(values)
    for index, each in enumerate(values):
        if isinstance(each, ShardedGrad):
            if not each.shard.is_same_shard(like.shard):
                refuse(like, f"{name_of(func)} of shards of different elements, the other one {each.shard},")
            if each.whole_shape != like.whole_shape or each.shape != like.shape:
                return None
        elif each is written and isinstance(each, Tensor):
            if like.shard.flat and each.shape == like.whole_shape:
                return None
            if each.shape != like.shape:
                refuse(like, f"{name_of(func)} of a tensor of another shape, {tuple(each.shape)},")
        elif isinstance(each, Tensor):
            found[index] = _part(each, like)
            if found[index] is None:
                return None
    return like, found


def _part(operand: Tensor, like: ShardedGrad) -> Tensor | None:
    """This rank's elements of a plain operand; None if it does not broadcast to the whole gradient's shape."""
    shape = like.whole_shape
    if operand.ndim == 0:
        return operand
    sizes = zip(reversed(operand.shape), reversed(shape or ()))
    fits = shape is not None and operand.ndim <= len(shape) and all(size in (1, whole) for size, whole in sizes)
    if operand.shape == like.shape and not (fits and like.shard.flat):
        return operand
    if not fits:
        return None
    return like.shard.cut(operand.expand(shape)).view(like.shape)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view, or a copy, of all elements in their order. The program gives the sizes of what it sees: see ``flat``."""

    def seen(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedGrad):
            return leaf
        return torch.empty(leaf.whole_shape if leaf.shard.flat else leaf.shape, dtype=leaf.dtype, device="meta")

    given_args, given = tree_map(seen, (args, kwargs))
    found = func(*given_args, **given)
    grad = next(iter((*args, *kwargs.values())))
    if not isinstance(grad, ShardedGrad):
        return found
    whole_shape, sizes = None, found.shape
    if found.ndim == 1:
        whole_shape, sizes = (math.prod(grad.shard.shape),), (-1,)
    elif found.shape == seen(grad).shape:
        whole_shape, sizes = grad.whole_shape, grad.shape
    if found.dtype is not grad.dtype or (whole_shape is None and grad.shard.flat):
        return _on_whole(func, args, kwargs)
    viewed = _marked(disabled_torch_function(Tensor.reshape, (), (grad, sizes), {}), grad)
    viewed.whole_shape = whole_shape
    return viewed


def _marked(found: Any, like: ShardedGrad | None) -> Any:
    """``found`` as a shard of the same elements as ``like``."""
    if like is None or not isinstance(found, Tensor) or isinstance(found, ShardedGrad):
        return found
    with DisableTorchFunctionSubclass():
        shares = found.untyped_storage()._cdata == like.untyped_storage()._cdata
    marked = _as_shard(found, like.shard, like.whole_shape, type(like) if shares else ShardedGrad)
    if shares:
        marked.sums = like.sums
    return marked


# ---- All other functions. ----


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on whole gradients. Raises ``RuntimeError`` where it would write to one of these copies."""
    if func is Tensor.__setitem__:
        grad, index, value = args
        if not isinstance(grad, ShardedGrad):
            if not _first(args).shard.flat:
                return disabled_torch_function(func, (), args, kwargs)
        elif getattr(index, "dtype", None) is torch.bool and index.shape in (grad.shape, grad.whole_shape):
            return grad.masked_fill_(index, value)
    for each in _written(func, args, kwargs):
        if isinstance(each, ShardedGrad):
            refuse(each, name_of(func))
    wholes: list[Tensor] = []

    def gathered(leaf: Any) -> Any:
        if shard_of(leaf) is None:
            return leaf
        wholes.append(leaf.full_tensor().view(leaf.whole_shape))
        return wholes[-1]

    args, kwargs = tree_map(gathered, (args, kwargs))
    return _as_views(func(*args, **kwargs), wholes, name_of(func))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What ``func`` changes in place."""
    return tree_leaves([args[0] if writes(func) else None, kwargs.get("out")])  # type: ignore[no-any-return]


class _GatheredView(Tensor):
    """A view of a gathered gradient, such as a row: to write to it would change no gradient, and raises."""

    of: str
    """The function that has made it."""

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in _written(func, args, kwargs):
            if isinstance(each, _GatheredView):
                raise RuntimeError(
                    f"{name_of(func)} would change a copy: {each.of} of a sharded gradient gives a view of the gathered "
                    f"one. Change gradients by element-wise functions in place, or set .grad to what is changed of "
                    f"grad.full_tensor()"
                )
        views: list[Any] = []

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, _GatheredView):
                return leaf
            views.append(leaf)
            return disabled_torch_function(Tensor.detach, (), (leaf,), {})

        args, kwargs = tree_map(plain, (args, kwargs))
        return _as_views(func(*args, **kwargs), views, views[0].of)


def _as_views(found: Any, wholes: Sequence[Tensor], of: str) -> Any:
    """Mark the results that are views of ``wholes``."""

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf._is_view() or leaf.untyped_storage()._cdata not in storages:
            return leaf
        view: _GatheredView = make_subclass(_GatheredView, leaf, False)
        view.of = of
        return view

    with DisableTorchFunctionSubclass():
        storages = {each.untyped_storage()._cdata for each in wholes}
        return tree_map(marked, found)


# ---- What is made a shard. ----


def _as_shard(
    local: Tensor, info: ShardInfo, whole_shape: tuple[int, ...] | None, kind: type[ShardedGrad] = ShardedGrad
) -> ShardedGrad:
    grad: ShardedGrad = make_subclass(kind, local, False)
    grad.shard, grad.whole_shape = info, whole_shape
    return grad


def make_sharded_grad(flat_view: Tensor, info: ShardInfo, *, has_whole: bool = True) -> ShardedGrad:
    """A sharded gradient in the memory of ``flat_view`` [end - start], with the same version counter.

    has_whole  all ranks' elements together are a tensor of ``info.shape``
    """
    if flat_view.shape != (info.numel,):
        raise ValueError(f"a shard of {info} is one dim of {info.numel}, got {tuple(flat_view.shape)}")
    return _as_shard(flat_view.view(local_shape(info)), info, info.shape if has_whole else None)


def adopt_grad(grad: Any, info: ShardInfo) -> Any:
    """What is stored when ``grad`` is set as ``.grad`` of the shard ``info``: a plain tensor becomes a ``ShardedGrad``.

    Raises ``RuntimeError`` if the shape is not the shard's, or if ``grad`` is a shard of other elements.
    """
    if isinstance(grad, ShardedGrad):
        if grad.shard is info or grad.shard.is_same_shard(info):
            return grad
        raise RuntimeError(f".grad of a sharded parameter ({info}) was given a shard of other elements: {grad.shard}")
    if not isinstance(grad, Tensor) or isinstance(grad, nn.Parameter):
        return grad
    if grad.shape != local_shape(info):
        raise RuntimeError(
            f".grad of a sharded parameter has this rank's elements alone ({info}), of shape {local_shape(info)}, and "
            f"was given {tuple(grad.shape)}: change it in place by element-wise functions, or give it the part of a "
            f"whole gradient that is this rank's, param.shard.cut(grad).view(param.shape)"
        )
    return grad if grad.requires_grad else _as_shard(grad, info, info.shape)


class PlaceholderGrad(ShardedGrad):
    """``.grad`` between microbatches while the gradients are not reduced yet: zeros in the memory of one element.

    Setting ``.grad`` to None discards the iteration's gradients. Every other change of it raises ``RuntimeError``.
    """

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = tree_leaves(args[0]) if writes(func) else ()
        found = next((each for each in changed if isinstance(each, PlaceholderGrad)), None)
        if found is not None:
            raise RuntimeError(changed_too_early(found.shard))
        return ShardedGrad.__torch_function__(func, types, args, kwargs)


def make_placeholder_grads(params: Sequence[Any]) -> list[PlaceholderGrad]:
    """A placeholder for each of the sharded parameters ``params``, which have one dtype and device.

    All placeholders share one element.
    """
    zero = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    zeros: list[Any] = []
    for param in params:
        local = zero.expand(local_shape(param.shard))
        zeros.append(_as_shard(local, param.shard, param.shard.shape, PlaceholderGrad))
    return zeros


def changed_too_early(info: ShardInfo) -> str:
    """The error message for a change of ``.grad`` between an iteration's microbatches."""
    return (
        f".grad of parameter '{info.name}' was changed in the middle of an iteration, when gradients of earlier "
        f"microbatches are not in it yet: clip, scale and zero gradients after the last backward, or give the "
        f"iteration up by zero_grad(set_to_none=True) of all parameters"
    )


# torch.nn.utils.clip_grad_norm_ computes all norms in one call only for classes in torch's list of foreach types.
let_foreach_take(ShardedGrad)
