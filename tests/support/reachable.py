"""Memory that objects keep: every tensor's storage that can be reached from them, and every one that is alive."""

import gc
import types
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["live_nbytes", "nbytes_of", "reachable_tensors"]

# What they lead to is not kept for the sake of a model: other models, the whole program.
_PASSED_BY = (type, types.ModuleType, types.FrameType, types.CodeType, dist.ProcessGroup, weakref.ReferenceType)


def reachable_tensors(*roots: Any) -> list[Tensor]:
    """Through attributes, containers, closures, ``.grad`` and ``._base``, each once."""
    seen: dict[int, Any] = {}
    stack: list[Any] = list(roots)
    found = []
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, _PASSED_BY):
            continue
        seen[id(thing)] = thing  # kept, so that no id comes twice
        if isinstance(thing, types.FunctionType):  # not its module's globals
            stack += [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
            stack += [thing.__defaults__, thing.__kwdefaults__, vars(thing)]
            continue
        if isinstance(thing, Tensor) and not has_no_memory(thing):
            found.append(thing)
            stack += [thing.grad, thing._base]
        stack += gc.get_referents(thing)
    return found


def has_no_memory(tensor: Tensor) -> bool:
    """A shape alone: a ``.grad`` that was not read yet."""
    return type(tensor).__name__ == "ShownGrad"


def nbytes_of(tensors: list[Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def live_nbytes() -> int:
    """Bytes of all storages that any tensor in Python refers to."""
    return nbytes_of(
        [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not has_no_memory(thing)]
    )
