"""``CapturedWeights``: the parameters and buffers whose places graphs have captured, and the modules that hold them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...ddp.gathers.waiting_params import is_waiting_hook
from ...ddp.torch_internals import registered_params
from ..dense.linear import LinearModule
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
    """Parameters and buffers of a module, each with its address. Reading a parameter waits for its gather.

    place  the layer and microbatch, for errors
    """

    def __init__(self, module: nn.Module, place: str) -> None:
        self._place = place
        self._named = list(module.named_modules())
        self._modes = [(each, each.training) for _, each in self._named]
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
            for _, each in self._named
        ]
        self._captured = self._state()

    def check(self) -> None:
        """Before a forward: wait for all gathers under way, which no replay asks for. Raise where a place has changed.

        A waiting parameter waits in ``data_ptr()``, by its class: see ``ddp/gathers/waiting_params.py``.
        """
        state = self._state()
        if state != self._captured:
            pairs = enumerate(zip(state, self._captured, strict=False))
            index = next((index for index, (now, before) in pairs if now != before), -1)
            raise ReplayError(
                f"{self._place}: {self._changes()[index]} since the capture, which no replay would see: undo that, or "
                f"call make_graphed_callables after everything that does so"
            )

    def _state(self) -> list[Any]:
        """What a replay depends on, in the order of ``_changes``."""
        state: list[Any] = []
        for children, hooks, layer, params, buffers in self._tables:
            state += (
                [*children.values()] if children else [],
                _keys(hooks) if any(hooks) else [],
                layer is not None and layer.ignores_recipes,
            )
            for param in params.values():
                state += (None,) * 3 if param is None else (id(param), param.data_ptr(), param.requires_grad)
            if buffers:
                state += [None if buffer is None else buffer.data_ptr() for buffer in buffers.values()]
        return state

    def _changes(self) -> list[str]:
        """The change in words where an entry of ``_state`` is another one."""
        changes: list[str] = []
        for prefix, module in self._named:
            kind = module.describe() if isinstance(module, LinearModule) else type(module).__name__
            start = f"{prefix}." if prefix else ""
            changes += (f"{kind} got another child", f"{kind} got a hook on its forward or backward")
            changes.append(f"ignores_recipes of {kind} was changed")
            for local in registered_params(module):
                changes += (
                    f"'{start}{local}' was replaced (load_state_dict(assign=True), a new nn.Parameter)",
                    f"'{start}{local}' lies elsewhere (an optimizer was built, .to(), .data was assigned)",
                    f"'{start}{local}' was frozen or unfrozen",
                )
            changes += [f"'{start}{local}' lies elsewhere" for local in module._buffers]
        return changes

    def in_modes_of_capture(self) -> bool:
        """Return True if all modules inside are in ``train()`` or ``eval()`` as they were captured."""
        return all(module.training is mode for module, mode in self._modes)

    def version(self) -> int:
        """Rises with each change in place of a parameter that torch sees."""
        return sum(param._version for param in self._params)
