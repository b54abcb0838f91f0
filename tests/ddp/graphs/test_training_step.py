"""``GraphedTrainingStep``: programs of users give the numbers of eager training, bit for bit. On CPUs: the stand-in."""

import itertools
from dataclasses import replace

import pytest
import torch
from graphed_training import CONFIGS, EVENTS, FORMS, Program, differences, train

from maingrad.launch import simulate


def check(program: Program, ranks: int = 2) -> None:
    def both() -> list[str]:
        return differences(train(program, graphed=False), train(program, graphed=True))

    assert simulate(both, ranks) == [[]] * ranks


@pytest.mark.parametrize(("config", "form"), list(itertools.product(CONFIGS, FORMS)))
def test_equals_eager(config: str, form: str) -> None:
    check(Program(config=config, form=form, events=("evaluate",)))


@pytest.mark.parametrize(
    ("event", "config"), list(itertools.product(EVENTS, ("all-reduce, overlap", "ZeRO-1, overlap")))
)
@pytest.mark.sampled(12)
def test_what_programs_do_between_steps(event: str, config: str) -> None:
    check(Program(config=config, events=(event,), form="dropout" if event == "mode" else "fused"))


def test_everything_between_steps() -> None:
    check(Program(events=tuple(event for event in EVENTS if event != "mode")))


@pytest.mark.parametrize(("ranks", "config"), [(1, "ZeRO-1, overlap"), (3, "ZeRO-1, overlap"), (4, "hybrid")])
def test_ranks(ranks: int, config: str) -> None:
    check(Program(config=config, events=("evaluate", "rank 0 reads")), ranks)


@pytest.mark.parametrize(
    "program",
    [
        Program(microbatches=1),
        Program(microbatches=4, clip=None),
        Program(dtype=torch.float32),
        Program(optimizer="SGD", events=("loads optimizer",)),
        Program(optimizer="Adam"),
        Program(per_token=True),
        Program(dtype=torch.float16, scaler=True),
        Program(dtype=torch.float16, scaler=True, optimizer="SGD"),
    ],
    ids=["one microbatch", "no clipping", "fp32", "SGD", "Adam", "per token", "loss scale", "loss scale, SGD"],
)
@pytest.mark.sampled(8)
def test_forms_of_a_step(program: Program) -> None:
    check(replace(program, events=(*program.events, "evaluate")))
