"""``ShardedGrad``: ``.grad`` of a sharded parameter, whose norms and sums are those of the whole gradient.

torch's ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` compute a norm of each gradient, or look for Inf and
NaN. Programs log norms, means and extrema of ``.grad``, and of copies, views and products of ``.grad``. Over one rank's
shard these results would be wrong and differ between ranks. So they cover the shards of all ranks; a function for which
that is not defined raises. ``grad_reads.py`` says which function does what.
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
)
from .grad_reads import HANDLING, NORMS, Handling, refuse
from .over_ranks import whole
from .shard_info import ShardInfo, local_shape

__all__ = [
    "PlaceholderGrad",
    "ShardedGrad",
    "adopt_grad",
    "being_reduced",
    "changed_too_early",
    "make_part",
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


_PLAIN = Handling.PLAIN
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
    ``detach()``, ``data`` and views of all elements such as ``g.view(-1)``. A shard may become ``.grad``.

    **Norms and sums are global**, over the shards of all ranks, each element counted once: ``norm()``, ``torch.norm``,
    ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch._foreach_norm``, ``sum``, ``mean``, ``var``, ``std``,
    ``max``, ``min``, ``any``, ``all``, ``count_nonzero``, ``dot``, ``equal``, ``allclose``; and so are
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``. The results are plain tensors, equal on all ranks. Sums
    are in fp64 over all ranks of the outermost unit; the norm of an expert's gradient includes the experts that other
    ranks have at its place. These functions are collective: all ranks call them, in the same order. A list of norms
    takes one collective. The check for Inf and NaN of ``torch.amp.GradScaler`` is global too, so that all ranks skip
    the same steps.

    **Shapes are local**: ``shape`` and ``numel()`` are of the rank's own elements, and ``numel()`` may be 0;
    ``shard.shape`` is the parameter's shape.

    **Every other function raises** ``RuntimeError``: sums and norms along dims, norms of matrices, indices, transposes,
    matrix products, ``torch.cat``. ``full_tensor()`` is the whole gradient, ``to_local()`` the rank's elements.

    Element-wise functions in place change this tensor. Between microbatches, every function first waits for a reduction
    under way into this tensor. Within an optimizer's ``step`` every function but norms is local and returns plain
    tensors.

    A deep copy has memory of its own. Pickling raises ``TypeError``, because process groups cannot be pickled.
    """

    shard: ShardInfo
    sums: "Callable[[], _Sums | None] | None" = None
    """Weak reference to the ``GradShard`` of which this tensor is a view."""

    is_sparse = False  # optimizers read it of each gradient; an attribute saves a call into torch

    @staticmethod  # torch looks it up for each tensor of a list; a static method needs no binding
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if being_reduced:
            _arrive(args, kwargs)
        handling = HANDLING[func]
        if handling is not _PLAIN and func in NORMS:
            if func is _UNSCALE:
                _note_scaler(args[0])
            return NORMS[func](*args, **kwargs)
        if len(types) > 1 and torch.is_grad_enabled() and any(issubclass(each, nn.Parameter) for each in types):
            return NotImplemented  # the check of ShardedParameter decides
        if handling is _PLAIN or _step.optimizer is not None:
            return disabled_torch_function(func, types, args, kwargs)
        if handling is Handling.ELEMENTWISE:
            return _elementwise(func, types, args, kwargs)
        if isinstance(handling, Handling):
            refuse(_first(args, kwargs), _name_of(func))
        return handling(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """A shard of the same memory. Setting ``data`` copies the values, because reductions write into this memory."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        if data.shape != self.shape:
            raise RuntimeError(
                f".grad.data = ... of a sharded parameter: the gradient has this rank's elements alone ({self.shard}), "
                f"of shape {tuple(self.shape)}, and was given {tuple(data.shape)}"
            )
        with torch.no_grad():
            self.copy_(data)

    def to_local(self) -> Tensor:
        """A plain tensor of this rank's elements, in the same memory."""
        if being_reduced:
            _arrive((self,), {})
        return disabled_torch_function(Tensor.detach, (), (self,), {})  # type: ignore[no-any-return]

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor of the parameter's shape, on every rank. Collective."""
        return whole(self.to_local(), self.shard)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard}):\n{self.to_local()!r}"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedGrad":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copied = _as_shard(self.to_local().clone(), self.shard)
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


