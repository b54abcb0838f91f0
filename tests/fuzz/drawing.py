"""Draws a program from a seed, and from nothing else.

Each function draws one part, from a table of values with weights. README.md says how a dimension is added.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from extras import AFTER, DURING
from gradients import CHANGES, WAYS
from graphed_steps import AS_ONE_CALL, FUSED, HOST_READS
from layers import HUGGING_FACE, KINDS, all_paths
from mesh_programs import Meshes, draw_meshes
from microbatches import PATTERNS
from pipeline_programs import Pipeline, draw_pipeline
from programs import (
    Block,
    Damage,
    Ddp,
    Extra,
    Fsdp,
    Iteration,
    Micro,
    Model,
    Optimizer,
    Phase,
    Program,
    Ranks,
    Second,
    UnitOf,
)
from recipe_programs import Recipes, draw_recipes
from run_programs import Run, draw_run
from user_checkpoints import DAMAGES
from valid import valid
from valid_models import valid_model

T = TypeVar("T")


class Dice(random.Random):
    """Draws, with weights."""

    def one_of(self, weights: Mapping[T, float]) -> T:
        return self.choices(list(weights), list(weights.values()))[0]

    def chance(self, part: float) -> bool:
        return self.random() < part

    def some(self, size: int) -> Ranks:
        """Of so many ranks: all, the first, the last, or any of them; at least one."""
        ways: Sequence[Ranks] = [
            tuple(range(size)),
            (0,),
            (size - 1,),
            tuple(r for r in range(size) if self.chance(0.5)),
        ]
        return self.choice(ways) or (0,)


PIPELINES = 8
"""Every so many seeds one is a pipeline."""


RUNS = 24
"""Likewise, a run of ``maingrad train``."""


RECIPES = 24
"""Likewise, training under a recipe."""


MESHED = 24
"""Likewise, training of a model that tensor-parallel ranks hold together."""


def draw_any(seed: int) -> Program | Pipeline | Run | Recipes | Meshes:
    """The program of a seed, of any family."""
    if seed % RUNS == RUNS - 2:
        return draw_run(seed)
    if seed % RECIPES == RECIPES - 6:
        return draw_recipes(seed)
    if seed % MESHED == MESHED - 12:
        return draw_meshes(seed)
    return draw_pipeline(seed) if seed % PIPELINES == PIPELINES - 1 else draw(seed)


def draw(seed: int) -> Program:
    """The program of a seed, of the first family."""
    dice = Dice(seed)
    dtype = dice.one_of({"float64": 10, "float32": 0.7, "bfloat16": 1, "autocast": 0.5})
    model = _model(dice)
    if dtype == "bfloat16" and dice.chance(0.5):  # without products of the library, first gradients are nearly exact
        blocks = tuple(replace(block, library=False, recompute="no") for block in model.blocks)
        model = replace(model, blocks=blocks, converted=False, recompute="no")
    model = valid_model(model, dtype)  # units are drawn of the modules that there are
    phases = tuple(_phase(dice, model) for _ in range(dice.one_of({1: 8, 2: 2, 3: 0.3})))
    program = Program(model, _optimizer(dice), phases, dtype, dice.randrange(1000))
    program = _later(Dice(f"later {seed}"), _beside(Dice(f"beside {seed}"), program))
    program = _writing(Dice(f"writing {seed}"), program)
    program = _from_meta(Dice(f"meta {seed}"), program)
    program = _with_extras(Dice(f"extras {seed}"), program)
    return valid(_graphed(Dice(f"graphed {seed}"), program))


# ---- What comes beside. It has dice of its own: seeds mean what they have meant without it. ----


def _beside(dice: Dice, program: Program) -> Program:
    return replace(program, phases=tuple(_beside_phase(dice, phase) for phase in program.phases))


def _beside_phase(dice: Dice, phase: Phase) -> Phase:
    count = dice.one_of({0: 2, 1: 1, 2: 1})
    damages = tuple(Damage(dice.choice(DAMAGES), dice.randrange(10_000)) for _ in range(count))
    phase = replace(phase, damages=damages)
    if not dice.chance(0.12):
        return phase
    second = Second(dice.one_of({"ddp": 1, "zero1": 1, "fsdp": 1}), library=dice.chance(0.5), adam=dice.chance(0.5))
    return replace(phase, second=second, iterations=tuple(_beside_iteration(dice, each) for each in phase.iterations))


def _beside_iteration(dice: Dice, iteration: Iteration) -> Iteration:
    judged = [replace(micro, pattern="judged") if dice.chance(0.6) else micro for micro in iteration.micros]
    return replace(
        iteration,
        micros=tuple(judged),
        second=dice.one_of({"together": 2, "through": 1, "frozen": 1}),
        alternates=dice.chance(0.5),
    )


def _later(dice: Dice, program: Program) -> Program:
    """Experts of transformers, and saves in the background."""
    model = program.model
    if dice.chance(0.2):
        blocks = [
            replace(block, kind=dice.choice(HUGGING_FACE), library=dice.chance(0.8)) if dice.chance(0.7) else block
            for block in model.blocks
        ]
        model = valid_model(replace(model, blocks=tuple(blocks)), program.dtype)
    return replace(program, model=model, phases=tuple(_later_phase(dice, phase) for phase in program.phases))


def _writing(dice: Dice, program: Program) -> Program:
    """Layers that write their parameters in forward."""
    if not dice.chance(0.1):
        return program
    blocks = [replace(block, kind="clamped") if dice.chance(0.6) else block for block in program.model.blocks]
    return replace(program, model=valid_model(replace(program.model, blocks=tuple(blocks)), program.dtype))


def _from_meta(dice: Dice, program: Program) -> Program:
    """Models whose memory ``fully_shard`` makes."""
    phases = []
    for phase in program.phases:
        if isinstance(phase.wrapper, Fsdp) and dice.chance(0.15):
            left_out = dice.randrange(30) if dice.chance(0.5) else None
            wrapper = replace(phase.wrapper, meta=dice.one_of({"all": 1, "first": 1}), left_out=left_out)
            phase = replace(phase, wrapper=wrapper)
        phases.append(phase)
    return replace(program, phases=tuple(phases))


def _with_extras(dice: Dice, program: Program) -> Program:
    """Weights that are taken in one context or another; parameters with marks."""
    phases = list(program.phases)
    for number, phase in enumerate(phases):
        iterations = list(phase.iterations)
        for kind in ("state taken", "marks"):
            if dice.chance(0.12):
                index = dice.randrange(len(iterations))
                at = dice.randrange(len(iterations[index].micros) + 2)
                extra = Extra(kind, at=at, where=dice.randrange(12))
                iterations[index] = replace(iterations[index], extras=(*iterations[index].extras, extra))
        phases[number] = replace(phase, iterations=tuple(iterations))
    return replace(program, phases=tuple(phases))


def _later_phase(dice: Dice, phase: Phase) -> Phase:
    phase = replace(phase, saves=dice.one_of({"waits": 1, "beside": 1}))
    if not dice.chance(0.15):
        return phase
    iterations = list(phase.iterations)
    for kind in ("saved beside", "gone back to"):
        index = dice.randrange(len(iterations))
        extra = Extra(kind, where=dice.randrange(4))
        iterations[index] = replace(iterations[index], extras=(*iterations[index].extras, extra))
    return replace(phase, iterations=tuple(iterations))


# ---- Iterations as one function, which is captured. Dice of its own again. ----


def _graphed(dice: Dice, program: Program) -> Program:
    """Where there is a fused optimizer of the library's; the model loses what reads values on the host."""
    fits = [_takes_graphs(program, phase) for phase in program.phases]
    if not any(fits) or not dice.chance(0.5):
        return program
    blocks = tuple(replace(each, kind="mlp") if each.kind in HOST_READS else each for each in program.model.blocks)
    blocks = tuple(replace(block, recompute="no") for block in blocks)
    model = valid_model(replace(program.model, blocks=blocks, recompute="no"), program.dtype)
    phases = [_graphed_phase(dice, phase) if fit else phase for phase, fit in zip(program.phases, fits, strict=True)]
    options = tuple(each for each in program.optimizer.options if each[0] not in ("foreach", "fused"))
    if any(fit and isinstance(phase.wrapper, Fsdp) for phase, fit in zip(program.phases, fits, strict=True)):
        options += (("fused", True),)
    return replace(program, model=model, optimizer=replace(program.optimizer, options=options), phases=tuple(phases))


