"""Findings that are known and not mended yet: programs that would only show them again are made without them.

An entry of ``KNOWN`` names a finding and takes it out of a program. ``SWITCHED_ON`` says which of them are: it is empty
where nothing is known to be wrong, and whoever mends a finding takes its entry out. ``--known NAME`` adds one to a run.
"""

from collections.abc import Callable
from dataclasses import replace

from microbatches import ASKS_FOR_INPUTS
from programs import Fsdp, Iteration, Phase, Program

SWITCHED_ON: list[str] = []


def without(program: Program) -> Program:
    """The program without what is known."""
    for name in SWITCHED_ON:
        program = KNOWN[name](program)
    return program


def _in_each_phase(program: Program, change: Callable[[Phase], Phase]) -> Program:
    return replace(program, phases=tuple(change(phase) for phase in program.phases))


def _in_each_iteration(phase: Phase, change: Callable[[Iteration], Iteration]) -> Phase:
    return replace(phase, iterations=tuple(change(iteration) for iteration in phase.iterations))


def _kept_on_some_ranks(program: Program) -> Program:
    """Sharded: what some ranks keep alive decides what they gather and reduce, and when."""

    def keep_nothing(iteration: Iteration) -> Iteration:
        micros = tuple(replace(micro, keep="nothing", keepers=(), raises=()) for micro in iteration.micros)
        extras = tuple(each if each.kind == "gc.collect" else replace(each, ranks=()) for each in iteration.extras)
        return replace(iteration, micros=micros, extras=tuple(each for each in extras if each.kind != "forgetting"))

    def in_phase(phase: Phase) -> Phase:
        return _in_each_iteration(phase, keep_nothing) if isinstance(phase.wrapper, Fsdp) else phase

    return _in_each_phase(program, in_phase)


def _units_that_nobody_runs(program: Program) -> Program:
    """Sharded: their gradients are None, where unused parameters have zeros."""

    def run_all(iteration: Iteration) -> Iteration:
        extras = tuple(each for each in iteration.extras if each.kind != "layer dropped")
        micros = tuple(replace(micro, skips=None) for micro in iteration.micros)
        return replace(iteration, extras=extras, micros=micros)

    def in_phase(phase: Phase) -> Phase:
        return _in_each_iteration(phase, run_all) if isinstance(phase.wrapper, Fsdp) else phase

    return _in_each_phase(program, in_phase)


def _zeroed_in_place(program: Program) -> Program:
    """Sharded: ``zero_grad(set_to_none=False)`` does not reach what an unfinished iteration has summed."""

    def in_phase(phase: Phase) -> Phase:
        unfinished = any(iteration.outcome in ("fails", "given up") for iteration in phase.iterations)
        if not isinstance(phase.wrapper, Fsdp) or not unfinished:
            return phase
        return replace(phase, wrapper=replace(phase.wrapper, zero="optimizer.zero_grad()"))

    return _in_each_phase(program, in_phase)


def _retained_where_a_unit_runs_twice(program: Program) -> Program:
    """Sharded: a second backward through the graph of a unit that has run twice."""
    if not (program.model.repeats or program.model.same_twice):
        return program

    def once(iteration: Iteration) -> Iteration:
        micros = tuple(
            replace(micro, pattern="plain") if micro.pattern in (*ASKS_FOR_INPUTS, "retained") else micro
            for micro in iteration.micros
        )
        return replace(iteration, micros=micros)

    def in_phase(phase: Phase) -> Phase:
        return _in_each_iteration(phase, once) if isinstance(phase.wrapper, Fsdp) else phase

    return _in_each_phase(program, in_phase)


def _norms_of_experts(program: Program) -> Program:
    """Where experts have ranks of their own, each rank gets another norm from torch's ``clip_grad_norm_``."""

    def in_phase(phase: Phase) -> Phase:
        wrapper = phase.wrapper
        if program.model.variants == 1 or not (isinstance(wrapper, Fsdp) or wrapper.stock):
            return phase
        return replace(phase, clip=None)

    return _in_each_phase(program, in_phase)


def _clipped_too_early(program: Program) -> Program:
    """``clip_grad_norm_`` before ``expose_grads`` clips nothing."""

    def in_phase(phase: Phase) -> Phase:
        wrapper = phase.wrapper
        if isinstance(wrapper, Fsdp) or wrapper.clips != "too early":
            return phase
        return replace(phase, wrapper=replace(wrapper, clips="torch"))

    return _in_each_phase(program, in_phase)


def _scaled_in_fp64(program: Program) -> Program:
    """``GradScaler`` over ``DistributedOptimizer`` where fp64 is the default dtype."""
    ours = any(not isinstance(phase.wrapper, Fsdp) and not phase.wrapper.stock for phase in program.phases)
    if not ours or program.dtype != "float64":
        return program
    program = replace(program, optimizer=replace(program.optimizer, scaled=False))
    return _in_each_phase(program, lambda phase: _in_each_iteration(phase, lambda each: replace(each, overflow=())))


def _gathered_too_early(program: Program) -> Program:
    """Overlapped gathers where an expert's group is one rank: another bucket is gathered before it is updated."""

    def in_phase(phase: Phase) -> Phase:
        wrapper = phase.wrapper
        if isinstance(wrapper, Fsdp) or program.model.variants == 1:
            return phase
        return replace(phase, wrapper=replace(wrapper, gather_overlap=False))

    return _in_each_phase(program, in_phase)


def _momentum_after_overflow(program: Program) -> Program:
    """SGD's momentum where the first step was skipped."""
    if "momentum" not in dict(program.optimizer.options):
        return program
    return _in_each_phase(program, lambda phase: _in_each_iteration(phase, lambda each: replace(each, overflow=())))


def _delayed_on_some_ranks(program: Program) -> Program:
    """A delayed module that only some ranks use."""
    model = program.model
    if not any("branch" in block.kind for block in model.blocks):
        return program
    blocks = tuple(replace(each, delayed=each.delayed and "branch" not in each.kind) for each in model.blocks)
    program = replace(program, model=replace(model, blocks=blocks))
    return _in_each_phase(program, lambda phase: replace(phase, queue=False))


def _delayed_and_tied(program: Program) -> Program:
    """A tied weight with a fused and an unfused delayed owner."""
    if program.model.tie != "blocks":
        return program
    blocks = tuple(replace(each, fused=True) for each in program.model.blocks)
    return replace(program, model=replace(program.model, blocks=blocks))


KNOWN: dict[str, Callable[[Program], Program]] = {
    "kept on some ranks": _kept_on_some_ranks,
    "units that nobody runs": _units_that_nobody_runs,
    "zeroed in place": _zeroed_in_place,
    "retained where a unit runs twice": _retained_where_a_unit_runs_twice,
    "norms of experts": _norms_of_experts,
    "clipped too early": _clipped_too_early,
    "scaled in fp64": _scaled_in_fp64,
    "gathered too early": _gathered_too_early,
    "momentum after overflow": _momentum_after_overflow,
    "delayed on some ranks": _delayed_on_some_ranks,
    "delayed and tied": _delayed_and_tied,
}
