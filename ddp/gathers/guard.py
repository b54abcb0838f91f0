"""Has everybody wait who reads what a step has left under way."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .param_gather import ParamGather
from .reader_threads import ReaderThreads
from .waiting_modules import have_module_wait, kept_params, modules_below, registered_params

__all__ = ["Keeper", "find_keepers", "guard_reads"]


class Keeper(NamedTuple):
    """A module that keeps parameters in attributes of its own, without registering them: in a list of its children's,
    say."""

    module: "weakref.ref[nn.Module]"
    gathers: tuple[ParamGather, ...]
    """Of these parameters."""


def find_keepers(root: nn.Module, gathers: Sequence[ParamGather]) -> list[Keeper]:
    """Those in ``root``, as their attributes are now."""
    gather_of = {id(param): gather for gather in gathers for param in gather.live_params()}
    keepers = []
    for module in modules_below(root):
        kept = {id(gather_of[id(param)]) for param in kept_params(module) if id(param) in gather_of}
        if kept:
            keepers.append(Keeper(weakref.ref(module), tuple(each for each in gathers if id(each) in kept)))
    return keepers


def guard_reads(
    modules: Sequence[nn.Module], gathers: Sequence[ParamGather], keepers: Sequence[Keeper], threads: ReaderThreads
) -> None:
    """From here on whoever reads a parameter waits for its gather, if that is under way.

    modules  all of the model's, as they are now: who registers a parameter may have changed
    """
    scripted = {
        id(param)
        for module in modules
        if isinstance(module, torch.jit.ScriptModule)
        for param in registered_params(module).values()
    }
    if scripted:  # TorchScript reads parameters in C++, and gives them away in several other ways
        for gather in gathers:
            if gather.holds(scripted):
                gather.arrive()
    with threads.lock:
        refused = [gather for gather in gathers if not gather.guard()]
        for module in modules:
            _guard_module(module, ())
        for keeper in keepers:
            keeping = keeper.module()
            if keeping is not None:
                _guard_module(keeping, [gather for gather in keeper.gathers if gather.guards])
    for gather in refused:
        gather.arrive()


def _guard_module(module: nn.Module, kept: Sequence[ParamGather]) -> None:
    gathers = have_module_wait(module, kept)
    if gathers:
        reference = weakref.ref(module)
        for gather in gathers:
            gather.modules.append(reference)
