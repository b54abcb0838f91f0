"""Iterations as one function, ``GraphedTrainingStep``: what there can be in it, how it is written, and its calls.

Plain PyTorch runs each of its calls as the iteration that it is. The function notes values under names with an N, where
the number of the call belongs.
"""

from dataclasses import replace

from microbatches import HEAD_BEHIND, OF_TWO_BATCHES, PATTERNS, batches_of, factor_of, write_micro
from pen import Pen
from programs import Block, Ddp, Extra, Iteration, Micro, Optimizer, Phase, Program
from wrappers import write_finish, write_step, write_zero

FUSED = ("SGD", "Adam", "AdamW")
"""Optimizers that can be captured."""
HOST_READS = ("branch", "shared branch", "grouped linear", "grouped mlp", "mixtral experts", "gpt-oss experts")
"""Kinds of blocks that look at values on the host, of experts on CPUs alone."""
AS_ONE_CALL = tuple(pattern for pattern in PATTERNS if pattern not in ("offloaded", "attack", "judged", *HEAD_BEHIND))
"""Patterns that may be captured: they copy nothing to the host, and gradients are thrown away nowhere."""
NOT_SEEN = ("mean loss",)
"""Extras that look into the function."""
CHANGED_ON_HOST = ("layer dropped", "attribute set")
"""Extras that no replay sees: the step is captured anew."""
EXACT_RATE = 0.0078125
"""Of optimizers, whose rates are rounded to fp32 in replays; schedules halve it, or take three quarters."""


# ---- What there can be. ----


def can_be_graphed(program: Program, phase: Phase) -> bool:
    """Whether the documentation allows an iteration of this phase to be captured."""
    model, optimizer, wrapper = program.model, program.optimizer, phase.wrapper
    options = dict(optimizer.options)
    if isinstance(wrapper, Ddp):
        fits = not (wrapper.stock or wrapper.check_nan)
    else:
        fits = options.get("fused", False) and not wrapper.stepping_hooks
    if not fits or optimizer.name not in FUSED or options.get("foreach") or options.get("dampening"):
        return False
    return model.recompute == "no" and not any(_reads(block) for block in model.blocks)


def _reads(block: Block) -> bool:
    """What is recomputed restores the state of random numbers."""
    return block.kind in HOST_READS or block.recompute != "no"


def as_calls(program: Program, phase: Phase) -> tuple[Iteration, ...]:
    """The iterations of a phase, with graphed ones that are calls of one function."""
    if not phase.graphed:
        return phase.iterations
    if not can_be_graphed(program, phase):
        return tuple(replace(iteration, graphed=False) for iteration in phase.iterations)
    first = phase.graphed[0]
    return tuple(
        _as_call(program, first, iteration) if iteration.graphed else _beside_calls(iteration)
        for iteration in phase.iterations
    )


def _as_call(program: Program, first: Iteration, iteration: Iteration) -> Iteration:
    """Of the function that the first call shows: rows and what comes behind the step are the call's own."""
    rows = [micro.rows for micro in iteration.micros]
    rows += [micro.rows for micro in first.micros[len(rows) :]]
    micros = [replace(_captured(program, micro), rows=rows[index]) for index, micro in enumerate(first.micros)]
    at = len(micros) + 1
    return replace(
        first,
        micros=tuple(micros),
        extras=tuple(replace(_kept(extra), at=at) for extra in iteration.extras if extra.kind not in NOT_SEEN),
        outcome="step",
        way="plain",
        second="together",
        see=tuple(what for what in iteration.see if what == "weights"),
        reads=(),
        overflow=iteration.overflow,
        alternates=iteration.alternates,
    )


def _captured(program: Program, micro: Micro) -> Micro:
    pattern = micro.pattern if micro.pattern in AS_ONE_CALL else "plain"
    if pattern == "input's gradient" and program.optimizer.scaled:  # by a number of the host
        pattern = "plain"
    return replace(micro, pattern=pattern, keep="nothing", raises=())


