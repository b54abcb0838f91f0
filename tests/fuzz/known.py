"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry names a finding and takes it out of a program. There is none where nothing is known to be wrong, and whoever
mends a finding takes its entry out.
"""

from collections.abc import Callable
from dataclasses import replace

from programs import Ddp, Iteration, Phase, Program


def _without_replaced_grads(program: Program) -> Program:
    """Plain tensors in the place of all gradients: torch's norm of them asks nothing of ours, and experts differ."""
    if program.model.variants == 1:
        return program

    def iteration(each: Iteration) -> Iteration:
        return replace(each, change="no") if each.change == "ones" else each

    def phase(each: Phase) -> Phase:
        ours = isinstance(each.wrapper, Ddp)
        return replace(each, iterations=tuple(map(iteration, each.iterations))) if ours else each

    return replace(program, phases=tuple(map(phase, program.phases)))


KNOWN: dict[str, Callable[[Program], Program]] = {
    "torch's norm of plain tensors in the place of all experts' gradients is this rank's": _without_replaced_grads,
}


def without(program: Program) -> Program:
    """The program without what is known."""
    for take_out in KNOWN.values():
        program = take_out(program)
    return program
