"""A second family of programs: a pipeline under torch's schedules. What one is, how it is drawn, and made simpler.

As for the other family: data; a seed makes one; ``valid_pipeline`` keeps it within what docs/reference/schedules.md
allows; ``pipeline_sources.py`` writes it down.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from layers import HUGGING_FACE, KINDS, OURS
from programs import Block, Phase

T = TypeVar("T")

SCHEDULES = {
    "one": ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble"),
    "loop": ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"),
    "v": ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
}
"""By which stages a rank has: one; one from each half; or one and its mirror image."""

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
"""Schedules that take a stage instead of a list."""

_NOT_OF_A_ROW = ("experts", "lookup", "counted", "clamped", "batch norm", "nothing", *HUGGING_FACE)
OF_A_ROW = tuple(kind for kind in KINDS if kind not in _NOT_OF_A_ROW)
"""Kinds without state, whose output is made of their input."""


@dataclass(frozen=True)
class Step:
    """One step of a schedule."""

    schedule: int = 0
    """Which of the layout's."""
    rounds: int = 1
    """Microbatches, for each stage."""
    evaluates: bool = False
    """``schedule.eval()`` comes before it."""
    outcome: str = "step"
    """Or "abandoned", after all of its backwards; or "fails": the loss raises, and it is abandoned."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline and its replicas, and what they do."""

    layout: str = "one"
    pipe_ranks: int = 2
    replicas: int = 1
    blocks: tuple[Block, ...] = (Block(), Block())
    """A stage each."""
    wrapper: str = "ddp"
    """Or "zero1", "fsdp", or "none"."""
    whole: bool = False
    """One wrapper is around all stages of a rank."""
    tied: bool = False
    """The first stage and the last have one weight."""
    overlap: bool = True
    gather_overlap: bool = False
    bucket_size: int | None = None
    find_unused: bool = False
    sums: bool = False
    """``average_microbatches=False``."""
    adam: bool = False
    clip: float | None = None
    mistaken: bool = False
    """It begins with torch's own stages under a schedule that splits backwards, which fused modules refuse."""
    steps: tuple[Step, ...] = (Step(),)
    garbage: str = "off"
    order: int = 0

    dtype = "float64"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """As other programs have them: so many ranks."""
        return (Phase(self.pipe_ranks * self.replicas, garbage=self.garbage),)

    @property
    def num_stages(self) -> int:
        """Of one replica."""
        return self.pipe_ranks * (1 if self.layout == "one" else 2)


# ---- What there may be. ----


def valid_pipeline(program: Pipeline) -> Pipeline:
    """The nearest one that users may write."""
    wrapper, blocks = program.wrapper, list(program.blocks)
    blocks = [blocks[index % len(blocks)] for index in range(program.num_stages)]
    tied = program.tied and len(blocks) > 1 and (program.layout == "v" or program.pipe_ranks == 1)
    tied = tied and program.layout != "one"
    if tied:
        blocks = [replace(block, kind="linear") if index in (0, len(blocks) - 1) else block
                  for index, block in enumerate(blocks)]  # fmt: skip
    whole = (program.whole or (tied and wrapper in ("ddp", "zero1"))) and program.layout != "one"
    whole = whole and wrapper in ("ddp", "zero1")
    if tied and wrapper == "fsdp":  # which refuses a weight of two
        tied = False
    mistaken = program.mistaken and program.pipe_ranks == 1 and program.layout != "one" and wrapper in ("ddp", "zero1")
    if mistaken:  # each stage refuses in backward
        blocks = [replace(block, kind="linear", library=True, fused=True, recompute="no") for block in blocks]
    return replace(
        program,
        mistaken=mistaken,
        blocks=tuple(_block(program, block) for block in blocks),
        replicas=1 if wrapper == "none" else program.replicas,
        whole=whole,
        tied=tied,
        overlap=program.overlap or wrapper not in ("ddp", "zero1"),
        gather_overlap=program.gather_overlap and wrapper == "zero1",
        bucket_size=program.bucket_size if wrapper != "none" else None,
        find_unused=program.find_unused and program.overlap and wrapper in ("ddp", "zero1"),
        clip=program.clip if wrapper in ("ddp", "zero1") else None,
        steps=tuple(_step(program, step) for step in program.steps),
    )


