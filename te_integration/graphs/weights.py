"""``CapturedWeights``: the parameters and buffers whose places graphs have captured, and the modules that hold them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...ddp.gathers.waiting_params import is_waiting_hook
from ...ddp.torch_internals import registered_params
from ..dense.linear import LinearModule
from ..recipes import recipe_now
from .captured_order import ReplayError

__all__ = ["CapturedWeights", "hooks_of"]


def hooks_of(module: nn.Module) -> list[int]:
    """Return the keys of hooks on the module's forward and backward, which no replay calls."""
    return _keys(_hook_tables(module))


def _keys(tables: Sequence[dict[int, Any]]) -> list[int]:
    return [key for table in tables for key in table if not is_waiting_hook(key)]


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


class CapturedWeights:
    """Parameters and buffers of a module, each with its address, and what else decides which kernels it runs.

    place  the layer and microbatch, for errors
    kind   "cuda" or "cpu"
    """

    def __init__(self, module: nn.Module, place: str, kind: str) -> None:
        self._place, self._kind = place, kind
        named = list(module.named_modules())
        self._modes = [(each, each.training) for _, each in named]
        self._params = list(module.parameters())  # kept: another object must not get the id of one of them
        # Each replay looks into these tables. To ask the modules for them anew would take three times as long.
        self._tables = [
            (
                each._modules,
                _hook_tables(each),
                each if isinstance(each, LinearModule) else None,
                registered_params(each),
                each._buffers,
            )
            for _, each in named
        ]
        self._names = ["autocast", *(f"{type(each).__name__} '{name}'" if name else "it" for name, each in named)]
        self._captured = self._state()

    def check(self) -> None:
        """Before a forward: wait for all gathers under way, which no replay asks for. Raise where one has changed.

        A waiting parameter waits in ``data_ptr()``, by its class: see ``ddp/gathers/waiting_params.py``.
        """
        state = self._state()
        if state != self._captured:
            pairs = zip(self._names, state, self._captured, strict=True)
            changed = next(name for name, now, before in pairs if now != before)
            raise ReplayError(
                f"{self._place}: {changed} is not as it was captured, which no replay would see (autocast; its "
                f"children, hooks, ignores_recipes; parameters and buffers: replaced, elsewhere, frozen or unfrozen): "
                f"undo the change, or call make_graphed_callables after it"
            )

    def _state(self) -> list[Any]:
        """Return the state on which a replay depends: autocast and recipe, then each module's."""
        autocast = torch.is_autocast_enabled(self._kind) and torch.get_autocast_dtype(self._kind)
        state: list[Any] = [(autocast, recipe_now())]
        for children, hooks, layer, params, buffers in self._tables:
            own = [*children.values(), layer is not None and layer.ignores_recipes]
            if any(hooks):
                own += _keys(hooks)
            for param in params.values():
                own += (None,) if param is None else (id(param), param.data_ptr(), param.requires_grad)
            if buffers:
                own += [None if buffer is None else buffer.data_ptr() for buffer in buffers.values()]
            state.append(own)
        return state

    def in_modes_of_capture(self) -> bool:
        """Return True if all modules inside are in ``train()`` or ``eval()`` as they were captured."""
        return all(module.training is mode for module, mode in self._modes)

    def version(self) -> int:
        """Rises with each change in place of a parameter that torch sees."""
        return sum(param._version for param in self._params)