def _takes_graphs(program: Program, phase: Phase) -> bool:
    wrapper = phase.wrapper
    fits = not wrapper.stepping_hooks if isinstance(wrapper, Fsdp) else not wrapper.stock or program.dtype == "bfloat16"
    return fits and program.optimizer.name in FUSED


def _graphed_phase(dice: Dice, phase: Phase) -> Phase:
    """Two eager calls, a capture and replays, with all that comes between; and iterations that are no calls."""
    patterns = [pattern for pattern in AS_ONE_CALL if pattern != "plain"]
    count = dice.one_of({1: 4, 2: 4, 3: 1})
    micros = tuple(
        replace(_micro(dice, phase.ranks), pattern=dice.choice(patterns) if dice.chance(0.4) else "plain")
        for _ in range(count)
    )
    shapes = {3: 1, 2: 1} if dice.chance(0.2) else {3: 1}  # each has a graph, after warm-ups of its own
    first = _iteration(dice, phase.ranks)
    iterations: list[Iteration] = []
    for _ in range(dice.one_of({5: 2, 6: 2, 8: 1})):
        if dice.chance(0.2):
            iterations.append(_iteration(dice, phase.ranks))
        own, rows = _iteration(dice, phase.ranks), dice.one_of(shapes)
        changes = {"micros": tuple(replace(micro, rows=rows) for micro in micros), "graphed": True}
        overflow = own.overflow if dice.chance(0.3) else ()
        extras = own.extras
        if dice.chance(0.25):  # what was taken before the capture comes back after it
            extras = (*extras, Extra(dice.choice(("load_state_dict", "rollback", "rollback", "decay raised"))))
        iterations.append(replace(first, extras=extras, see=own.see, overflow=overflow, **changes))
    wrapper = phase.wrapper
    wrapper = (
        replace(wrapper, check_nan=False)
        if isinstance(wrapper, Ddp)
        else replace(wrapper, zero="optimizer.zero_grad()")
    )
    return replace(phase, wrapper=wrapper, iterations=tuple(iterations), warmups=dice.one_of({2: 3, 1: 1}))


