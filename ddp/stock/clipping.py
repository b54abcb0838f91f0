"""Refuses ``torch.nn.utils.clip_grad_norm_`` and similar functions where they would clip nothing.

These functions skip parameters whose ``.grad`` is None. Ours is None until ``expose_grads()``, so the norm would be 0.
Where experts have ranks of their own, each rank would compute another norm.

torch has no hook for clipping. Programs import the functions by name, often before this library, so a replaced function
would not be called. But each function is a wrapper that reads the working function from its closure at every call. The
check is put into that closure, once for the process.

``get_total_norm`` takes gradients and not parameters, so it cannot be checked.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..contract.main_grad import record_of
from ..contract.record import GradRecord
from .master_param import MasterParameter

__all__ = ["guard_stock_clipping"]

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_")

_guarding: weakref.WeakSet[Any] = weakref.WeakSet()
"""Wrappers and sharded units that are alive. Global, as torch's functions are."""


def guard_stock_clipping(wrapper: object) -> None:
    """Refuse to clip gradients that were not exposed, while ``wrapper`` lives."""
    _guard_once()
    _guarding.add(wrapper)


@functools.cache
def _guard_once() -> None:
    checked: dict[Any, Any] = {}
    for place in (torch.nn.utils.clip_grad, torch.nn.utils):
        for name in _NAMES:
            function = vars(place).get(name)
            if function is None or function in checked.values():
                continue
            if function not in checked:
                checked[function] = _with_check_inside(function) or _with_check(function)
            setattr(place, name, checked[function])


def _with_check_inside(shell: Any) -> Any:
    """``shell`` itself, with the check in its closure; None where its closure has another form."""
    if getattr(getattr(shell, "__code__", None), "co_freevars", ()) != ("func",):
        return None
    (cell,) = shell.__closure__
    cell.cell_contents = _with_check(cell.cell_contents)
    return shell


def _with_check(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def check_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _guarding:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            _check(given, clip.__name__.lstrip("_"))
            parameters = given or parameters  # the list above has used a generator up; torch warns of an empty one
        return clip(parameters, *args, **kwargs)

    return check_and_clip


def _check(parameters: Iterable[Tensor], name: str) -> None:
    for parameter in parameters:
        if isinstance(parameter, MasterParameter):
            raise RuntimeError(
                f"{name} over the tensors of a DistributedOptimizer's param_groups, which have no .grad: nothing would "
                f"be clipped; give the optimizer max_grad_norm=, or call maingrad.ddp.clip_grad_norm(model, max_norm)"
            )
        record = record_of(parameter)
        if record is not None and not record.exposed:
            _refuse_unexposed(record, name)
        if record is not None and record.sliced and name == "clip_grad_norm_":
            raise RuntimeError(
                f"clip_grad_norm_: parameter '{record.name}' is a slice of tensor parallelism (tensor_model_parallel = "
                f"True), and each rank would clip by the norm of its own slices; compute the norm over the "
                f"tensor-parallel ranks too, and call torch.nn.utils.clip_grads_with_norm_"
            )
        if record is not None and record.all_ranks is not None and name == "clip_grad_norm_":
            raise RuntimeError(
                f"clip_grad_norm_: parameter '{record.name}' is an expert that other ranks do not hold, so that each "
                f"rank would clip by another norm; call maingrad.ddp.clip_grad_norm(model, max_norm) in its place, "
                f"before expose_grads(), or after scaler.unscale_(optimizer)"
            )


def _refuse_unexposed(record: GradRecord, name: str) -> None:
    if record.make_room is not None:
        raise RuntimeError(
            f"{name}: parameter '{record.name}' is whole for the time of a forward, of unshard() or of unsharded(), "
            f"and its gradient is in this rank's shard; call it outside of them, on model.parameters()"
        )
    if record.written or record.pending:
        raise RuntimeError(
            f"{name}: the gradient of parameter '{record.name}' is in main_grad, not in .grad, so it would count as 0 "
            f"and stay as it is; call model.finish_grad_sync() and model.expose_grads() first. With "
            f"DistributedOptimizer, which needs no exposing: its max_grad_norm=, or maingrad.ddp.clip_grad_norm(model, "
            f"max_norm); to clip values, clamp each of model.reduced_grads() in place"
        )