def _block(program: Pipeline, block: Block) -> Block:
    kind = block.kind if block.kind in OF_A_ROW else "linear"
    library = block.library and kind in OURS
    grouped, plain = "grouped" in kind, Block()
    return replace(
        plain,
        kind=kind,
        library=library,
        fused=(block.fused and program.wrapper != "none") or not library,
        bias=block.bias,
        packed=block.packed and grouped,
        rms=block.rms and kind.startswith("norm "),
        gated=block.gated and kind == "norm mlp",
        hidden=block.hidden,
        recompute="no" if block.recompute == "no" else "non-reentrant",  # torch's schedules ask for inputs' gradients
    )


def _step(program: Pipeline, step: Step) -> Step:
    outcome = step.outcome
    if outcome == "fails" and program.pipe_ranks > 1:  # messages between ranks are not taken back
        outcome = "abandoned"
    if outcome == "abandoned" and program.wrapper == "none":
        outcome = "step"
    return replace(step, schedule=step.schedule % len(SCHEDULES[program.layout]), outcome=outcome)


def microbatches_of(program: Pipeline, step: Step) -> int:
    """As many as every schedule of the layout takes."""
    return step.rounds * program.num_stages


# ---- From a seed. ----


def draw_pipeline(seed: int) -> Pipeline:
    """The pipeline of a seed."""
    dice = random.Random(f"pipeline {seed}")

    def one_of(weights: Mapping[T, float]) -> T:
        return dice.choices(list(weights), list(weights.values()))[0]

    def chance(part: float) -> bool:
        return dice.random() < part

    program = Pipeline(
        layout=one_of({"one": 2, "loop": 2, "v": 3}),
        pipe_ranks=one_of({1: 2, 2: 3}),
        replicas=one_of({1: 1, 2: 3}),
        blocks=(Block(),) * 4,
        wrapper=one_of({"ddp": 3, "zero1": 3, "fsdp": 3, "none": 1}),
        whole=chance(0.5),
        tied=chance(0.3),
        overlap=chance(0.8),
        gather_overlap=chance(0.5),
        bucket_size=one_of({None: 2, 1: 1, 20: 1}),
        find_unused=chance(0.2),
        sums=chance(0.15),
        adam=chance(0.5),
        clip=one_of({None: 2, 0.1: 1}),
        steps=tuple(
            Step(
                schedule=dice.randrange(6),
                rounds=one_of({1: 2, 2: 1}),
                evaluates=chance(0.25),
                outcome=one_of({"step": 6, "abandoned": 1, "fails": 1}),
            )
            for _ in range(one_of({1: 1, 2: 3, 3: 2}))
        ),
        garbage=one_of({"off": 3, "often": 1}),
        order=dice.randrange(1000),
    )
    kinds = {kind: 4.0 if kind in OURS else 0.7 for kind in OF_A_ROW}
    blocks = tuple(
        Block(
            one_of(kinds),
            library=chance(0.7),
            fused=chance(0.75),
            bias=chance(0.8),
            packed=chance(0.4),
            rms=chance(0.3),
            gated=chance(0.4),
            recompute=one_of({"no": 4, "non-reentrant": 1}),
        )
        for _ in range(program.num_stages)
    )
    return valid_pipeline(replace(program, blocks=blocks, mistaken=chance(0.3)))


# ---- Simpler ones. ----


def simpler_pipelines(program: Pipeline) -> Iterator[Pipeline]:
    """Large steps first."""
    steps = program.steps
    for index in range(len(steps) if len(steps) > 1 else 0):
        yield replace(program, steps=steps[:index] + steps[index + 1 :])
    yield replace(program, replicas=1)
    yield replace(program, pipe_ranks=1)
    for layout in SCHEDULES:
        yield replace(program, layout=layout)
    for name, value in _defaults(program, Pipeline(), "blocks", "steps"):
        yield replace(program, **{name: value})
    for index, block in enumerate(program.blocks):
        for changes in (None, *_defaults(block, Block())):
            part = Block() if changes is None else replace(block, **dict([changes]))
            yield replace(program, blocks=(*program.blocks[:index], part, *program.blocks[index + 1 :]))
    for index, step in enumerate(steps):
        for changed in _defaults(step, Step()):
            yield replace(program, steps=(*steps[:index], replace(step, **dict([changed])), *steps[index + 1 :]))


def _defaults(part: Any, default: Any, *but: str) -> Iterator[tuple[str, Any]]:
    for name, wanted in vars(default).items():
        if name not in but and getattr(part, name) != wanted:
            yield name, wanted