# ---- Models. ----


def _model(dice: Dice) -> Model:
    tie = dice.one_of({"no": 8, "blocks": 2, "embedding": 1})
    blocks = [_block(dice) for _ in range(dice.one_of({1: 3, 2: 4, 3: 2, 4: 0.4}))]
    if tie == "blocks":
        blocks = [replace(_block(dice), kind="linear") for _ in range(2)] + blocks[:2]
        dice.shuffle(blocks)
    return Model(
        blocks=tuple(blocks),
        width=dice.one_of({3: 1, 4: 1, 5: 2, 7: 2}),
        stem=dice.one_of({"linear": 8, "lookup": 1}),
        tie=tie,
        staged=dice.chance(0.2),
        repeats=dice.one_of({0: 8, 1: 1, 2: 1}),
        same_twice=dice.chance(0.1),
        recompute=dice.one_of({"no": 8, "reentrant": 1, "non-reentrant": 1}),
        frozen_stem=dice.chance(0.08),
        converted=dice.chance(0.2),
        variants=dice.one_of({2: 3, 3: 1}),
        hooked=dice.chance(0.15),
    )


def _block(dice: Dice) -> Block:
    return Block(
        kind=dice.one_of({kind: _WEIGHTS.get(kind, 1.0) for kind in KINDS}),
        library=dice.chance(0.6),
        fused=dice.chance(0.75),
        delayed=dice.chance(0.2),
        bias=dice.chance(0.8),
        packed=dice.chance(0.4),
        padded=dice.chance(0.3),
        rms=dice.chance(0.3),
        gated=dice.chance(0.4),
        hidden=dice.one_of({3: 1, 4: 1, 6: 1}),
        frozen=dice.one_of({"no": 7, "one way": 2, "first": 0.6, "weights": 0.8, "all": 0.6}),
        recompute=dice.one_of({"no": 8, "reentrant": 1, "non-reentrant": 1}),
        single=dice.chance(0.05),
        penalty=dice.chance(0.1),
    )


_WEIGHTS = {
    "linear": 7.0,
    "mlp": 4.0,
    "norm mlp": 2.0,
    "experts": 2.0,
    "branch": 2.0,
    "shared branch": 1.5,
    "idle": 1.5,
    "scale": 1.5,
    "clamped": 0.0,  # beside
    **dict.fromkeys(HUGGING_FACE, 0.0),  # beside
}


# ---- Optimizers. ----

