"""Gives parameters their accumulators and hooks, clears iteration state on them, and removes all of it at the end."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ..buckets.bucket_params import BucketParam
from ..buckets.iteration_ends import discard_iteration, forget_model, record_model
from ..collectives.rank_grid import RankGrid
from ..contract.main_grad import detach, forget_failed_backward
from ..contract.module import listen_to_foreign_delays
from ..contract.record import GradRecord
from ..torch_grads.optimizer import clear_exposed_grad, guard_stock_optimizers
from ..torch_grads.shown_grad import ShownGrad
from ..torch_internals import DisableTorchFunctionSubclass
from .around_module import AroundModule
from .dropped import forget_dropped, mark_dropped

__all__ = ["attach_params", "detach_params", "discard_grads"]


class _Attached(NamedTuple):
    """One parameter, its record, and the modules that register it. Weak: a dropped model is freed at once."""

    param: TensorWeakRef
    record: GradRecord
    owners: "tuple[weakref.ref[nn.Module], ...]"


def attach_params(
    wrapper: AroundModule,
    bucket_params: Sequence[BucketParam],
    hooks: Sequence[RemovableHandle],
    grids: Mapping[str, RankGrid],
) -> "weakref.finalize[Any, Any]":
    """Give every parameter its accumulator, while ``wrapper`` lives.

    hooks  the parameters' hooks, which are removed when the accumulators are
    grids  the ranks: among several ranks a model whose wrapper was freed refuses to train

    Returns the finalizer of ``wrapper``, which takes everything back; ``detach_params`` runs it earlier.
    """
    attached: list[_Attached] = []
    for entry in bucket_params:
        owners = [module for module, _ in entry.owned.owners]
        listen_to_foreign_delays(entry.owned.param, entry.record, owners)
        entry.bucket.attach(entry.owned.param, entry.record)
        forget_dropped(entry.owned.param, owners)
        references = tuple(weakref.ref(module) for module in owners)
        attached.append(_Attached(TensorWeakRef(entry.owned.param), entry.record, references))
    guard_stock_optimizers(wrapper)
    record_model(wrapper.module)
    dropped = any(grid.size > 1 for grid in grids.values())
    end = weakref.finalize(wrapper, _take_back, attached, hooks, weakref.ref(wrapper.module), dropped=dropped)
    end.atexit = False
    return end


def detach_params(end: "weakref.finalize[Any, Any]") -> None:
    """Take everything back now, for ``unwrap``; ``end`` is the result of ``attach_params``."""
    pending = end.detach()
    if pending is not None:
        _take_back(*pending[2], dropped=False)


def discard_grads(bucket_params: Iterable[BucketParam], ended: nn.Module | None) -> None:
    """Clear what an iteration left on parameters: flags of a backward that failed, and ``.grad`` that is not shown.

    ended  the model, where its gradients were reduced: watchers are told that they are gone
    """
    with DisableTorchFunctionSubclass():  # no values are read, so no gather is waited for
        for entry in bucket_params:
            forget_failed_backward(entry.owned.param)
            entry.owned.param.grad = None
    if ended is not None:
        discard_iteration(ended)


def _take_back(
    attached: Sequence[_Attached],
    hooks: Sequence[RemovableHandle],
    model: "weakref.ref[nn.Module]",
    *,
    dropped: bool,
) -> None:
    for hook in hooks:
        hook.remove()
    if (alive := model()) is not None:
        forget_model(alive)
    for entry in attached:
        param = entry.param()
        if param is None:
            continue
        if entry.record.exposed:
            clear_exposed_grad(param, entry.record)
        with DisableTorchFunctionSubclass():
            if isinstance(param.grad, ShownGrad):
                param.grad = None
        detach(param, gone=entry.record.name)
        if dropped:
            owners = [module for owner in entry.owners if (module := owner()) is not None]
            mark_dropped(param, entry.record.name, owners)
