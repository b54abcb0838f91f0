"""``CapturedWeights``: the parameters and buffers whose places graphs have captured, and the modules that hold them."""

from typing import Any

from torch import nn

from ...ddp.gathers.waiting_params import is_waiting_hook, registered_params
from ..dense.linear_module import LinearModule
from .captured_order import ReplayError

__all__ = ["CapturedWeights", "hooks_of"]


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of hooks on the module's forward and backward, which no replay calls."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


class CapturedWeights:
    """Parameters and buffers of a module, each with its address. Reading a parameter waits for its gather.

    place  the layer and microbatch, for errors
    """

    def __init__(self, module: nn.Module, place: str) -> None:
        self._place = place
        modules = list(module.modules())
        self._modes = [(each, each.training) for each in modules]
        self._exempt = [(each, each.ignores_recipes) for each in modules if isinstance(each, LinearModule)]
        self._children = [(each, [*each._modules.values()]) for each in modules]
        self._hooks = [(each, hooks) for each in modules for hooks in hooks_of(each)]
        self._params = [
            (f"{prefix}.{local}".removeprefix("."), owner, local, param, param.data_ptr(), param.requires_grad)
            for prefix, owner in module.named_modules()
            for local, param in registered_params(owner).items()
            if param is not None
        ]
        self._buffers = [(name, buffer, buffer.data_ptr()) for name, buffer in module.named_buffers()]

    def check(self) -> None:
        """Before a forward: wait for all gathers under way, which no replay asks for. Raise where a place has changed.

        A waiting parameter waits in ``data_ptr()``, by its class: see ``ddp/gathers/waiting_params.py``.
        """
        for name, owner, local, param, address, trained in self._params:
            if registered_params(owner).get(local) is not param:
                raise self._error(f"'{name}' was replaced (load_state_dict(assign=True), a new nn.Parameter)")
            if param.data_ptr() != address:
                raise self._error(f"'{name}' lies elsewhere (an optimizer was built, .to(), .data was assigned)")
            if param.requires_grad is not trained:
                raise self._error(f"'{name}' was {'frozen' if trained else 'unfrozen'}")
        for name, buffer, address in self._buffers:
            if buffer.data_ptr() != address:
                raise self._error(f"'{name}' lies elsewhere")
        for module, hooks in self._hooks:
            if hooks and not all(map(is_waiting_hook, hooks)):
                raise self._error(f"{type(module).__name__} got a hook on its forward or backward")
        for layer, exempt in self._exempt:
            if layer.ignores_recipes is not exempt:
                raise self._error(f"ignores_recipes of {layer.describe()} was changed")
        for module, children in self._children:
            if [*module._modules.values()] != children:
                raise self._error(f"{type(module).__name__} got another child")

    def in_modes_of_capture(self) -> bool:
        """Return True if all modules inside are in ``train()`` or ``eval()`` as they were captured."""
        return all(module.training is mode for module, mode in self._modes)

    def version(self) -> int:
        """Rises with each change in place of a parameter that torch sees."""
        return sum(entry[3]._version for entry in self._params)

    def _error(self, change: str) -> ReplayError:
        return ReplayError(
            f"{self._place}: {change} since the capture, which no replay would see: undo that, or call "
            f"make_graphed_callables after everything that does so"
        )
