"""Gradients of sharded parameters: shards that say so, whichever way they are read.

torch's own ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` ask each gradient for a norm, or whether it has
Inf or NaN; programs log norms, means and extrema of ``.grad``, of copies, views and products of it. Here the answer
covers the shards of all ranks, and so is equal on all of them, or there is none and an error says why.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ...ddp.torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    let_foreach_take,
    make_subclass,
    tree_leaves,
)
from .grad_reads import KINDS, NORMS, Kind, refuse
from .over_ranks import whole
from .shard_info import ShardInfo, local_shape

if TYPE_CHECKING:
    from .parameter import ShardedParameter

__all__ = [
    "HeldGrad",
    "ShardedGrad",
    "adopt_grad",
    "changed_too_early",
    "in_flight",
    "make_held_grads",
    "make_sharded_grad",
    "step_began",
    "step_ended",
]


class _Sums(Protocol):
    def arrive(self) -> None: ...


in_flight: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Sums (``GradShard``) that a reduction under way is about to change: between an iteration's microbatches."""


_PLAIN = Kind.PLAIN


class _Step(threading.local):
    optimizer: int | None = None
    """The id of the optimizer over shards that is in its step, the outermost one."""


_step = _Step()


def step_began(optimizer: object) -> None:
    """From here on what is made of gradients is plain: the class has said what its update depends on."""
    if _step.optimizer is None:
        _step.optimizer = id(optimizer)


def step_ended(optimizer: object | None) -> None:
    """Until here; None: also where a step has raised."""
    if optimizer is None or _step.optimizer == id(optimizer):
        _step.optimizer = None


class ShardedGrad(Tensor):
    """This rank's shard of a gradient: ``.grad`` of a ``ShardedParameter``, of the same shape, and what is made of it.

    **Element-wise functions give shards**: ``g * 2``, ``g.abs()``, ``g.isnan()``, ``g.clone()``, ``g.float()``; so do
    ``detach()``, ``data`` and views of all elements, ``g.view(-1)``. Such a tensor may become ``.grad``.

    **Norms and sums are global**, over the shards of all ranks, each element counted once: ``norm()``, ``torch.norm``,
    ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch._foreach_norm``, ``sum``, ``mean``, ``var``, ``std``,
    ``max``, ``min``, ``any``, ``all``, ``count_nonzero``, ``dot``, ``equal``, ``allclose``; and so are
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``. Sums are of fp64, over all ranks of the outermost unit:
    the norm of an expert, whose unit has a mesh of its own, is that of all ranks' experts at its place. They are
    collective: all ranks call them, in the same order; a list of norms costs one. So is the check for Inf and NaN of
    ``torch.amp.GradScaler``, which then skips alike on all ranks. They return plain tensors.

    **Shapes are local**: ``shape`` and ``numel()`` are those of the rank's own elements, of which there may be none;
    ``shard.shape`` is the parameter's.

    **All else raises** ``RuntimeError``: sums and norms along some dims, norms of matrices, indices, transposes,
    products of matrices, ``torch.cat``. ``full_tensor()`` is the whole gradient, ``to_local()`` the rank's elements.

    In place, element-wise functions change this one. Between an iteration's microbatches whatever is done to it comes
    after the reductions under way. Within an optimizer's ``step`` all but norms is local and plain.

    A deep copy is a shard of its own memory. It is not pickled, as its process groups cannot be.
    """

    shard: ShardInfo
    sums: "Callable[[], _Sums | None] | None" = None
    """Weakly, what it shows a part of."""

    is_sparse = False  # optimizers ask each gradient: no call into torch for that

    @staticmethod  # torch looks it up for each tensor of a list: nothing is bound
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_flight:
            _arrive(args, kwargs)
        kind = KINDS[func]
        if kind is not _PLAIN and func in NORMS:
            return NORMS[func](*args, **kwargs)
        if len(types) > 1 and torch.is_grad_enabled() and any(issubclass(each, nn.Parameter) for each in types):
            return NotImplemented  # the parameter has something to say about that
        if kind is _PLAIN or _step.optimizer is not None:
            return disabled_torch_function(func, types, args, kwargs)
        if kind is Kind.ELEMENTWISE:
            return _elementwise(func, types, args, kwargs)
        if isinstance(kind, Kind):
            refuse(_first(args, kwargs), _name_of(func))
        return kind(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """A shard of the same memory. Setting it writes the values: the reductions have the memory."""
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
        """A plain tensor of this rank's elements, in the same memory: whatever is read of it is local."""
        if in_flight:
            _arrive((self,), {})
        return disabled_torch_function(Tensor.detach, (), (self,), {})  # type: ignore[no-any-return]

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor, of the parameter's shape, on every rank. Collective."""
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
    for leaf in tree_leaves((args, kwargs)):
        sums = leaf.sums() if isinstance(leaf, ShardedGrad) and leaf.sums is not None else None
        if sums is not None:
            sums.arrive()


def _name_of(func: Any) -> str:
    if func.__name__ in ("__get__", "__set__", "__delete__"):  # of Tensor.T, say
        return f"Tensor.{getattr(func.__self__, '__name__', 'an attribute')}"
    return f"{func.__name__}()"


def _first(args: Any, kwargs: Any) -> "ShardedGrad":
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad))