def _beside_calls(iteration: Iteration) -> Iteration:
    """What is kept of it would be alive in a capture."""
    micros = tuple(replace(micro, keep="nothing", raises=()) for micro in iteration.micros)
    outcome = "step" if iteration.outcome == "accumulate" else iteration.outcome  # a call begins without gradients
    return replace(iteration, micros=micros, extras=tuple(map(_kept, iteration.extras)), outcome=outcome)


def _kept(extra: Extra) -> Extra:
    keeps = extra.kind in ("kept forward", "failed forward", "no backward")
    return replace(extra, ranks=()) if keeps else extra


def with_exact_rate(optimizer: Optimizer) -> Optimizer:
    """The same with a learning rate that replays do not round."""
    options = dict(optimizer.options) | {"lr": EXACT_RATE}
    return replace(optimizer, options=tuple(options.items()))


# ---- How it is written. ----


def write_graphed_step(pen: Pen) -> None:
    """The function, and what captures it."""
    first = pen.phase.graphed[0]
    first = replace(first, overflow=tuple(range(pen.phase.ranks)) if _has_factor(pen) else ())
    with pen.inside(f"def train_step({', '.join(_parameters(pen))}):"):
        pen("noted = {}")
        pen.captured = True
        if pen.sums:
            pen("tokens = torch.zeros(())")
        for index in range(len(first.micros)):
            write_micro(pen, first, "N", index)
        if pen.delays and first.drain == "end":
            pen.drain()
        write_finish(pen, first)
        if first.scaled:
            pen("model.scale_gradients(0.5)" if pen.ddp else f"scale_grads({pen.owner}, 0.5)")
        write_step(pen, first, "N")
        write_zero(pen)
        pen.captured = False
        pen("return noted")
    _write_made(pen)


def _write_made(pen: Pen) -> None:
    options = f", num_warmup_steps={pen.phase.warmups}" if pen.phase.warmups != 2 else ""
    made = "GraphedTrainingStep" if pen.ddp else "fsdp.GraphedTrainingStep"
    pen(f"step = {made}(train_step, model, optimizer{options})")


def _parameters(pen: Pen) -> list[str]:
    micros = pen.phase.graphed[0].micros
    names = [f"x{index}" for index in range(len(micros))]
    names += [f"other{index}" for index, micro in enumerate(micros) if micro.pattern in OF_TWO_BATCHES]
    return [*names, "factor"] if _has_factor(pen) else names


def _has_factor(pen: Pen) -> bool:
    return any(iteration.overflow for iteration in pen.phase.graphed)


def write_call(pen: Pen, iteration: Iteration, number: int) -> None:
    """One iteration."""
    batches = [batches_of(iteration, number, index) for index in range(len(iteration.micros))]
    arguments = [first for first, _ in batches]
    arguments += [
        second for micro, (_, second) in zip(iteration.micros, batches, strict=True) if micro.pattern in OF_TWO_BATCHES
    ]
    if _has_factor(pen):
        arguments.append(f"torch.tensor({factor_of(iteration) if iteration.overflow else 1.0})")
    pen(f"noted = step({', '.join(arguments)})")
    optimizers = pen.ddp is not None and pen.ddp.max_grad_norm
    if pen.phase.clip is not None and iteration.overflow and not optimizers:
        pen('del noted["norm N"]')
    pen(f"seen.update(numbered(noted, {number}))")
    if pen.phase.clip is not None and not iteration.overflow and optimizers:
        pen.see(f"norm {number}", "optimizer.grad_norm")
    if pen.program.optimizer.schedule != "no":
        pen("schedule.step()")


def write_remade(pen: Pen, extra: Extra) -> None:
    """After an extra that the captured step does not survive, or does not see."""
    if extra.kind == "unwrapped":
        _write_made(pen)
    elif extra.kind in CHANGED_ON_HOST:
        pen("step.reset()")
