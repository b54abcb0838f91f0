"""``ShardedGrad``: ``.grad`` of a sharded parameter, whose reads give the whole gradient's answer.

torch's ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` compute a norm of each gradient, or look for Inf and
NaN. Over one rank's shard these results would be wrong and differ between ranks. Means, extrema and rows would be too:
they are refused, and computed from ``full_tensor()``. ``grad_reads.py`` says which function does what.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from .grad_reads import NORMS, on_elements, reads_nothing, writes
from .over_ranks import ShardInfo, local_shape, whole

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
    def wait(self) -> None: ...
    def record_scaler(self) -> None: ...


being_reduced: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Each ``GradShard`` whose sums a reduction under way is about to change. Only between microbatches of an iteration."""


_UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_


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
    ``detach()`` and ``data``. A shard may become ``.grad``. A plain operand of this shard's shape is this
    rank's elements; of an operand in the parameter's shape, or one that broadcasts to it, the same elements are taken.

    **Norms cover all ranks of the outermost unit**, each element counted once: ``norm()``, ``torch.norm``,
    ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch._foreach_norm``; and so do
    ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and the check for Inf and NaN of ``torch.amp.GradScaler``, so
    that all ranks skip the same steps. The norm of an expert's gradient includes the experts that other ranks have at
    its place. A list of norms takes one collective.

    **Every other function raises** ``RuntimeError``: sums, extrema, norms along dims, indices, views, transposes,
    matrix products, ``torch.cat``, ``item()``, ``numpy()``. Take ``full_tensor()`` for them, the whole gradient.

    Norms and ``full_tensor()`` are collective: all ranks call them, in the same order.

    **Shapes are local**: ``shape`` and ``numel()`` are of the rank's own elements, and ``numel()`` may be 0;
    ``shard.shape`` is the parameter's shape. ``to_local()`` is a plain tensor of the rank's elements.

    Between microbatches, every function first waits for a reduction under way into this tensor. Within an optimizer's
    ``step`` every function but norms of all elements is local and returns plain tensors.

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
            _arrive((args, kwargs))
        if func in NORMS:
            for sums in _live_sums(args[0]) if func is _UNSCALE else ():
                sums.record_scaler()  # an optimizer is to step, unless the scaler skips its step
            found = NORMS[func](func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if len(types) > 1 and torch.is_grad_enabled() and any(issubclass(each, nn.Parameter) for each in types):
            return NotImplemented  # the check of ShardedParameter decides
        if _step.optimizer is not None or reads_nothing(func):
            return disabled_torch_function(func, types, args, kwargs)
        return on_elements(func, args, kwargs)

    def marked(self, found: Any) -> Any:
        """``found``, if it is a plain tensor, as a shard of the same elements."""
        if not isinstance(found, Tensor) or isinstance(found, ShardedGrad):
            return found
        with DisableTorchFunctionSubclass():
            shares = found.untyped_storage()._cdata == self.untyped_storage()._cdata
        marked = _as_shard(found, self.shard, type(self) if shares else ShardedGrad)
        if shares:
            marked.sums = self.sums
        return marked

    @property
    def data(self) -> Tensor:
        """A shard of the same memory, with the same version counter. Setting it copies the values: reductions write
        into this memory."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        with torch.no_grad():
            self.copy_(data)

    def to_local(self) -> Tensor:
        """A plain tensor of this rank's elements, in the same memory."""
        if being_reduced:
            _arrive(self)
        return disabled_torch_function(Tensor.detach, (), (self,), {})  # type: ignore[no-any-return]

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor of the parameter's shape, on every rank. Collective."""
        if not self.shard.has_whole:
            raise RuntimeError(
                f"full_tensor() of {self.shard}, which are this rank's elements alone: take grad.to_local(), or the "
                f"gradients of the model's parameters"
            )
        return whole(self.to_local(), self.shard)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard}):\n{self.to_local()!r}"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded gradient is not pickled ({self.shard}): save grad.full_tensor(), or grad.to_local()"
        )


def _live_sums(given: Any) -> "Iterator[_Sums]":
    """The sums of which tensors in ``given`` are views."""
    for leaf in tree_leaves(given):
        sums = leaf.sums() if isinstance(leaf, ShardedGrad) and leaf.sums is not None else None
        if sums is not None:
            yield sums


def _arrive(given: Any) -> None:
    """Wait for reductions into the sums of which the arguments are views."""
    for sums in _live_sums(given):
        sums.wait()


def _as_shard(local: Tensor, info: ShardInfo, kind: type[ShardedGrad] = ShardedGrad) -> ShardedGrad:
    grad: ShardedGrad = make_subclass(kind, local, False)
    grad.shard = info
    return grad


def make_sharded_grad(flat_view: Tensor, info: ShardInfo) -> ShardedGrad:
    """A sharded gradient in the memory of ``flat_view`` [end - start], with the same version counter."""
    return _as_shard(flat_view.view(local_shape(info)), info)


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
    return grad if grad.requires_grad else _as_shard(grad, info)


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


def make_placeholder_grads(params: Sequence[Any]) -> list[ShardedGrad]:
    """A placeholder for each of the sharded parameters ``params``, which have one dtype and device.

    All placeholders share one element.
    """
    zero = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    shards: list[ShardInfo] = [param.shard for param in params]
    return [_as_shard(zero.expand(local_shape(each)), each, PlaceholderGrad) for each in shards]


def changed_too_early(info: ShardInfo) -> str:
    """The error message for a change of ``.grad`` between an iteration's microbatches."""
    return (
        f".grad of parameter '{info.name}' was changed in the middle of an iteration, when gradients of earlier "
        f"microbatches are not in it yet: clip, scale and zero gradients after the last backward, or give the "
        f"iteration up by zero_grad(set_to_none=True) of all parameters"
    )


# torch.nn.utils.clip_grad_norm_ computes all norms in one call only for classes in torch's list of foreach types.
let_foreach_take(ShardedGrad)