# ---- Element-wise results. ----


def _elementwise(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of this rank's elements; the result is a shard of the same ones."""
    if not func.__name__.startswith("_foreach"):
        like = _like(func, tree_leaves((args, kwargs)))
        found = disabled_torch_function(func, types, args, kwargs)
        return found if like is None else _marked(func, found, like)
    columns = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    likes = [_like(func, row) for row in zip(*columns, strict=True)]
    made = disabled_torch_function(func, types, args, kwargs)
    return [each if like is None else _marked(func, each, like) for each, like in zip(made, likes, strict=True)]


def _like(func: Any, given: Sequence[Any]) -> "ShardedGrad | None":
    """The shard among these, all of which are of the same elements."""
    grads = [each for each in given if isinstance(each, ShardedGrad)]
    for other in grads[1:]:
        if other.shard[1:4] != grads[0].shard[1:4]:
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
    """The sharded gradient that is ``flat_view`` [end - start]: it shares the memory and the version counter."""
    if flat_view.shape != (info.numel,):
        raise ValueError(f"a shard of {info} is one dim of {info.numel}, got {tuple(flat_view.shape)}")
    return _as_shard(flat_view.view(local_shape(info)), info)


def adopt_grad(grad: Any, info: ShardInfo) -> Any:
    """What becomes ``.grad`` of the shard ``info``: a plain tensor of its elements is a shard from then on.

    Raises ``RuntimeError`` for one of another shape, and for a shard of other elements.
    """
    if isinstance(grad, ShardedGrad):
        if grad.shard is info or grad.shard[1:4] == info[1:4]:
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


class HeldGrad(ShardedGrad):
    """``.grad`` while an iteration's gradients are elsewhere: zeros that have the memory of one element.

    To set ``.grad`` to None gives the iteration up; whatever else would change it raises ``RuntimeError``.
    """

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_"):
            changed = tree_leaves(args[0] if args else None)
            found = next((each for each in changed if isinstance(each, HeldGrad)), None)
            if found is not None:
                raise RuntimeError(changed_too_early(found.shard))
        return ShardedGrad.__torch_function__(func, types, args, kwargs)


def make_held_grads(params: "Sequence[ShardedParameter]") -> list[HeldGrad]:
    """Zeros in the shape of each shard, of one dtype on one device: all of them are one element."""
    zero = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    zeros: list[HeldGrad] = []
    for param in params:
        grad: HeldGrad = make_subclass(HeldGrad, zero.expand(local_shape(param.shard)), False)
        grad.shard = param.shard
        zeros.append(grad)
    return zeros


def changed_too_early(info: ShardInfo) -> str:
    """The error of who changes ``.grad`` between an iteration's microbatches."""
    return (
        f".grad of parameter '{info.name}' was changed in the middle of an iteration, when gradients of earlier "
        f"microbatches are not in it yet: clip, scale and zero gradients after the last backward, or give the "
        f"iteration up by zero_grad(set_to_none=True) of all parameters"
    )


# torch.nn.utils.clip_grad_norm_ asks for all norms at once for the classes in this list alone, else for one at a time.
let_foreach_take(ShardedGrad)
