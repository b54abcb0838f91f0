"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry names a finding and takes it out of a program. There is none where nothing is known to be wrong, and whoever
mends a finding takes its entry out.
"""

from collections.abc import Callable
from dataclasses import replace

from microbatches import ASKS_FOR_INPUTS
from programs import Fsdp, Iteration, Phase, Program


def _without_asking_in_hooks(program: Program) -> Program:
    phases = [
        replace(phase, iterations=tuple(map(_without_asking, phase.iterations))) if _has_hooks(phase) else phase
        for phase in program.phases
    ]
    return replace(program, phases=tuple(phases))


def _has_hooks(phase: Phase) -> bool:
    return isinstance(phase.wrapper, Fsdp) and phase.wrapper.stepping_hooks


def _without_asking(iteration: Iteration) -> Iteration:
    plain = [replace(each, pattern="plain") if each.pattern in ASKS_FOR_INPUTS else each for each in iteration.micros]
    return replace(iteration, micros=tuple(plain))


KNOWN: dict[str, Callable[[Program], Program]] = {
    "fully_shard: autograd.grad outside no_sync calls hooks of parameters, with zeros": _without_asking_in_hooks,
}


def without(program: Program) -> Program:
    """The program without what is known."""
    for take_out in KNOWN.values():
        program = take_out(program)
    return program
