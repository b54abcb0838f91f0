"""Stock optimizers (those of ``torch.optim``): gradients are exposed to them as ``.grad``.

Gradients live in ``main_grad``, and ``.grad`` has no memory. A hook that torch runs before every optimizer's step
finishes the reduction, and makes ``.grad`` plain tensors.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..contract.main_grad import record_of
from ..contract.record import GradRecord
from ..torch_internals import weak_method

__all__ = [
    "PER_PARAMETER",
    "after_closure",
    "clear_exposed_grad",
    "expose_grad",
    "guard_stock_optimizers",
    "prepare_skippable_step",
]

PER_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)
"""Classes whose update of a parameter depends on this parameter's gradient and state alone."""


def expose_grad(param: Tensor, record: GradRecord, dtype: torch.dtype) -> Tensor:
    """Set ``.grad`` to the reduced gradient in ``dtype``: the accumulator's memory where dtype and strides fit.

    For a dtype other than the parameter's, ``Tensor.grad_dtype`` tells torch to allow any: the program may put a
    gradient of the parameter's own dtype in its place.
    """
    param.grad = None
    if dtype is not param.dtype:
        param.grad_dtype = None
    # Fused optimizers go through parameter and gradient in memory order, so both must have the same strides.
    same = record.view.dtype is dtype and record.view.stride() == param.stride()
    # detach(): a user's ``.grad.data = ...`` must not replace the memory of record.view.
    grad = (
        record.view.detach() if same else torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(record.view)
    )
    param.grad = grad
    record.exposed = True
    return grad


def clear_exposed_grad(param: Tensor, record: GradRecord) -> None:
    """Undo ``expose_grad``: the next backward must not accumulate into the exposed tensor."""
    param.grad = None
    if param.grad_dtype is not param.dtype:
        param.grad_dtype = param.dtype
    record.exposed = False


@functools.cache
def guard_stock_optimizers() -> None:
    """Before steps over parameters of wrappers, expose their gradients.

    One hook serves all wrappers and is never removed: a wrapper may be freed while torch iterates over the hooks.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    ours = _records_of(optimizer)
    if not ours:
        return None
    if "zero_grad" not in vars(optimizer):
        _have_main_grad_cleared(optimizer)
    prepare_skippable_step(optimizer)
    begin = functools.partial(_begin, optimizer, ours)
    with_closure = after_closure(args, kwargs, begin)
    if with_closure is None:
        begin()
    return with_closure


def after_closure(
    args: Any, kwargs: Any, then: Callable[[], None], first: Callable[[], None] | None = None
) -> tuple[Any, Any] | None:
    """The arguments of a step whose closure calls ``first`` before and ``then`` after itself; None without closure.

    args, kwargs  of ``step``; the optimizer comes first
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked() -> Any:
        if first is not None:
            first()
        loss = closure()
        then()
        return loss

    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def _begin(optimizer: Optimizer, ours: Sequence[GradRecord]) -> None:
    """A step begins to read gradients. If the step has a closure, the closure has computed them before."""
    for record in ours:
        if record.updater is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): parameter '{record.name}' is updated by the DistributedOptimizer "
                f"that was built over its model, and both would take a step with one gradient; step that one alone, "
                f"or build none over this wrapper"
            )
    per_parameter = isinstance(optimizer, PER_PARAMETER) or getattr(optimizer, "per_parameter", False)
    for parts in _parts_of(ours):
        if per_parameter:
            parts.refuse_slices(type(optimizer).__name__, ours)
        parts.begin_stock_step(vars(optimizer).get("found_inf"))


def _have_main_grad_cleared(optimizer: Optimizer) -> None:
    """From its first step on, this optimizer's ``zero_grad`` discards what backwards under ``no_sync`` have left.

    After these ``.grad`` is None, so that nothing shows in ``.grad`` that the program clears it. torch has no hook for
    ``zero_grad``: it is replaced on this instance, as learning-rate schedulers replace ``step``.
    """

    def zero_grad(live: Optimizer, set_to_none: bool = True) -> None:
        ours = _records_of(live)
        for parts in _parts_of(ours):
            parts.clear_hidden(ours)
        type(live).zero_grad(live, set_to_none)

    optimizer.zero_grad = weak_method(zero_grad, optimizer)  # type: ignore[method-assign]


def _parts_of(records: Sequence[GradRecord]) -> list[Any]:
    """The ``Parts`` of the wrappers that reduce these gradients."""
    references = {id(record.parts): record.parts for record in records}
    return [parts for reference in references.values() if (parts := reference()) is not None]


def _records_of(optimizer: Optimizer) -> list[GradRecord]:
    records = (record_of(param) for group in optimizer.param_groups for param in group["params"])
    return [record for record in records if record is not None]


# ---- SGD's momentum under a loss scaler, where the device may skip the first step.
#
# With a scaler, a fused kernel reads ``found_inf`` on the device and skips its update; the host does not know. torch's
# SGD allocates the momentum buffer in its first step by ``empty_like``, for the kernel to write. If the device skips
# that step, the buffer keeps uninitialised memory, and the next step takes that for momentum.
#
# Here the buffer ``b`` starts as zeros, so the first step that is not skipped computes ``momentum * 0 + g = g``. With
# dampening ``d`` that is not enough: torch's first step sets ``b = g``, and later ones ``b = momentum * b + (1 - d)
# g``. So the host reads ``found_inf`` in each step until one is taken, and the buffers of a skipped step are deleted.
#
# Other fused optimizers of torch start their state as zeros, and undo their step count.

_MOMENTUM = "momentum_buffer"


@torch.no_grad()
def prepare_skippable_step(optimizer: Optimizer) -> None:
    """Call right before each step of an optimizer.

    The host reads nothing from the device, but for a first step with dampening, which no graphed step captures.
    """
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    if (
        not isinstance(optimizer, SGD)
        or found_inf is None
        or not all(group["fused"] for group in optimizer.param_groups)
    ):
        return
    begun = _without_momentum(optimizer)
    if any(begun.values()) and found_inf.item():
        _delete_after_step(optimizer, [param for param, dampened in begun.items() if dampened])
    for param, dampened in begun.items():
        if not dampened:
            optimizer.state[param][_MOMENTUM] = torch.zeros_like(param, requires_grad=False)


def _delete_after_step(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """The step that comes now is skipped: what it allocates stays unwritten."""

    def delete(optimizer: Optimizer, *_: Any) -> None:
        handle.remove()
        for param in params:
            del optimizer.state[param][_MOMENTUM]

    handle: RemovableHandle = optimizer.register_step_post_hook(delete)


def _without_momentum(optimizer: Optimizer) -> dict[Tensor, bool]:
    """Parameters of groups that need momentum and have none, and whether the group has dampening.

    torch raises for groups of which only some parameters have momentum.
    """
    found: dict[Tensor, bool] = {}
    for group in optimizer.param_groups:
        if group["momentum"] != 0:
            stepping = [param for param in group["params"] if param.grad is not None]
            if all(optimizer.state[param].get(_MOMENTUM) is None for param in stepping):
                found |= dict.fromkeys(stepping, group["dampening"] != 0)
    return found
