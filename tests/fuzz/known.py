"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry names a finding and takes it out of a program. There is none where nothing is known to be wrong, and whoever
mends a finding takes its entry out.
"""

from collections.abc import Callable
from dataclasses import replace

from programs import Iteration, Phase, Program


def _without_early_rollbacks(program: Program) -> Program:
    if not dict(program.optimizer.options).get("dampening"):
        return program
    return replace(program, phases=tuple(map(_with_late_rollbacks, program.phases)))


def _with_late_rollbacks(phase: Phase) -> Phase:
    if not phase.graphed:
        return phase
    stepped = late = False
    iterations: list[Iteration] = []
    for iteration in phase.iterations:
        stepped = stepped or iteration.outcome == "step"
        extras = []
        for extra in sorted(iteration.extras, key=lambda extra: extra.at):
            stepped = stepped and extra.kind != "unwrapped"
            late = stepped if extra.kind == "snapshot" else late
            if extra.kind != "rollback" or late:
                extras.append(extra)
        iterations.append(replace(iteration, extras=tuple(extras)))
    return replace(phase, iterations=tuple(iterations))


KNOWN: dict[str, Callable[[Program], Program]] = {
    "a graphed step with dampened momentum cannot go back to before its first step, and ranks without a shard hang": (
        _without_early_rollbacks
    ),
}


def without(program: Program) -> Program:
    """The program without what is known."""
    for take_out in KNOWN.values():
        program = take_out(program)
    return program
