"""Makes every read of a parameter wait for its gather: by the parameter's class, and by the modules that hold it."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .param_gather import ParamGather
from .reader_threads import ReaderThreads
from .waiting_modules import have_module_wait, kept_params, registered_params

__all__ = ["Keeper", "find_keepers", "guard_reads", "refuse_reads"]


class Keeper(NamedTuple):
    """A module that keeps parameters in plain attributes without registering them: ``self.weights = [...]``."""

    module: "weakref.ref[nn.Module]"
    gathers: tuple[ParamGather, ...]
    """The gathers of the kept parameters."""


def find_keepers(root: nn.Module, gathers: Sequence[ParamGather]) -> list[Keeper]:
    """The keepers in ``root``, by the present attributes of its modules."""
    gather_of = {id(param): gather for gather in gathers for param in gather.live_params()}
    keepers = []
    for module in root.modules():
        kept = {id(gather_of[id(param)]) for param in kept_params(module) if id(param) in gather_of}
        if kept:
            keepers.append(Keeper(weakref.ref(module), tuple(each for each in gathers if id(each) in kept)))
    return keepers


def guard_reads(
    modules: Sequence[nn.Module], gathers: Sequence[ParamGather], keepers: Sequence[Keeper], threads: ReaderThreads
) -> None:
    """From here on, every read of a parameter whose gather is under way waits for that gather.

    modules  all modules of the model now: the modules that register a parameter may have changed since wrapping
    gathers  all gathers of the model
    keepers  from ``find_keepers``
    threads  the threads that read the model
    """
    scripted = {
        id(param)
        for module in modules
        if isinstance(module, torch.jit.ScriptModule)
        for param in registered_params(module).values()
    }
    if scripted:  # TorchScript reads parameters in C++, where nothing here is asked: wait for these gathers now
        for gather in gathers:
            if gather.holds(scripted):
                gather.arrive()
    for gather in _guard(modules, gathers, keepers, threads):
        gather.arrive()


def refuse_reads(
    modules: Sequence[nn.Module],
    gathers: Sequence[ParamGather],
    keepers: Sequence[Keeper],
    threads: ReaderThreads,
    why: str,
) -> None:
    """Until ``allow_reads`` of each gather, every read of a parameter that could wait raises ``RuntimeError``.

    why  the text of the error, with ``{name}`` for the bucket
    """
    for gather in gathers:
        gather.refusal = why.format(name=gather.name)
    _guard(modules, gathers, keepers, threads)


def _guard(
    modules: Sequence[nn.Module], gathers: Sequence[ParamGather], keepers: Sequence[Keeper], threads: ReaderThreads
) -> list[ParamGather]:
    """Returns the gathers whose parameters cannot wait."""
    with threads.lock:
        refused = [gather for gather in gathers if not gather.guard()]
        for module in modules:
            _guard_module(module, ())
        for keeper in keepers:
            keeping = keeper.module()
            if keeping is not None:
                _guard_module(keeping, [gather for gather in keeper.gathers if gather.guards])
    return refused


def _guard_module(module: nn.Module, kept: Sequence[ParamGather]) -> None:
    gathers = have_module_wait(module, kept)
    if gathers:
        reference = weakref.ref(module)
        for gather in gathers:
            gather.modules.append(reference)
