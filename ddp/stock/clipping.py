"""What keeps ``torch.nn.utils.clip_grad_norm_`` and its kin from silently clipping nothing.

They take parameters and skip those whose ``.grad`` is None, as that of ours is until ``expose_grads()``: the norm would
be 0, and the step unclipped. And where experts have ranks of their own, the norm would be another on each rank.

torch has no hook for them, and programs import them by name, many before this library: another function in their place
would not be called. But each is a shell that looks up the function that does the work in its closure, at every call.
The check goes in there, once for the process.

``get_total_norm`` takes gradients: where there are none, it cannot know of whom.
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
"""Wrappers and sharded units that are alive. torch's functions are the process's, and so is this."""


def guard_stock_clipping(wrapper: object) -> None:
    """Refuse to clip gradients that were not exposed, for as long as ``wrapper`` lives."""
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
    """The same object, with the check in its closure; None where it is no such shell."""
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
            parameters = given or parameters  # torch warns of an empty generator, which this one is by now
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
