"""What a wrapper attaches to a model, and takes back; and ``AroundModule``, through which a model is read.

``attach_params`` gives parameters their accumulators and hooks. ``discard_grads`` clears iteration state on them.

When a wrapper is freed its parameters become plain. Among several ranks, the modules that register them then refuse to
train until the model is wrapped again, since no gradient would be reduced, and each rank would train alone. After
``unwrap`` they train.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ..buckets.bucket import BucketParam
from ..buckets.iteration_ends import discard_iteration, forget_model, record_model
from ..collectives.rank_grid import RankGrid, world_size
from ..contract.main_grad import detach, forget_failed_backward, former_name
from ..contract.module import listen_to_foreign_delays
from ..contract.record import GradRecord
from ..contract.torch_wrappers import check_not_collected, check_not_inside, in_torch_ddp
from ..torch_grads.optimizer import clear_exposed_grad, guard_stock_optimizers
from ..torch_grads.shown_grad import ShownGrad
from ..torch_internals import DisableTorchFunctionSubclass

__all__ = ["AroundModule", "attach_params", "detach_params", "discard_grads"]


class _Attached(NamedTuple):
    """One parameter, its record, and the modules that register it. Weak: a dropped model is freed at once."""

    param: TensorWeakRef
    record: GradRecord
    owners: "tuple[weakref.ref[nn.Module], ...]"


def attach_params(
    wrapper: "AroundModule",
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
        listen_to_foreign_delays(entry.owned.param, entry.record, entry.owned.owners)
        entry.bucket.attach(entry.owned.param, entry.record)
        _allow_training(owners)
        references = tuple(weakref.ref(module) for module in owners)
        attached.append(_Attached(TensorWeakRef(entry.owned.param), entry.record, references))
    guard_stock_optimizers()
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
        for owner in entry.owners if dropped else ():
            module = owner()
            if module is not None and _refuse_to_train not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_refuse_to_train)


def _refuse_to_train(module: nn.Module, args: Any) -> None:
    """The forward pre-hook. A module-level function, so that modules with it can be copied and pickled."""
    if not torch.is_grad_enabled():
        return
    mine = [param for param in module._parameters.values() if param is not None and former_name(param) is not None]
    if not mine:  # wrapped again since, or a copy
        _allow_training([module])
        return
    if in_torch_ddp() or world_size() == 1:
        return
    for param in mine:
        if param.requires_grad:
            raise RuntimeError(
                f"parameter '{former_name(param)}' was wrapped in maingrad.ddp.DistributedDataParallel, and the "
                f"wrapper was let go: each rank would train this {type(module).__name__} by itself; keep the wrapper "
                f"and call it, or wrap again. Where ranks are to part, call the wrapper's unwrap() before letting it go"
            )


def _allow_training(modules: Iterable[nn.Module]) -> None:
    """A wrapper reduces the gradients of these modules' parameters again."""
    for module in modules:
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _refuse_to_train]:
            del hooks[key]


# ---- Attributes of the model, read and written through the wrapper.


_OURS = "a model in maingrad.ddp.DistributedDataParallel"


class AroundModule(nn.Module):
    """Reads and writes attributes of ``self.module`` that the wrapper lacks: ``model.config``, ``model.generate()``.

    The wrapper's own names come first; then ``model.module.name`` reads the module's. Python's own names (``__len__``,
    ``__array__``) are not passed through, so the wrapper is no container where its module is one.
    """

    module: nn.Module
    bucket_params: Sequence[BucketParam]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """``nn.Module.named_parameters``. Raises where torch's wrapper calls."""
        check_not_collected((entry.owned.param for entry in self.bucket_params), _OURS)
        return super().named_parameters(*args, **kwargs)

    def check_not_in_torch_ddp(self) -> None:
        """Raise ``RuntimeError`` inside torch's ``DistributedDataParallel``, which would reduce the same gradients."""
        check_not_inside((entry.owned.param for entry in self.bucket_params), _OURS)

    def __getattr__(self, name: str) -> Any:
        """Python calls this for missing attributes, and after a property raised ``AttributeError``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")  # None inside __init__ and while unpickling
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property of the wrapper: raise its error again
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute in the module if only the module has it, else here."""
        if "_made" in self.__dict__ and not self._has(name) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, unwrapped copy of the model: what the wrapper adds stays with the original."""
        return copy.deepcopy(self.module, memo)

    def _has(self, name: str) -> bool:
        """Whether the wrapper has the attribute itself. ``dir()`` would list and sort them all at each setting."""
        own = self.__dict__
        tables = own["_parameters"], own["_buffers"], own["_modules"]
        return name in own or hasattr(type(self), name) or any(name in table for table in tables)

    def _end_making(self) -> None:
        """From here on attributes may be set in the module; before, all are set here."""
        self.__dict__["_made"] = True
