"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry names a finding and takes it out of a program. There is none where nothing is known to be wrong, and whoever
mends a finding takes its entry out.
"""

from collections.abc import Callable

from programs import Program

KNOWN: dict[str, Callable[[Program], Program]] = {}


def without(program: Program) -> Program:
    """The program without what is known."""
    for take_out in KNOWN.values():
        program = take_out(program)
    return program
