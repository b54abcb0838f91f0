"""Makes every read of a parameter wait for its gather: by the parameter's class, and by forward pre-hooks of modules.

The parameter's class waits in torch's functions (``waiting_params.py``). A C++ extension calls no
``__torch_function__``: it reads a parameter in the forward of the module that registers it. So until the gather has
arrived, that module has a forward pre-hook that waits. torch's own modules get no hook, because they give parameters
only to torch's functions, and some change their ways if hooked.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .param_gather import ParamGather
from .waiting_params import gathers_of

__all__ = ["guard_reads", "is_waiting_hook"]


def guard_reads(modules: Iterable[nn.Module], gathers: Sequence[ParamGather], refusal: str | None = None) -> None:
    """From here on, every read of a parameter whose gather is under way waits for that gather.

    modules  all modules of the model now: the modules that register a parameter may have changed since wrapping
    gathers  all gathers of the model
    refusal  no gather can come now: until ``allow_reads`` every read that could wait raises ``RuntimeError`` with
             this text, with ``{name}`` for the bucket
    """
    for gather in gathers:
        gather.refusal = refusal and refusal.format(name=gather.name)
        if not gather.guard() and refusal is None:
            gather.arrive()
    for module in modules:
        waiting = gathers_of(module._parameters.values())
        if waiting and isinstance(module, torch.jit.ScriptModule) and refusal is None:
            for gather in waiting:  # TorchScript reads parameters in C++, and has methods beside forward
                gather.arrive()
        elif waiting and not _asks_through_torch(module.__dict__, type(module)):
            for gather in waiting:
                gather.wait_before(module)


def is_waiting_hook(key: object) -> bool:
    """Whether a module's forward pre-hook with this key is one that waits for a gather."""
    return isinstance(key, ParamGather)


def _asks_through_torch(own: dict[str, Any], cls: type) -> bool:
    """Whether the forward of a module with attributes ``own`` gives parameters only to torch's functions."""
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return False  # a user's function runs too
    return _is_of_torch(cls)


@functools.cache
def _is_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.")
