"""A third family of programs: a run of ``maingrad train`` that is interrupted, and goes on on other ranks.

There is no plain PyTorch beside it: the same run without an interruption, on one rank with one microbatch and no
sharding, says what each step's loss must be. As for the other families: data; a seed makes one; ``valid_run`` keeps it
within what docs/training.md allows.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from programs import Phase

T = TypeVar("T")

STEPS = 6
BATCH = 12
"""Sequences of a step."""
PARALLELS = ("ddp", "zero1", "hybrid", "fsdp", "hsdp")


@dataclass(frozen=True)
class Leg:
    """From a start to the next interruption, or to the end."""

    steps: int = 2
    """How many it takes before it is interrupted; those of the last leg are all that are left."""
    ranks: int = 2
    """That have other sequences."""
    parallel: str = "zero1"
    microbatches: int = 1
    recompute: str = "none"
    background: bool = True
    fused: bool = True
    older: bool = False
    """It goes on from the checkpoint of the leg before the last."""
    tp: int = 1
    cp: int = 1


@dataclass(frozen=True)
class Run:
    """A configuration, and the legs of its run."""

    source: str = "text"
    """Or "tokens", "megatron"."""
    files: int = 1
    weighted: bool = False
    """Each file has a share of the sequences."""
    documents: str = "join"
    """Or "mask", "pad"."""
    order_of_data: str = "random"
    """Or "epochs"."""
    optimizer: str = "adamw"
    """Or "sgd"."""
    schedule: str = "cosine"
    clip: bool = False
    log_every: int = 1
    legs: tuple[Leg, ...] = (Leg(), Leg())
    garbage: str = "off"
    order: int = 0

    dtype = "float32"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """As other programs have them: so many ranks."""
        return tuple(Phase(leg.ranks * leg.tp * leg.cp, garbage=self.garbage) for leg in self.legs)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The steps [start, end) of each leg."""
        found: list[tuple[int, int]] = []
        for index, leg in enumerate(self.legs):
            start = found[-1 - leg.older][1] if found else 0
            found.append((start, STEPS if index == len(self.legs) - 1 else start + leg.steps))
        return found


def valid_run(run: Run) -> Run:
    """The nearest one that users may write."""
    run = replace(run, weighted=run.weighted and run.files > 1)
    run = replace(run, order_of_data="epochs" if run.weighted or run.documents == "pad" else run.order_of_data)
    legs: list[Leg] = []
    left = STEPS
    for leg in run.legs:
        last = len(legs) == len(run.legs) - 1
        steps = max(run.log_every, leg.steps - leg.steps % run.log_every)
        older = leg.older and len(legs) > 1 and legs[-1].steps != legs[-2].steps
        left += legs[-1].steps if older else 0
        steps = Leg.steps if last else min(steps, left - run.log_every * (len(run.legs) - 1 - len(legs)))
        left -= 0 if last else steps
        ranks = 2 if leg.parallel in ("hybrid", "hsdp") and leg.ranks % 2 else leg.ranks
        legs.append(replace(leg, steps=steps, older=older, ranks=ranks))
    return replace(run, legs=tuple(legs))


def draw_run(seed: int) -> Run:
    """The run of a seed."""
    dice, of_meshes = random.Random(f"run {seed}"), random.Random(f"mesh of run {seed}")

    def one_of(weights: Mapping[T, float]) -> T:
        return dice.choices(list(weights), list(weights.values()))[0]

    def chance(part: float) -> bool:
        return dice.random() < part

    return valid_run(
        Run(
            source=one_of({"text": 1, "tokens": 1, "megatron": 2}),
            files=one_of({1: 1, 2: 1, 3: 1}),
            weighted=chance(0.5),
            documents=one_of({"join": 1, "mask": 1, "pad": 1}),
            order_of_data=one_of({"random": 1, "epochs": 1}),
            optimizer=one_of({"adamw": 2, "sgd": 1}),
            schedule=one_of({"cosine": 1, "linear": 1, "warmup_stable_decay": 1, "constant": 1}),
            clip=chance(0.5),
            log_every=one_of({1: 3, 2: 1}),
            legs=tuple(
                Leg(
                    steps=one_of({1: 1, 2: 1, 3: 1}),
                    ranks=one_of({1: 1, 2: 2, 3: 1}),
                    tp=of_meshes.choice((1, 1, 2)),
                    cp=of_meshes.choice((1, 1, 2)),
                    parallel=dice.choice(PARALLELS),
                    microbatches=one_of({1: 1, 2: 1}),
                    recompute=one_of({"none": 3, "blocks": 1, "attention": 1, "operators": 1}),
                    background=chance(0.5),
                    fused=chance(0.7),
                    older=chance(0.4),
                )
                for _ in range(one_of({2: 2, 3: 2}))
            ),
            garbage=one_of({"off": 3, "often": 1}),
            order=dice.randrange(1000),
        )
    )


