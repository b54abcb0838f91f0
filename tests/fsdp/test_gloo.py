"""Fully sharded training on real processes: to the bit what data parallelism gives, and what simulated ranks give."""

import pytest
from gloo import run_ranks
from sharded_training import Job, assert_agrees, reduced_once, reference, train_sharded

from maingrad.launch import simulate

STEPS = 5


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("placements", "delay"),
    [
        ("zero3", "modules"),
        pytest.param("zero1", "none", marks=pytest.mark.slow),
        pytest.param("zero2", "queue, lagging", marks=pytest.mark.slow),
        pytest.param("zero3", "queue", marks=pytest.mark.slow),
    ],
)
def test_two_processes_agree_with_data_parallelism(placements: str, delay: str) -> None:
    job = Job(
        units=("odd", "low", "frozen_weight", "unused_layer"),
        placements=placements,
        inner=2,
        delay=delay,
        microbatches=2,
        steps=STEPS,
    )
    real = run_ranks(train_sharded, 2, job)
    assert_agrees(real, run_ranks(reference, 2, job, reduced_once(job)))
    assert [trained.losses for trained in simulate(train_sharded, 2, job)] == [trained.losses for trained in real]
