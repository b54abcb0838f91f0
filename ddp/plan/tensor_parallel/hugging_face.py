"""How transformers cuts models: a style replaces a module's forward on the instance by one around the class's own.

transformers is never imported. Its ``tp_forward`` keeps the forward of the class in a closure.
"""

from types import CellType, MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AROUND", "calls_inner_forward", "drop_grad_hooks", "replace_inner_forward", "runs_class_forward"]

AROUND = "_maingrad_forward_around"
"""Attribute of local modules: the forward that the instance had before."""
_REPLACED = "_maingrad_inner_forward_replaced"


def calls_inner_forward(module: nn.Module) -> bool:
    """Whether ``replace_inner_forward`` has found a forward. No compiler may look into closures to see it."""
    return _REPLACED in module.__dict__


def runs_class_forward(module: nn.Module) -> bool:
    """Whether the forward on this instance runs that of the module's class, or can be made to."""
    own, cell = module.__dict__, _cell(module, "original_forward")
    if AROUND in own and not str(getattr(own.get("forward"), "__module__", "")).startswith(__package__):
        return False  # a program has replaced it since
    if cell is None:
        return AROUND in own and own[AROUND] is None
    return AROUND in own or getattr(cell.cell_contents, "__func__", None) is type(module).forward


def replace_inner_forward(module: nn.Module, forward: Any) -> None:
    """Have transformers' forward call the method ``forward`` of the module. No-op for a module without one."""
    cell = _cell(module, "original_forward")
    if cell is not None:
        cell.cell_contents = MethodType(forward, module)
        module.__dict__[_REPLACED] = True


def drop_grad_hooks(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which transformers would all-reduce the gradients of this module's parameters in each backward.

    ``ReplicatedWithGradAllReduce`` does so (norms of queries and keys), by a hook that the first forward registers. It
    reads ``.grad``, which our hook has emptied. Each rank has a part of such a gradient. From now on nobody sums them.
    None: transformers does not, in this module.
    """
    hook = _cell(module, "_all_reduce_grad")
    if hook is None:
        return None
    own: Any = hook.cell_contents
    for param in module._parameters.values():
        if param is not None:
            hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for key in [key for key, each in hooks.items() if each is own]:
                del hooks[key]
    mesh: DeviceMesh | None = getattr(own, "mesh", None)  # of a hook that was dropped before
    if mesh is None:
        mesh = own.__closure__[own.__code__.co_freevars.index("mesh")].cell_contents
        hook.cell_contents = _dropped(mesh)
    return mesh.get_group()


def _dropped(mesh: DeviceMesh) -> Any:
    """In a dropped hook's place, which forwards register on each parameter that they see."""

    def sum_nothing(param: Tensor) -> None:
        pass

    sum_nothing.mesh = mesh  # type: ignore[attr-defined]
    return sum_nothing


def _cell(module: nn.Module, name: str) -> CellType | None:
    """The variable ``name`` in the closure of transformers' forward on this instance."""
    forward: Any = module.__dict__.get(AROUND) or module.__dict__.get("forward")
    code = getattr(forward, "__code__", None)
    if code is None or not _is_of_transformers(forward) or name not in code.co_freevars:
        return None
    found: CellType = forward.__closure__[code.co_freevars.index(name)]
    return found


def _is_of_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers.distributed.")