_ADAM = {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.9)}
# What is left of a gradient that is zero, 1e-17, must stay small when it is divided by its own size: hence eps.
# Steps are small, because training that diverges would enlarge roundings from one iteration to the next.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.01}),
    "momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "Nesterov": ("SGD", {"lr": 0.01, "momentum": 0.8, "nesterov": True}),
    "dampened": ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}),
    "Adam": ("Adam", _ADAM),
    "AMSGrad": ("Adam", _ADAM | {"amsgrad": True}),
    "AdamW": ("AdamW", _ADAM),
    "RMSprop": ("RMSprop", {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}),
    "centered": ("RMSprop", {"lr": 0.01, "eps": 1e-2, "centered": True}),
    "Adagrad": ("Adagrad", {"lr": 0.01, "eps": 1e-3}),
    "Adadelta": ("Adadelta", {"lr": 0.01, "eps": 1e-3}),
    "Adamax": ("Adamax", {"lr": 0.01, "eps": 1e-3}),
    "NAdam": ("NAdam", {"lr": 0.01, "eps": 1e-3}),
    "RAdam": ("RAdam", {"lr": 0.01, "eps": 1e-3}),
    "ASGD": ("ASGD", {"lr": 0.01}),
    "LBFGS": ("LBFGS", {"lr": 0.1, "max_iter": 3}),
    "LBFGS with a search": ("LBFGS", {"lr": 0.5, "max_iter": 2, "line_search_fn": "strong_wolfe"}),
}


def _optimizer(dice: Dice) -> Optimizer:
    weights = dict.fromkeys(OPTIMIZERS, 1.0) | {"SGD": 4.0, "momentum": 4.0, "AdamW": 4.0, "Adam": 2.0}
    name, options = OPTIMIZERS[dice.one_of(weights)]
    options = dict(options)
    if dice.chance(0.4):
        options["weight_decay"] = 0.1
    form = dice.one_of({"": 6, "foreach": 1, "fused": 1.5})
    if form:
        options[form] = True
    return Optimizer(
        name,
        tuple(options.items()),
        groups=dice.chance(0.25),
        schedule=dice.one_of({"no": 4, "steps": 1, "exponential": 1}),
        scaled=dice.chance(0.15),
    )


# ---- Phases and wrappers. ----


def _phase(dice: Dice, model: Model) -> Phase:
    ranks = dice.one_of({1: 0.8, 2: 8, 3: 2, 4: 1.5, 6: 0.2})
    count = dice.one_of({1: 1, 2: 4, 3: 1})
    return Phase(
        ranks=ranks,
        wrapper=_fsdp(dice, model) if dice.chance(0.55) else _ddp(dice),
        iterations=tuple(_iteration(dice, ranks) for _ in range(count)),
        clip=dice.one_of({None: 2, 1.0: 1, 0.1: 1, 100.0: 0.3}),
        queue=dice.chance(0.12),
        garbage=dice.one_of({"off": 3, "often": 1}),
        loads=dice.one_of({"all": 4, "weights": 1}),
    )


def _ddp(dice: Dice) -> Ddp:
    sharded = dice.chance(0.6)
    return Ddp(
        sharded=sharded,
        instances=dice.one_of({1: 3, 2: 1}),
        stock=not sharded and dice.chance(0.7),
        overlap=dice.chance(0.75),
        gather_overlap=dice.chance(0.6),
        bucket_size=dice.one_of({None: 2, 1: 0.5, 20: 1, 60: 1}),
        num_buckets=dice.one_of({None: 5, 2: 1, 3: 1}),
        find_unused=dice.chance(0.3),
        check_nan=dice.chance(0.1),
        keep_whole=dice.chance(0.15),
        per_token=dice.chance(0.15),
        group=dice.one_of({"default": 4, "group": 1, "mesh": 1}),
        init_sync=dice.chance(0.3),
        recorded_order=dice.chance(0.1),
        max_grad_norm=dice.chance(0.5),
        clips=dice.one_of({"torch": 6, "library": 3, "too early": 0.3}),
        zero=dice.one_of({"model.zero_grad_buffer()": 3, "model.zero_grad()": 1, "optimizer.zero_grad()": 1}),
        plain_loop=dice.chance(0.5),
        released=Dice(repr(dice.getstate())).chance(0.3),  # beside the others: earlier seeds stay as they were
    )


