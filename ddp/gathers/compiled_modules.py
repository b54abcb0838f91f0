"""Gathers and ``torch.compile``: a compiled module waits for the gathers of its parameters before its code runs.

Compiled code has guards on the class of each parameter, and the class is another one while a parameter waits. So a
module that was compiled, by ``module.compile()`` or ``torch.compile(module)``, first waits for the gathers of all
parameters below it. Gathers of other parameters go on. ``torch.compile`` over the wrapper waits for all gathers.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from .param_gather import ParamGather
from .waiting_modules import COMPILED_HOOK, registered_params

__all__ = ["wait_before_compiled_code"]

_WAITS = "_maingrad_waits"


def wait_before_compiled_code(modules: Iterable[nn.Module], gathers: Sequence[ParamGather]) -> None:
    """Have every compiled module among ``modules`` wait for its gathers. No-op for modules that do so already."""
    for module in modules:
        compiled = module.__dict__.get("_compiled_call_impl")
        if compiled is not None:
            if not hasattr(compiled, _WAITS):
                module._compiled_call_impl = _waiting(compiled, _waiter(module, gathers))
        elif type(module).__name__ == "OptimizedModule" and _WAITS not in module.__dict__:
            wait = _waiter(module, gathers)
            hooks: dict[Any, Any] = module._forward_pre_hooks
            hooks[COMPILED_HOOK] = lambda *_, wait=wait: wait()
            module.__dict__[_WAITS] = True


def _waiter(module: nn.Module, gathers: Sequence[ParamGather]) -> Callable[[], None]:
    """A function that waits for the gathers of ``module``'s parameters. It keeps no gather alive."""
    params = {id(param) for each in module.modules() for param in registered_params(each).values()}
    mine = [weakref.ref(gather) for gather in gathers if gather.holds(params)]

    def wait() -> None:
        for reference in mine:
            gather = reference()
            if gather is not None:
                gather.settle()

    return wait


def _waiting(compiled: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        wait()
        return compiled(*args, **kwargs)

    setattr(call, _WAITS, True)
    return call
