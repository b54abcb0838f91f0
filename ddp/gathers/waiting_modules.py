"""Modules that wait when a program takes a parameter from them whose gather is in flight.

A C++ extension calls no ``__torch_function__`` of a parameter, nor does ``autograd.Function.apply``. But the program
took the parameter from a module before. So while a gather is in flight, each module that registers its parameters gets

- a dict ``_parameters`` whose reads wait. ``module.weight`` and ``module.parameters()`` read that dict.
- a forward pre-hook that waits, for parameters that the module keeps elsewhere too (``self.weights = [...]``). torch's
  own modules get no hook: they give parameters only to torch's functions, and some change their ways if hooked.

After the gather both are removed.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from .waiting_params import Gather, gathers_of, waited_for

__all__ = ["COMPILED_HOOK", "have_module_wait", "is_waiting_hook", "kept_params", "let_module_go", "registered_params"]

_HOOK = "maingrad gather"
"""Key of the hook in ``_forward_pre_hooks``; torch's own keys are numbers."""
COMPILED_HOOK = "maingrad gathers of compiled code"
"""That of ``compiled_modules.py``."""


def registered_params(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The parameters that ``module`` itself registers, by name. This read waits for no gather."""
    params: Any = module._parameters
    if isinstance(params, _WaitingParameters):
        return params.plain
    return params if isinstance(params, dict) else dict(params.items())  # TorchScript's is a dict by name only


def have_module_wait(module: nn.Module, kept: Sequence[Gather] = ()) -> list[Any]:
    """Have ``module`` wait for the gathers of its registered parameters, and for ``kept``; returns all these gathers.

    kept  gathers of parameters that ``module`` keeps without registering them
    """
    own = module.__dict__
    params = own.get("_parameters")
    if params is None:
        return []
    if isinstance(params, _WaitingParameters):
        params = params.plain
    gathers = gathers_of(params.values())
    gathers += [gather for gather in kept if gather not in gathers]
    if not gathers:
        return gathers
    waiting = _WaitingParameters(params)
    waiting.plain, waiting.kept = params, kept
    own["_parameters"] = waiting
    if kept or not _asks_through_torch(own, type(module)):
        hooks = own["_forward_pre_hooks"]
        hooks[_HOOK] = _wait_before_forward
        if len(hooks) > 1:
            hooks.move_to_end(_HOOK, last=False)
    return gathers


def let_module_go(module: nn.Module) -> None:
    """Remove dict and hook from ``module``, unless it waits for another gather too."""
    own = module.__dict__
    params = own.get("_parameters")
    if isinstance(params, _WaitingParameters):
        if gathers_of(params.plain.values()) or any(gather.guards for gather in params.kept):
            return
        own["_parameters"] = params.plain
    own["_forward_pre_hooks"].pop(_HOOK, None)


def is_waiting_hook(key: object) -> bool:
    """Whether a module's forward pre-hook with this key is the one that waits for gathers."""
    return key in (_HOOK, COMPILED_HOOK)


def kept_params(module: nn.Module) -> Iterator[Tensor]:
    """Tensors in ``module``'s plain attributes, and in containers there, that ``module`` does not register."""
    cls: Any = type(module)
    if _is_of_torch(cls):
        return
    own = vars(module)
    registered = set(map(id, own.get("_parameters", {}).values()))
    passed_by = ("_parameters", "_buffers", "_modules")
    stack = [value for name, value in own.items() if name not in passed_by]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if id(value) not in registered:
                yield value
        elif isinstance(value, list | tuple | set | dict) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)


def _asks_through_torch(own: dict[str, Any], cls: Any) -> bool:
    """Whether the forward of a module with attributes ``own`` gives parameters only to torch's functions."""
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return False  # a user's function runs too
    return _is_of_torch(cls)


@functools.cache
def _is_of_torch(cls: Any) -> bool:
    return str(cls.__module__).startswith("torch.nn.")


def _wait_before_forward(module: nn.Module, _: Any) -> None:
    params = module.__dict__.get("_parameters")
    if isinstance(params, _WaitingParameters):
        params.wait()


class _WaitingParameters(dict[str, Any]):
    """A module's ``_parameters`` while gathers of them are in flight: each read waits for what it returns.

    The contents equal those of ``plain``, for code that reads dicts in C.
    """

    __slots__ = ("kept", "plain")

    plain: dict[str, Any]
    """The module's own dict, which gets every change."""
    kept: Sequence[Gather]
    """Gathers of parameters that the module keeps without registering them."""

    def wait(self) -> None:
        """Wait for the gathers of all parameters."""
        for param in list(self.plain.values()):
            waited_for(param)
        for gather in self.kept:
            gather.arrive()

    # Reads: a read by name waits for one parameter, a read of all for all.

    def __getitem__(self, name: str) -> Any:
        return waited_for(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return waited_for(super().get(name, default))

    def values(self) -> Any:
        self.wait()
        return super().values()

    def items(self) -> Any:
        self.wait()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # with a Python __iter__, dict(self) and {**self} go through __getitem__

    def copy(self) -> dict[str, Any]:
        self.wait()
        return self.plain.copy()

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.wait()
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    # Writes go to both dicts.

    def __setitem__(self, name: str, value: Any) -> None:
        self.plain[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self.plain[name]
        super().__delitem__(name)

    def popitem(self) -> tuple[str, Any]:
        for name in reversed(self):
            return name, self.pop(name)
        raise KeyError("popitem(): dictionary is empty")

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
    clear = MutableMapping.clear
