"""``ModelWatch``: notices what a program changes in a wrapped model, in each forward and before gradients are reduced.

A program may change its model at any moment: behind a forward that has no backward, between two microbatches, between
forward and backward. So the checks depend on no earlier check. A model that is unchanged is found so by comparing lists
of objects, in a sixth of the time of the full checks.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from ..gathers.waiting_params import registered_params
from ..torch_internals import DisableTorchFunctionSubclass
from .bucket_params import BucketParam
from .checks import check_no_stranger

__all__ = ["ModelWatch", "ModuleTables"]

_state_of = attrgetter("requires_grad", "dtype", "device")


class ModelWatch:
    """Compares a model with what it was when it was wrapped.

    bucket_params  the parameters that are trained, and reduced
    module         the wrapped model
    """

    def __init__(self, bucket_params: Sequence[BucketParam], module: nn.Module) -> None:
        self._bucket_params = bucket_params
        self._module = module
        self._seen: _Seen | None = None  # None: no full check has passed yet

    def check_forward(self) -> None:
        """In a forward that builds a graph. Raise ``RuntimeError`` that names a changed parameter.

        Once gradients of this iteration are written, a frozen parameter keeps its own, as in plain PyTorch. Before, it
        would be reduced as zero.
        """
        frozen = self._find_frozen()
        if frozen and not any(entry.record.written for entry in self._bucket_params):
            frozen[0].refuse_frozen()

    def check_launch(self) -> None:
        """Before the first reduction that a backward launches. A program may unfreeze parameters until the last."""
        self._find_frozen()

    def check_sync(self) -> None:
        """Before all reductions are launched: a frozen parameter without a gradient would be reduced as zero."""
        for entry in self._find_frozen():
            if not entry.record.written:
                entry.refuse_frozen()

    def _find_frozen(self) -> list[BucketParam]:
        """The trained parameters that are frozen now. Raises for all other changes."""
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            if self._seen is not None and self._seen.holds():
                return []
            for entry in self._bucket_params:
                entry.check()
            check_no_stranger(self._module)
            frozen = [entry for entry in self._bucket_params if not entry.owned.param.requires_grad]
            if not frozen:
                modules = list(self._module.modules())
                # TorchScript's modules make their tables anew with each read: they are checked in full each time.
                scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
                self._seen = None if scripted else _Seen(modules)
        return frozen


class ModuleTables:
    """``_parameters`` and ``_modules`` of some modules: what these register, in one list that is compared quickly."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[Any] = []
        for module in modules:
            self._tables += (registered_params(module), module._modules)

    def entries(self) -> list[Any]:
        """All parameters and modules that are registered now. No value is read, so that no gather is waited for."""
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def hold(self, entries: Sequence[Any]) -> bool:
        """Whether the modules still register these objects, in this order."""
        now = self.entries()
        return len(now) == len(entries) and all(map(is_, now, entries))


class _Seen:
    """A wrapped model as it was when a full check passed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = ModuleTables(modules)
        self._entries = self._tables.entries()
        self._params = [entry for entry in self._entries if isinstance(entry, Tensor)]
        self._states = [*map(_state_of, self._params)]

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        return self._tables.hold(self._entries) and [*map(_state_of, self._params)] == self._states
