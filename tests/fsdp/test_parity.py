"""Fully sharded training against data parallelism: the same losses, gradients and weights.

To the bit against a data-parallel model that reduces as often and adds in the same order: simulated ranks add in one
order whatever the collective, and everything else is elementwise. Within rounding against plain data parallelism, which
sums microbatches before it reduces.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_models import Trained
from sharded_training import (
    DELAYS,
    UNITS,
    Job,
    Sharded,
    assert_agrees,
    reduced_once,
    reference,
    train_sharded,
)
from torch import Tensor

from maingrad.launch import simulate

QUICK = 3
"""Steps in ``make test``; all of them under ``slow``."""

KINDS: dict[str, tuple[str, bool | None]] = {
    "zero1": ("zero1", None),
    "zero2": ("zero2", None),
    "zero3, resharded": ("zero3", True),
    "zero3, kept": ("zero3", False),
}
FLAT_AXES = (tuple(KINDS), (1, 3), (True, False), DELAYS, (1, 2, 3, 4, 8))
HYBRID_AXES = (("hybrid", "hsdp", "hsdp_zero1"), (1, 3), (True, False), DELAYS, (2, 4))

FLAT = list(itertools.product(*FLAT_AXES))
HYBRID = list(itertools.product(*HYBRID_AXES))


def sample(cases: list[Any], seed: int) -> list[Any]:
    """A sample in which every value of every axis occurs. Cases in random order are taken if they add a value."""
    seen: set[tuple[int, Any]] = set()
    chosen = []
    for case in random.Random(seed).sample(cases, len(cases)):
        values = set(enumerate(case))
        if not values <= seen:
            chosen.append(case)
            seen |= values
    return chosen


# Cheap ones in which every placement has several microbatches, and lagging gradients something to lag behind.
SAMPLES = {"flat": sample(FLAT, seed=22092), "hybrid": sample(HYBRID, seed=270)}


@functools.lru_cache(maxsize=8)
def data_parallel(job: Job, once: frozenset[str]) -> list[Trained]:
    return simulate(reference, job.ranks, job, once)


def check(job: Job, **how: Any) -> list[Sharded]:
    sharded = simulate(train_sharded, job.ranks, job, seed=job.ranks)
    # What has no bearing on the reference is left out, so that it is shared.
    neutral = job._replace(units=(), placements="", delay="none", reshard=None)
    whole = data_parallel(neutral, reduced_once(job))
    replicas = 1 if job.placements == "hsdp_zero1" else job.instances
    assert_agrees(sharded, whole, replicas=replicas, **how)
    return sharded


def flat(case: Sequence[Any], steps: int) -> Job:
    kind, microbatches, fused, delay, ranks = case
    placements, reshard = KINDS[kind]
    return Job(
        units=UNITS,
        placements=placements,
        inner=ranks,
        fused=fused,
        delay=delay,
        microbatches=microbatches,
        reshard=reshard,
        steps=steps,
    )


def hybrid(case: Sequence[Any], steps: int) -> Job:
    placements, microbatches, fused, delay, inner = case
    return Job(
        units=UNITS,
        placements=placements,
        instances=2,
        inner=inner,
        fused=fused,
        delay=delay,
        microbatches=microbatches,
        steps=steps,
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("case", SAMPLES["flat"], ids=str)
@pytest.mark.sampled(1)
def test_shards_agree_to_the_bit(case: Sequence[Any]) -> None:
    check(flat(case, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAT, ids=str)
def test_shards_agree_to_the_bit_everywhere(case: Sequence[Any]) -> None:
    check(flat(case, 20))


@pytest.mark.in_turn
@pytest.mark.parametrize("case", SAMPLES["hybrid"], ids=str)
@pytest.mark.sampled(1)
def test_hybrids_add_microbatches_inside_first_and_then_across(case: Sequence[Any]) -> None:
    check(hybrid(case, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_hybrids_add_microbatches_inside_first_and_then_across_everywhere(case: Sequence[Any]) -> None:
    check(hybrid(case, 20))


@pytest.mark.parametrize(("name", "axes"), [("flat", FLAT_AXES), ("hybrid", HYBRID_AXES)])
def test_the_samples_have_every_value_of_every_axis(name: str, axes: Sequence[Sequence[Any]]) -> None:
    for values, found in zip(axes, zip(*SAMPLES[name], strict=True), strict=True):
        assert set(found) == set(values)
    assert len(SAMPLES[name]) <= 9


@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("delay", ["none", pytest.param("modules, lagging", marks=pytest.mark.slow)])
@pytest.mark.sampled(1)
def test_one_unit_of_everything(placements: str, delay: str) -> None:
    """Both dtypes, frozen, tied, unused and delayed parameters in the buckets of one unit."""
    check(Job(placements=placements, inner=2, delay=delay, microbatches=2, steps=QUICK))


@pytest.mark.parametrize(
    ("ranks", "placements"), [(3, "zero3"), *(pytest.param(8, p, marks=pytest.mark.slow) for p in ("zero1", "zero3"))]
)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16 over fp32 masters"])
@pytest.mark.sampled(1)
def test_a_width_of_2880(ranks: int, placements: str, low: bool) -> None:
    check(Job("wide", ("up", "down"), placements, inner=ranks, microbatches=2, low=low, steps=QUICK))


@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"])
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.sampled(1)
def test_bf16_over_fp32_masters(placements: str, fused: bool) -> None:
    instances, inner = (2, 2) if placements.startswith("hsdp") else (1, 3)
    job = Job("shapes", ("odd", "prime"), placements, instances, inner, fused=fused, microbatches=3, low=True)
    for trained in check(job._replace(steps=QUICK)):
        assert all(piece.values.dtype is torch.float32 for piece in trained.weights[0].values())


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero2", "zero3"])
@pytest.mark.sampled(1)
def test_experts_on_a_mesh_of_their_own(placements: str) -> None:
    """Ranks 0 and 2 share experts, ranks 1 and 3 others. All experts have seen the tokens of all four ranks."""
    job = Job(placements=placements, inner=4, microbatches=2, variants=2, steps=QUICK)
    sharded = check(job, holders=lambda name: [(0, 2), (1, 3)] if name.startswith("experts") else [range(4)])
    assert not torch.equal(
        sharded[0].weights[-1]["experts.0.weight"].values, sharded[1].weights[-1]["experts.0.weight"].values
    )


# ---- Plain data parallelism. ----


def close(ours: Tensor, theirs: Tensor) -> bool:
    """The norm of the difference is under 1e-5 of the norm; expected zeros must be zeros."""
    difference = (ours.double() - theirs.double()).norm()
    return bool(difference <= 1e-5 * theirs.double().norm())


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", [pytest.param("zero2", marks=pytest.mark.slow), "zero3", "hsdp", "hsdp_zero1"])
@pytest.mark.parametrize("model", ["shapes", pytest.param("wide", marks=pytest.mark.slow)])
@pytest.mark.sampled(1)
def test_plain_data_parallelism_is_near(placements: str, model: str) -> None:
    """Plain data parallelism sums microbatches before the reduction, and reduces over all ranks at once."""
    instances, inner = (2, 2) if placements.startswith("hsdp") else (1, 3)
    units = ("odd", "prime") if model == "shapes" else ("up", "down")
    job = Job(model, units, placements, instances, inner, microbatches=3, optimizer="sgd", steps=10)
    sharded = simulate(train_sharded, job.ranks, job)
    plain = job._replace(instances=1, inner=job.ranks)
    names = frozenset(name for name, _ in job.build().named_parameters())
    whole = simulate(reference, job.ranks, plain, names)
    assert_agrees(sharded, whole, replicas=2 if placements == "hsdp" else 1, same=close)
    if inner == 3:
        with pytest.raises(AssertionError):
            assert_agrees(sharded, whole)  # to the bit they are not: the orders differ
