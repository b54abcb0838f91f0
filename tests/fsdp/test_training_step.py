"""``maingrad.fsdp.GraphedTrainingStep``: users' programs give the numbers of eager training. On CPUs: a stand-in."""

import itertools

import pytest
import torch
from graphed_sharded import EVENTS, PLACEMENTS, ShardedProgram, train_sharded_program, train_with_teacher
from graphed_training import FORMS, differences
from torch.distributed.device_mesh import init_device_mesh

from maingrad.launch import simulate


def check(program: ShardedProgram, ranks: int = 2) -> None:
    def both() -> list[str]:
        eager = train_sharded_program(program, graphed=False)
        return differences(eager, train_sharded_program(program, graphed=True))

    assert simulate(both, ranks) == [[]] * ranks


@pytest.mark.in_turn
@pytest.mark.parametrize(("placements", "form"), list(itertools.product(PLACEMENTS, FORMS)))
@pytest.mark.sampled(1)
def test_equals_eager(placements: str, form: str) -> None:
    check(ShardedProgram(placements=placements, form=form, events=("evaluate",)))


@pytest.mark.in_turn
@pytest.mark.parametrize(("event", "placements"), list(itertools.product(EVENTS, PLACEMENTS)))
@pytest.mark.sampled(2)
def test_what_programs_do_between_steps(event: str, placements: str) -> None:
    check(ShardedProgram(placements=placements, events=(event,), form="dropout" if event == "mode" else "fused"))


@pytest.mark.in_turn
def test_evaluation_of_whole_parameters() -> None:
    """Placements that keep parameters whole: evaluations before the capture and between replays."""
    check(ShardedProgram(placements="zero1", events=("evaluate",)))


@pytest.mark.in_turn
def test_an_iteration_is_given_up() -> None:
    check(ShardedProgram(placements="zero1", events=("adversary", "aborts")))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "program",
    [
        ShardedProgram(scaler=True),
        ShardedProgram(optimizer="SGD", clip=None),
        ShardedProgram(optimizer="SGD", scaler=True, placements="zero1"),
        ShardedProgram(dtype=torch.bfloat16, optimizer="Adam"),
        ShardedProgram(microbatches=4, reshards=False),
        ShardedProgram(microbatches=3, every_microbatch=False),
        ShardedProgram(microbatches=1, placements="zero2", events=("evaluate", "unshards", "EMA", "eager step")),
    ],
    ids=["loss scale", "SGD", "SGD, loss scale", "bf16", "stays whole", "reduced once", "one microbatch"],
)
@pytest.mark.sampled(2)
def test_other_programs(program: ShardedProgram) -> None:
    check(program)


@pytest.mark.in_turn
def test_two_instances() -> None:
    """Hybrid: a mesh of two dims."""

    def both() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        program = ShardedProgram(placements="hsdp", mesh=mesh, events=("evaluate", "scales weights"))
        eager = train_sharded_program(program, graphed=False)
        return differences(eager, train_sharded_program(program, graphed=True))

    assert simulate(both, 4) == [[]] * 4


@pytest.mark.parametrize(("student", "teacher"), list(itertools.product(("ddp", "zero1", "zero3"), repeat=2)))
@pytest.mark.sampled(2)
def test_a_step_that_reads_another_model(student: str, teacher: str) -> None:
    def both() -> list[str]:
        eager = train_with_teacher(student, teacher, graphed=False)
        return differences(eager, train_with_teacher(student, teacher, graphed=True))

    assert simulate(both, 2) == [[]] * 2
