"""Gives parameters their accumulators and hooks, clears what iterations leave on them, and takes all of it back."""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from .grad_record import GradRecord
from .main_grad import attach, check_unattached, detach, forget_failed_backward
from .readiness import Readiness
from .stock_optimizer import clear_exposed_grad, guard_stock_optimizers
from .wiring import WiredParam

__all__ = ["attach_params", "discard_grads"]


def attach_params(wrapper: object, wired: Sequence[WiredParam], readiness: Readiness) -> None:
    """Give every parameter its accumulator and its hook, for as long as ``wrapper`` lives.

    Raises ``ValueError`` for a parameter that belongs to another provider, before the first is touched.
    """
    # Back edges (hook -> readiness) are weak: a model that is let go frees its memory without the collector.
    handles: list[RemovableHandle] = []
    params: list[tuple[TensorWeakRef, GradRecord]] = []
    for entry in wired:
        check_unattached(entry.owned.param, entry.record.name)
    for entry in wired:
        param, record = entry.owned.param, entry.record
        attach(param, record)
        handles.append(param.register_post_accumulate_grad_hook(readiness.grad_hook(entry.bucket, record)))
        readiness.expect_delayed(entry)
        params.append((TensorWeakRef(param), record))
    guard_stock_optimizers(wrapper)
    weakref.finalize(wrapper, _detach_params, handles, params).atexit = False


def discard_grads(wired: Iterable[WiredParam]) -> None:
    """Clear what an iteration left on parameters: the flag of a backward that failed, ``.grad`` that was exposed or put
    there by hand."""
    with torch._C.DisableTorchFunctionSubclass():  # no value is read: nobody needs to wait for a gather
        for entry in wired:
            forget_failed_backward(entry.owned.param)
            clear_exposed_grad(entry.owned.param, entry.record)
            entry.owned.param.grad = None


def _detach_params(handles: list[RemovableHandle], params: list[tuple[TensorWeakRef, GradRecord]]) -> None:
    for handle in handles:
        handle.remove()
    for reference, record in params:
        param = reference()
        if param is not None:
            clear_exposed_grad(param, record)
            detach(param)
