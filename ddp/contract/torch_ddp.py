"""``torch.nn.parallel.DistributedDataParallel`` around parameters that are reduced here, and over late gradients.

It broadcasts the first rank's parameters, shards too, when it is made, and reduces ``.grad`` within backward, where our
gradients are not. Whoever owns parameters has torch's wrapper refused where it collects them, and, should it have got
past that, in the first forward inside of it.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..torch_internals import current_backward

__all__ = [
    "check_none_inside",
    "check_not_collected",
    "check_not_inside",
    "in_torch_ddp",
    "is_taken",
    "note_without_grad",
    "refuse_delay",
    "refuse_delay_in_recompute",
]

_MODULE = TorchDDP.__module__
_NUM_FRAMES = 3
"""Of torch's constructor around a call: a method of it, a comprehension (before Python 3.12)."""


def in_torch_ddp() -> bool:
    """Whether a forward inside of it is running; torch's compiler asks the same."""
    return TorchDDP._active_ddp_module is not None


def check_not_collected(params: Iterable[Tensor], what: str, num_callers: int = 1) -> None:
    """To be called by ``named_parameters``: raise ``ValueError`` where it is torch's constructor that asks.

    params       those that are reduced already; what torch's wrapper was told to ignore is none of its business
    what         they belong to
    num_callers  ``named_parameters`` is so many calls away
    """
    if torch.compiler.is_compiling():
        return
    caller = sys._getframe(1 + num_callers)
    if caller.f_globals.get("__name__") == _MODULE:
        wrapper = _wrapper_of(caller)
        if wrapper is not None and _takes_one_of(wrapper, params):
            raise ValueError(_why(what))


def check_not_inside(params: Iterable[Tensor], what: str) -> None:
    """To be called in forward: raise ``RuntimeError`` inside a torch wrapper that reduces one of ``params``."""
    wrapper = TorchDDP._active_ddp_module
    if wrapper is not None and _takes_one_of(wrapper, params):
        raise RuntimeError(_why(what))


def check_none_inside(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model that is, or has in it, a torch wrapper."""
    for name, inside in module.named_modules():
        if isinstance(inside, TorchDDP):
            place = f"module '{name}'" if name else "the module"
            raise ValueError(
                f"{place} is wrapped in torch.nn.parallel.DistributedDataParallel already, and gradients would be "
                f"reduced twice: wrap what it wraps, its .module"
            )


def is_taken(param: Tensor) -> bool:
    """Whether some torch wrapper reduces it. Looks at every object of the process: for errors."""
    return any(issubclass(type(found), TorchDDP) and _takes_one_of(found, [param]) for found in gc.get_objects())


def refuse_delay(owner: str, weight: Tensor) -> None:
    """Raise ``RuntimeError`` inside a torch wrapper that reduces ``weight``, whose gradient is delayed."""
    wrapper = TorchDDP._active_ddp_module
    if wrapper is not None and _takes_one_of(wrapper, [weight]):
        raise _late(owner)


_without_grad: "weakref.WeakKeyDictionary[object, weakref.ref[TorchDDP]]" = weakref.WeakKeyDictionary()
"""Modules that delay and have run inside a torch wrapper without grad mode, as reentrant recompute begins. The forward
that counts runs in backward, inside of no wrapper."""


def note_without_grad(module: object) -> None:
    """To be called by a module that delays, in a forward without grad mode."""
    wrapper = TorchDDP._active_ddp_module
    if wrapper is not None and not torch.compiler.is_compiling():
        _without_grad[module] = weakref.ref(wrapper)


def refuse_delay_in_recompute(module: object, owner: Callable[[], str]) -> None:
    """To be called by a module that delays, in a forward with grad mode: ``refuse_delay`` where it is a recompute."""
    if _without_grad and current_backward() != -1:
        wrapper = _without_grad.get(module)
        if wrapper is not None and wrapper() is not None:
            raise _late(owner())


def _late(owner: str) -> RuntimeError:
    return RuntimeError(
        f"{owner}: a delayed weight gradient under torch.nn.parallel.DistributedDataParallel would come after it has "
        f"reduced .grad, and stay local; use maingrad.ddp.DistributedDataParallel, or do not delay"
    )


def _wrapper_of(frame: FrameType | None) -> TorchDDP | None:
    for _ in range(_NUM_FRAMES):
        if frame is None:
            break
        found: Any = frame.f_locals.get("self")
        if isinstance(found, TorchDDP):
            return found
        frame = frame.f_back
    return None


def _takes_one_of(wrapper: TorchDDP, params: Iterable[Tensor]) -> bool:
    taken = vars(wrapper).get("_module_parameters")
    if taken is None:  # it is collecting them: from the outermost module
        return True
    known = set(map(id, taken))
    return any(id(param) in known for param in params)


def _why(what: str) -> str:
    return (
        f"torch.nn.parallel.DistributedDataParallel around {what}, which has its ranks already: torch's would copy the "
        f"first rank's parameters over all others', and find no gradient in .grad; leave it away. Where accelerate or "
        f"a trainer adds it under torchrun, do not hand this model over to be prepared"
    )