def _fsdp(dice: Dice, model: Model) -> Fsdp:
    part = dice.one_of({0.0: 1, 0.4: 2, 0.7: 3, 1.0: 1})
    holds = dice.one_of({0.0: 5, 0.5: 2, 1.0: 1})
    paths = [path for path in all_paths(model) if dice.chance(part * (0.4 if path.endswith(".layer") else 1.0))]
    return Fsdp(
        placements=dice.one_of({"zero3": 4, "zero2": 1.5, "zero1": 1.5, "hsdp": 1.5, "hsdp_zero1": 1.5}),
        instances=dice.one_of({2: 3, 3: 1}),
        units=tuple(_unit(dice, path, holds) for path in (*paths, "")),
        group=dice.one_of({"default": 4, "group": 1, "mesh": 1}),
        init_sync=dice.chance(0.3),
        prefetch=dice.chance(0.15),
        stepping_hooks=dice.chance(0.1),
        zero=dice.one_of(
            {"optimizer.zero_grad()": 4, "model.zero_grad()": 1, "optimizer.zero_grad(set_to_none=False)": 1}
        ),
    )


def _unit(dice: Dice, path: str, holds: float) -> UnitOf:
    return UnitOf(
        path,
        reshard=dice.one_of({None: 5, True: 1, False: 1}),
        holds=dice.chance(holds),
        bucket_size=dice.one_of({None: 3, 1: 0.5, 20: 1}),
        atoms=dice.one_of({"element": 6, "row": 1, "whole": 1, 2: 1}),
    )


# ---- Iterations. ----


def _iteration(dice: Dice, ranks: int) -> Iteration:
    count = dice.one_of({1: 4, 2: 4, 3: 2})
    extras = [_extra(dice, ranks, count) for _ in range(dice.one_of({0: 4, 1: 3, 2: 2, 4: 1}))]
    return Iteration(
        micros=tuple(_micro(dice, ranks) for _ in range(count)),
        extras=tuple(extras),
        no_sync=dice.one_of({"backward": 3, "all": 3, "forgotten": 1}),
        outcome=dice.one_of({"step": 12, "skip": 1, "accumulate": 1.5, "given up": 1, "fails": 1}),
        way=dice.one_of({"plain": 12, "closure": 1.5, "two halves": 1.5, "projected": 1}),
        drain=dice.one_of({"each": 1, "end": 1}),
        finish=dice.one_of({"finish": 3, "start": 1, "start, finish": 1, "nothing": 3}),
        see=tuple(what for what in ("grads", "weights") if dice.chance(0.5)),
        scaled=dice.chance(0.1),
        change=dice.one_of({"no": 20, "none": 1, "values clipped": 0.5, **dict.fromkeys(CHANGES, 0.5)}),
        reads=tuple(dict.fromkeys(dice.choice(WAYS) for _ in range(dice.one_of({0: 6, 1: 2, 3: 2})))),
        overflow=dice.some(ranks) if dice.chance(0.3) else (),
    )


def _micro(dice: Dice, ranks: int) -> Micro:
    weights = dict.fromkeys(PATTERNS, 1.0) | {"plain": 7.0, "named output": 3.0, "judged": 0.0}
    return Micro(
        pattern=dice.one_of(weights),
        rows=dice.one_of({3: 3, 2: 1, 5: 1}),
        ranks=dice.some(ranks) if dice.chance(0.15) else None,
        skips=dice.randrange(4) if dice.chance(0.06) else None,
        keep=dice.one_of({"nothing": 6, "loss": 1, "output": 1}),
        keepers=dice.some(ranks),
        raises=dice.some(ranks) if dice.chance(0.08) else (),
    )


def _extra(dice: Dice, ranks: int, count: int) -> Extra:
    kinds = dict.fromkeys([*DURING, *AFTER], 1.0) | {
        "gc.freeze": 0.3,
        "state_dict": 0.5,
        "snapshot": 0.5,
        "rollback": 1.5,
        "unwrapped": 1.5,
        "decay raised": 0.0,  # beside graphed steps
        "saved beside": 0.0,
        "gone back to": 0.0,
        "state taken": 0.0,
        "marks": 0.0,
    }
    return Extra(
        kind=dice.one_of(kinds),
        at=dice.randrange(count + 2),
        ranks=dice.some(ranks) if dice.chance(0.8) else (),
        where=dice.randrange(4),
    )