def _name_of(func: Any) -> str:
    if func.__name__ in ("__get__", "__set__", "__delete__"):  # of an attribute such as Tensor.T
        return f"Tensor.{getattr(func.__self__, '__name__', 'an attribute')}"
    return f"{func.__name__}()"


def _first(args: Any, kwargs: Any) -> "ShardedGrad":
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad))


# ---- Element-wise results. ----


def _elementwise(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on this rank's elements and mark the results as shards of the same elements."""
    if not func.__name__.startswith("_foreach"):
        like = _like(func, tree_leaves((args, kwargs)))
        found = disabled_torch_function(func, types, args, kwargs)
        return found if like is None else _marked(func, found, like)
    columns = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    likes = [_like(func, row) for row in zip(*columns, strict=True)]
    made = disabled_torch_function(func, types, args, kwargs)
    return [each if like is None else _marked(func, each, like) for each, like in zip(made, likes, strict=True)]


def _like(func: Any, given: Sequence[Any]) -> "ShardedGrad | None":
    """The first shard among ``given``; None if there is none. Shards of different elements are refused."""
    grads = [each for each in given if isinstance(each, ShardedGrad)]
    for other in grads[1:]:
        if not other.shard.is_same_shard(grads[0].shard):
            refuse(grads[0], f"{_name_of(func)} of shards of different elements, the other one {other.shard},")
    return grads[0] if grads else None


def _marked(func: Any, found: Any, like: "ShardedGrad") -> Any:
    if not isinstance(found, Tensor) or isinstance(found, ShardedGrad):
        return found
    with DisableTorchFunctionSubclass():
        if found.numel() != like.shard.numel:
            refuse(like, f"{_name_of(func)} that makes {tuple(found.shape)} of {tuple(like.shape)}")
        shares = found.untyped_storage()._cdata == like.untyped_storage()._cdata
    marked: ShardedGrad = make_subclass(type(like) if shares else ShardedGrad, found, False)
    marked.shard = like.shard
    if shares:
        marked.sums = like.sums
    return marked


def _as_shard(local: Tensor, info: ShardInfo) -> ShardedGrad:
    grad: ShardedGrad = make_subclass(ShardedGrad, local, False)
    grad.shard = info
    return grad


def make_sharded_grad(flat_view: Tensor, info: ShardInfo) -> ShardedGrad:
    """A sharded gradient in the memory of ``flat_view`` [end - start], with the same version counter."""
    if flat_view.shape != (info.numel,):
        raise ValueError(f"a shard of {info} is one dim of {info.numel}, got {tuple(flat_view.shape)}")
    return _as_shard(flat_view.view(local_shape(info)), info)


def make_part(flat_view: Tensor, info: ShardInfo) -> ShardedGrad:
    """What a ``ShownGrad`` of this shard reads: ``make_sharded_grad``, but flat unless it is the whole parameter."""
    return _as_shard(flat_view.view(info.shape if math.prod(info.shape) == info.numel else -1), info)


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
            f"whole gradient that is this rank's, grad.flatten()[param.shard.start : param.shard.end].view(param.shape)"
        )
    return grad if grad.requires_grad else _as_shard(grad, info)


class PlaceholderGrad(ShardedGrad):
    """``.grad`` between microbatches while the gradients are not reduced yet: zeros in the memory of one element.

    Setting ``.grad`` to None discards the iteration's gradients. Every other change of it raises ``RuntimeError``.
    """

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_"):
            changed = tree_leaves(args[0] if args else None)
            found = next((each for each in changed if isinstance(each, PlaceholderGrad)), None)
            if found is not None:
                raise RuntimeError(changed_too_early(found.shard))
        return ShardedGrad.__torch_function__(func, types, args, kwargs)


def make_placeholder_grads(params: Sequence[Any]) -> list[PlaceholderGrad]:
    """A placeholder for each of the sharded parameters ``params``, which have one dtype and device.

    All placeholders share one element.
    """
    zero = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    zeros: list[PlaceholderGrad] = []
    for param in params:
        grad: PlaceholderGrad = make_subclass(PlaceholderGrad, zero.expand(local_shape(param.shard)), False)
        grad.shard = param.shard
        zeros.append(grad)
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
