"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry names a finding and takes it out of a program. There is none where nothing is known to be wrong, and whoever
mends a finding takes its entry out.
"""

from collections.abc import Callable
from dataclasses import replace

from programs import Fsdp, Program


def _branches_to_what_is_frozen(program: Program) -> Program:
    """Sharded: on ranks whose branch has nothing to train, a unit's outputs may require no gradient. Backward comes to
    the units in another order there, and collectives of different ones meet."""
    if not any(isinstance(phase.wrapper, Fsdp) for phase in program.phases):
        return program
    blocks = tuple(replace(block, frozen="no") if "branch" in block.kind else block for block in program.model.blocks)
    return replace(program, model=replace(program.model, blocks=blocks))


KNOWN: dict[str, Callable[[Program], Program]] = {"branches to what is frozen": _branches_to_what_is_frozen}


def without(program: Program) -> Program:
    """The program without what is known."""
    for take_out in KNOWN.values():
        program = take_out(program)
    return program
