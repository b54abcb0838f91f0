"""``Surroundings``: what an iteration reads beside its arguments, as it was, and whether it is the same now.

Every replay asks, so that each module costs less than a microsecond: values are read and compared in bulk.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...gathers.waiting_params import is_waiting_hook
from ...torch_internals import DisableTorchFunctionSubclass, hook_keys

__all__ = ["HOOKS", "Surroundings", "modes", "switches"]

modes: list[Callable[[], object]] = []
"""What else decides which kernels a forward runs: functions that rooms above ``ddp`` add."""


switches: list[str] = []
"""Names of switches of modules, by which a program says how they compute: rooms above ``ddp`` add theirs."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL_MODULES: list[Any] = [vars(nn.modules.module).get(f"_global{name}", {}) for name in HOOKS]
"""Tables of hooks that torch calls for every module: ``torch.nn.modules.module.register_module_forward_hook``."""
_TABLES = ("_modules", "_parameters", "_buffers")
_tables: Callable[[Any], Iterable[Any]] = itemgetter(*_TABLES)
_address: Callable[[Tensor], int] = Tensor.data_ptr
_values: Callable[[Any], Iterable[Any]] = methodcaller("values")
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_training: Callable[[nn.Module], bool] = attrgetter("training")


class Surroundings:
    """Autocast, and of each module: children, hooks, buffers and parameters (places, and which are frozen).

    root     the model
    trained  parameters whose own hooks count, beside those that the model registers
    kind     "cuda" or "cpu"
    beside   reads what else counts
    """

    lost: str | None = None
    """Why no replay is right, as "prints, which no replay would"; None where nothing is seen."""

    def __init__(
        self,
        root: nn.Module,
        trained: Sequence[Tensor],
        kind: str,
        beside: Callable[[], Sequence[object]],
    ) -> None:
        self.modules = list(root.modules())
        self._kind, self._beside = kind, beside
        self._owns = list(map(vars, self.modules))
        self._switched = [(name, [each for each in self.modules if hasattr(type(each), name)]) for name in switches]
        tables = {name: [getattr(each, name) for each in self.modules] for name in _TABLES}
        self._empty = [table for each in tables.values() for table in each if not table]
        self._full = [table for name in ("_modules", "_parameters") for table in tables[name] if table]
        self._buffers = [table for table in tables["_buffers"] if table]
        self._held = self._read_held()
        self._params = [each for each in self._held if isinstance(each, Tensor)]
        self._hooked_params = list({id(each): each for each in (*trained, *self._params)}.values())
        """Those of which hooks are compared: parameters that are ignored by the wrapper have hooks too."""
        self._places = self._read_places()
        self._counts: list[int] = []
        self._hooks = self._note_hooks()

    def change(self) -> str | None:
        """What is other than when this was made; None: all is as it was."""
        held = self._read_held()
        if any(self._empty) or len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return "a module, parameter or buffer of the model"
        if self._read_places() != self._places:
            return "autocast, a switch, what is frozen, or the memory of a parameter or buffer"
        if self._num_hooks() != self._counts and self._note_hooks() != self._hooks:
            self._counts = []
            return "a hook of the model"
        return None

    def training(self) -> tuple[bool, ...]:
        """The mode of each module: a step may change it, and each replay then does so."""
        return tuple(map(_training, self.modules))

    def hooks(self) -> list[Any]:
        """The functions that hooks of the model call."""
        tables = [*_OF_ALL_MODULES, *self._of_params, *(own[name] for own, name in self._hooked)]
        return [hook for table in tables for key, hook in table.items() if not is_waiting_hook(key)]

    def _read_held(self) -> list[Any]:
        """The tables of each module, then its children and parameters."""
        return list(chain(chain.from_iterable(map(_tables, self._owns)), chain.from_iterable(map(_values, self._full))))

    def _read_places(self) -> list[Any]:
        seen: list[Any] = [torch.is_autocast_enabled(self._kind) and torch.get_autocast_dtype(self._kind)]
        seen += [state() for state in modes]
        for name, modules in self._switched:
            seen += map(attrgetter(name), modules)
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            seen += map(_address, self._params)
            seen += map(_requires_grad, self._params)
            buffers = chain.from_iterable(map(_values, self._buffers))
            seen += [buffer.data_ptr() for buffer in buffers if buffer is not None]
        seen += self._beside()
        return seen

    # ---- Hooks: registering one raises torch's counter, and removing one shortens a table.

    def _note_hooks(self) -> list[Any]:
        """Look for hooks everywhere; returns their numbers. Another hook has another number."""
        tables = [(own, name) for own in map(vars, self.modules) for name in HOOKS if own.get(name)]
        self._hooked = [(own, name) for own, name in tables if not all(map(is_waiting_hook, own[name]))]
        with DisableTorchFunctionSubclass():
            self._of_params = [table for param in self._hooked_params for table in _tables_of(param)]
            keys: list[Any] = hook_keys(self._hooked_params)
        self._counts = self._num_hooks()
        keys += chain.from_iterable(_OF_ALL_MODULES)
        return keys + [key for own, name in self._hooked for key in own[name] if not is_waiting_hook(key)]

    def _num_hooks(self) -> list[int]:
        own = [len(own[name]) for own, name in self._hooked]
        return [RemovableHandle.next_id, *own, *map(len, self._of_params), *map(len, _OF_ALL_MODULES)]


def _tables_of(param: Tensor) -> list[Any]:
    return [
        table for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if (table := getattr(param, name, None))
    ]
