"""Parameters that wait for their gather at their first use, and modules that wait before their forward.

While a gather is in flight, the class of its parameters is the *waiting class*: a subclass of their own class that adds
``__torch_function__``. torch calls that before any of its functions reads the parameter: in a module's forward, in
``state_dict``, in an average over a list of parameters. torch's lazy modules change a parameter's class too.
"""

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    make_subclass,
    reads_no_values,
    registered_params,
    tree_leaves,
)

__all__ = [
    "call_before_compiled_code",
    "call_before_forward",
    "have_wait",
    "is_waiting_hook",
    "let_go",
    "params_in_forward",
    "waiting_class",
]

_WAIT = "_maingrad_wait"


def have_wait(param: Tensor, wait: Callable[[], object]) -> None:
    """Have ``param`` call ``wait`` at its next use, which calls ``let_go``. Its class must have a ``waiting_class``."""
    param.__dict__[_WAIT] = wait  # before the waiting class, which reads it
    param.__class__ = waiting_class(type(param))


def let_go(param: Tensor) -> None:
    """Give ``param`` its own class back."""
    cls: Any = type(param)  # read once: another thread may do the same
    if issubclass(cls, _WaitsForGather):
        param.__class__ = cls.__bases__[1]
    param.__dict__.pop(_WAIT, None)


def _after_gather(value: Any) -> Any:
    """``value``, after its gather where it is a parameter that waits."""
    if isinstance(value, _WaitsForGather):
        value.__dict__.get(_WAIT, bool)()  # no longer there where another thread has waited
    return value


class _WaitsForGather:
    """Mixed into a parameter's own class while its gather is in flight."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this instead of ``func``."""
        kwargs = kwargs or {}
        if func in reads_no_values():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            _after_gather(value)
        return func(*args, **kwargs)

    # Copies and pickles are made of type(self), which must be the parameter's own class then.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_after_gather(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _after_gather(self).__reduce_ex__(protocol)


@functools.cache
def waiting_class(cls: Any) -> Any:
    """The waiting class of parameters of class ``cls``.

    None for a class with a ``__torch_function__`` of its own, and where Python refuses to assign ``__class__``.
    """
    if issubclass(cls, _WaitsForGather):
        return cls
    if cls.__torch_function__ is not disabled_torch_function:
        return None  # the class's own __torch_function__ would be hidden
    try:
        waiting = type(f"Gathering{cls.__name__}", (_WaitsForGather, cls), {})
        probe: Any = make_subclass(cls, torch.empty(0))
        probe.__class__ = waiting
    except TypeError:
        return None
    return waiting


# ---- Modules that wait before their forward runs.
#
# Code in C++ calls no ``__torch_function__`` of a parameter: extensions, ``torch.func.grad``, ``to_dlpack``. A module's
# forward may run such code on the parameters that the module registers. So until the gather has arrived, each of these
# modules has a forward pre-hook that waits.
#
# Compiled code has guards on the class of each parameter, and the class is another one while a parameter waits. So a
# module that was compiled, by ``module.compile()`` or ``torch.compile(module)``, waits for the gathers of all
# parameters below it before its code runs. ``torch.compile`` over the wrapper waits for all gathers.

_HOOK = "maingrad gather of "
"""Beginning of a hook's key in ``_forward_pre_hooks``; torch's own keys are numbers."""
_WAITS = "_maingrad_waits"


def params_in_forward(module: nn.Module) -> list[Tensor | None]:
    """The parameters that ``module``'s forward has at hand: its own, and those of children without a forward."""
    found = [*registered_params(module).values()]
    for child in module._modules.values():
        if getattr(type(child), "forward", None) is nn.Module.forward:  # ParameterList, ParameterDict
            found += params_in_forward(child)  # type: ignore[arg-type]
    return found


def call_before_forward(module: nn.Module, bucket: str, hook: Callable[..., None]) -> Callable[[], object]:
    """Have ``hook``, which waits for the gather of ``bucket``, run before ``module``'s forward.

    Returns a function that removes the hook.
    """
    hooks: Any = module._forward_pre_hooks
    key = _HOOK + bucket
    hooks[key] = _Hook(hook)
    if len(hooks) > 1:  # the user's own hooks may read parameters
        hooks.move_to_end(key, last=False)
    return partial(hooks.pop, key, None)


class _Hook:
    """The forward pre-hook that calls ``wait``. One in a copy of the module has none, and removes itself when called.

    A copy of a module that registers parameters has no hook: to copy these waits. But in a module of which children
    alone register them, as in a ``ParameterList``, hooks are copied before the children are.
    """

    def __init__(self, wait: Callable[..., None] | None) -> None:
        self._wait = wait

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Called by ``module`` before its forward."""
        if self._wait is not None:
            self._wait()
            return
        hooks: Any = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]

    def __reduce__(self) -> Any:
        return _Hook, (None,)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks for it, and would have C++ read the parameters without a wait.
        raise AttributeError(
            "torch.jit.script over a module while its updated parameters are gathered: call "
            "optimizer.finish_param_sync() first"
        )


def is_waiting_hook(key: object) -> bool:
    """Whether a module's forward pre-hook with this key is one that waits for gathers."""
    return isinstance(key, str) and key.startswith(_HOOK)


def call_before_compiled_code(module: nn.Module, wait_of: Callable[[Tensor], Callable[[], None] | None]) -> None:
    """Have a compiled ``module`` wait for the parameters below it before its code runs. No-op the second time.

    wait_of  returns what waits for the parameter's gather; None for a parameter without one
    """
    own = module.__dict__
    name = "forward" if type(module).__name__ == "OptimizedModule" else "_compiled_call_impl"
    compiled = own.get(name)
    if compiled is None or hasattr(compiled, _WAITS):
        return
    waits = {wait: None for param in module.parameters() if (wait := wait_of(param)) is not None}

    def call(*args: Any, **kwargs: Any) -> Any:
        for wait in waits:
            wait()
        return compiled(*args, **kwargs)

    setattr(call, _WAITS, True)
    own[name] = call
