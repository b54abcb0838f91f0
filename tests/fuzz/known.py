"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry of ``KNOWN`` names a finding and takes it out of a program; ``SWITCHED_ON`` says which of them are. It is empty
where nothing is known, and whoever mends a finding takes its entry out.
"""

from collections.abc import Callable

from programs import Program

KNOWN: dict[str, Callable[[Program], Program]] = {}

SWITCHED_ON: tuple[str, ...] = ()


def without(program: Program) -> Program:
    """The program without what is known."""
    for name in SWITCHED_ON:
        program = KNOWN[name](program)
    return program
