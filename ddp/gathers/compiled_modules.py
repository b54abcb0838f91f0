"""Gathers and ``torch.compile``: a compiled module waits for the gathers of its parameters before its code runs.

Compiled code has guards on the class of each parameter, and the class is another one while a parameter waits. So a
module that was compiled, by ``module.compile()`` or ``torch.compile(module)``, first waits for the gathers of all
parameters below it. Gathers of other parameters go on. ``torch.compile`` over the wrapper waits for all gathers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..torch_internals.weak_method import weak_method
from .param_gather import ParamGather

__all__ = ["wait_before_compiled_code"]

_WAITS = "_maingrad_waits"


def wait_before_compiled_code(modules: Iterable[nn.Module], gathers: Sequence[ParamGather]) -> None:
    """Have every compiled module among ``modules`` wait for its gathers. No-op for modules that do so already."""
    for module in modules:
        own = module.__dict__
        name = "forward" if type(module).__name__ == "OptimizedModule" else "_compiled_call_impl"
        compiled = own.get(name)
        if compiled is not None and not hasattr(compiled, _WAITS):
            params = set(map(id, module.parameters()))
            mine = [gather for gather in gathers if not params.isdisjoint(map(id, gather.live_params()))]
            own[name] = _waiting(compiled, [weak_method(gather.wait) for gather in mine])


def _waiting(compiled: Callable[..., Any], waits: Sequence[Callable[[], object]]) -> Callable[..., Any]:
    """``compiled`` behind the gathers' waits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for wait in waits:
            wait()
        return compiled(*args, **kwargs)

    setattr(call, _WAITS, True)
    return call
