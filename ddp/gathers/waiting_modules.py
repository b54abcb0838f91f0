"""Modules that wait when a program takes a parameter from them whose gather is in flight, or calls their forward.

Code in C++ calls no ``__torch_function__`` of a parameter: extensions, ``torch.func.grad``, ``to_dlpack``. But the
program took the parameter from a module before. So until the gather has arrived, each module that registers its
parameters gets

- a mapping ``_parameters`` whose reads wait. ``module.weight`` and ``module.parameters()`` read it.
- a forward pre-hook that waits, for parameters that the module keeps elsewhere too (``self.weights = [...]``). torch's
  own modules get no hook: they give parameters only to torch's functions, and some change their ways if hooked.
"""

import functools
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from .waiting_params import after_gather, gathers_of

__all__ = ["have_module_wait", "is_waiting_hook", "let_module_go", "registered_params"]

_HOOK = "maingrad gather"
"""Key of the hook in ``_forward_pre_hooks``; torch's own keys are numbers."""


def registered_params(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters that ``module`` itself registers, by name. This read waits for no gather."""
    params: Any = module._parameters
    if isinstance(params, _WaitingParameters):
        return params.plain
    return params if isinstance(params, dict) else dict(params.items())  # TorchScript's is a dict by name only


def have_module_wait(module: nn.Module, params: dict[str, Tensor | None]) -> None:
    """Have reads of ``module``'s registered ``params``, and its forward, wait for gathers under way."""
    own = module.__dict__
    own["_parameters"] = _WaitingParameters(params)
    if not _asks_through_torch(own, type(module)):
        own["_forward_pre_hooks"][_HOOK] = _wait_before_forward
        own["_forward_pre_hooks"].move_to_end(_HOOK, last=False)


def let_module_go(module: nn.Module) -> None:
    """Remove mapping and hook from ``module``, unless it waits for another gather too."""
    own = module.__dict__
    params = own["_parameters"]
    if isinstance(params, _WaitingParameters) and not gathers_of(params.plain.values()):
        own["_parameters"] = params.plain
        own["_forward_pre_hooks"].pop(_HOOK, None)


def is_waiting_hook(key: object) -> bool:
    """Whether a module's forward pre-hook with this key is the one that waits for gathers."""
    return key == _HOOK


def _asks_through_torch(own: dict[str, Any], cls: type) -> bool:
    """Whether the forward of a module with attributes ``own`` gives parameters only to torch's functions."""
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return False  # a user's function runs too
    return _is_of_torch(cls)


@functools.cache
def _is_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.")


def _wait_before_forward(module: nn.Module, _: Any) -> None:
    for param in list(registered_params(module).values()):
        after_gather(param)


class _WaitingParameters(MutableMapping[str, Any]):
    """A module's ``_parameters`` while gathers of them are in flight: each read waits for what it returns."""

    __slots__ = ("plain",)

    def __init__(self, plain: dict[str, Tensor | None]) -> None:
        self.plain = plain
        """The module's own dict."""

    def __getitem__(self, name: str) -> Any:
        return after_gather(self.plain[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.plain[name] = value

    def __delitem__(self, name: str) -> None:
        del self.plain[name]

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
