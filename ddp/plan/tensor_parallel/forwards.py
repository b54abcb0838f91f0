"""A module with local parameters runs as it did with DTensors: its forward sees DTensors of them.

The forward is replaced on the instance by a method of it, so that copies of a module run their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .hugging_face import AROUND, calls_inner_forward, replace_inner_forward
from .layouts import waited
from .localize import layouts_of
from .products import multiplies, multiply, take_plain_inputs

__all__ = ["run_own_forward", "show_in_forward"]


def show_in_forward(module: nn.Module) -> None:
    """Have the module's forwards see DTensors in place of its local tensors that have layouts."""
    own = module.__dict__
    if AROUND not in own:
        own[AROUND] = own.get("forward")
        own["forward"] = MethodType(_forward, module)
        replace_inner_forward(module, run_own_forward)
        take_plain_inputs(module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    around = module.__dict__[AROUND]
    if multiplies(module):
        if around is None:
            return run_own_forward(module, *args, **kwargs)
        if calls_inner_forward(module):  # which runs the module's own forward inside
            return around(*args, **kwargs)
    return _run_shown(module, around, args, kwargs)


def run_own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class: by local tensors if a rule applies, else by DTensors."""
    if not multiplies(module):
        return type(module).forward(module, *args, **kwargs)
    output = multiply(module, *args, **kwargs)
    return _run_shown(module, None, args, kwargs) if output is None else output


def _run_shown(module: nn.Module, around: Any, args: Any, kwargs: Any) -> Any:
    with _shown(module):
        return type(module).forward(module, *args, **kwargs) if around is None else around(*args, **kwargs)


@contextmanager
def _shown(module: nn.Module) -> Iterator[None]:
    changed = []
    tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
    for table in tables:
        for name, layout in layouts_of(module).items():
            local = table.get(name)
            if local is not None and not isinstance(local, DTensor):
                shown = table[name] = layout.shown(local)
                changed.append((table, name, local, shown))
    try:
        yield
    finally:
        for table, name, local, shown in changed:
            found = table.get(name)
            if found is shown or found is None:
                table[name] = local
            elif isinstance(found, DTensor):  # a buffer that the forward has assigned
                table[name] = waited(found.to_local().detach())