def simpler_runs(run: Run) -> Iterator[Run]:
    """Fewer legs first."""
    for index in range(len(run.legs) if len(run.legs) > 1 else 0):
        yield replace(run, legs=run.legs[:index] + run.legs[index + 1 :])
    for name, value in _defaults(run, Run(), "legs"):
        yield replace(run, **{name: value})
    for index, leg in enumerate(run.legs):
        for changed in (("ranks", 1), ("parallel", "ddp"), *_defaults(leg, Leg())):
            yield replace(run, legs=(*run.legs[:index], replace(leg, **dict([changed])), *run.legs[index + 1 :]))


def _defaults(part: Any, default: Any, *but: str) -> Iterator[tuple[str, Any]]:
    for field in fields(part):
        wanted = getattr(default, field.name)
        if field.name not in but and getattr(part, field.name) != wanted:
            yield field.name, wanted


# ---- In Python. ----


def run_source(run: Run) -> str:
    """The functions ``train_0`` and so on, and ``plain``."""
    lines: list[str] = []
    for index, (leg, (start, end)) in enumerate(zip(run.legs, run.ranges, strict=True)):
        lines += [f"def train_{index}(records, folder):"]
        lines += [f"    configuration = {_document(run, leg)}"]
        given = f', resume=f"{{folder}}/run/checkpoints/step-{start:08d}"' if leg.older else ""
        if index < len(run.legs) - 1:  # the run looks for it after each step that is logged
            before = end - run.log_every
            given += f", interrupted_after={before if before > start else 0}"
        lines += [f"    found = run_of(folder, configuration{given})"]
        lines += ["    records[dist.get_rank()].update(found)", "", ""]
    whole = Leg(ranks=1, parallel="ddp", fused=False)
    lines += ["def plain(everyones):", "    with tempfile.TemporaryDirectory() as folder:"]
    lines += [f"        configuration = {_document(run, whole)}"]
    lines += ["        (whole,) = simulate(run_of, 1, folder, configuration)"]
    for index, (start, end) in enumerate(run.ranges):
        lines += [f"    for seen in everyones[{index}]:"]
        lines += [f'        seen["losses"] = whole["losses"][{start // run.log_every}:{end // run.log_every}]']
        if index == len(run.legs) - 1:
            lines += ['        seen["validation"] = whole["validation"]']
    return "\n".join([*lines, "", ""])


def _document(run: Run, leg: Leg) -> str:
    options: dict[str, Any] = {"lr": 3e-3, "eps": 1e-4} if run.optimizer == "adamw" else {"lr": 0.1}
    options |= {"name": run.optimizer, "schedule": run.schedule, "warmup_steps": 2}
    data: dict[str, Any] = {"source": run.source, "order": run.order_of_data, "documents": run.documents}
    data |= {"weights": [float(1 + index) for index in range(run.files)]} if run.weighted else {}
    data |= {"end_of_document": 0} if run.source == "tokens" and run.documents != "join" else {}
    sections = {
        "parallel": leg.parallel,
        "model": {"fuse_wgrad_accumulation": leg.fused},
        "data": {**data, "validation_fraction": 0.2},
        "optimizer": {**options, "max_grad_norm": 0.3 if run.clip else None},
        "train": {
            "steps": STEPS,
            "global_batch_size": BATCH,
            "num_microbatches": leg.microbatches,
            "log_every": run.log_every,
            "recompute": leg.recompute,
        },
        "checkpoint": {"background": leg.background},
    }
    sections |= {"mesh": {"tp": leg.tp, "cp": leg.cp}} if leg.tp * leg.cp > 1 else {}
    sections |= {"ddp": {"num_distributed_optimizer_instances": 2}} if leg.parallel == "hybrid" else {}
    sections |= {"fsdp": {"num_instances": 2}} if leg.parallel == "hsdp" else {}
    return f"{sections!r} | dict(files={run.files})"
