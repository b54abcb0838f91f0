"""Modules that wait for gathers of their parameters before their forward runs.

Code in C++ calls no ``__torch_function__`` of a parameter: extensions, ``torch.func.grad``, ``to_dlpack``. A module's
forward may run such code on the parameters that the module registers. So until the gather has arrived, each of these
modules has a forward pre-hook that waits.

Compiled code has guards on the class of each parameter, and the class is another one while a parameter waits. So a
module that was compiled, by ``module.compile()`` or ``torch.compile(module)``, waits for the gathers of all parameters
below it before its code runs. ``torch.compile`` over the wrapper waits for all gathers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = [
    "call_before_compiled_code",
    "call_before_forward",
    "is_waiting_hook",
    "params_in_forward",
    "registered_params",
]

_HOOK = "maingrad gather of "
"""Beginning of a hook's key in ``_forward_pre_hooks``; torch's own keys are numbers."""
_WAITS = "_maingrad_waits"


def registered_params(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters that ``module`` itself registers, by name. This read waits for no gather."""
    params: Any = module._parameters
    return params if isinstance(params, dict) else dict(params.items())  # TorchScript's is a dict by name only


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
