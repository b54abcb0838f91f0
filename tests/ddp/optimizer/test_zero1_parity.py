"""ZeRO-1 against all-reduce data parallelism: bitwise the same losses, gradients and weights over twenty steps.

The simulated ranks add in one order whatever the collective (a balanced tree over ranks), every other operation is
elementwise, and nothing is clipped: so nothing may differ, whatever overlaps what.
"""

import functools
import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from parity_models import STEPS, Trained, assert_bitwise, train

from maingrad.launch import simulate

RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 3)
OVERLAPS = ((False, False), (True, False), (False, True), (True, True))  # of the reduction, of the gather


class Case(NamedTuple):
    """One entry of the matrix."""

    microbatches: int
    fused: bool
    delayed: bool
    overlap: tuple[bool, bool]
    ranks: int

    def __str__(self) -> str:
        words = [f"{self.ranks} ranks", f"{self.microbatches} microbatches"]
        flags = (
            (self.fused, "fused"),
            (self.delayed, "delayed"),
            (self.overlap[0], "reduce"),
            (self.overlap[1], "gather"),
        )
        return ", ".join(words + [word for flag, word in flags if flag])


MATRIX = [Case(*axes) for axes in itertools.product(MICROBATCHES, (False, True), (False, True), OVERLAPS, RANKS)]


def sample(cases: list[Case], seed: int) -> list[Case]:
    """A sample with every value of every axis: cases in random order, without those that add no new value."""
    seen: set[tuple[str, Any]] = set()
    chosen = []
    for case in random.Random(seed).sample(cases, len(cases)):
        values = set(case._asdict().items())
        if not values <= seen:
            chosen.append(case)
            seen |= values
    return chosen


SAMPLE = sample(MATRIX, seed=365)  # a cheap one
REST = [case for case in MATRIX if case not in SAMPLE]


def variants(ranks: int) -> int:
    """Ranks hold two variants of the experts where their number allows."""
    return 2 if ranks % 2 == 0 else 1


@functools.lru_cache(maxsize=4)
def all_reduced(
    ranks: int, microbatches: int, fused: bool, delayed: bool, fused_step: bool = True, steps: int = STEPS
) -> list[Trained]:
    """The result of plain data parallelism without overlap."""
    return simulate(
        train,
        ranks,
        "everything",
        fused=fused,
        delayed=delayed,
        microbatches=microbatches,
        num_variants=variants(ranks),
        fused_step=fused_step,
        steps=steps,
    )


def check(case: Case, *, fused_step: bool = True, steps: int = STEPS, **config: Any) -> list[Trained]:
    reduce, gather = case.overlap
    sharded = simulate(
        train,
        case.ranks,
        "everything",
        fused=case.fused,
        delayed=case.delayed,
        microbatches=case.microbatches,
        num_variants=variants(case.ranks),
        use_distributed_optimizer=True,
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
        fused_step=fused_step,
        steps=steps,
        seed=case.ranks,
        **config,
    )
    reference = all_reduced(case.ranks, case.microbatches, case.fused, case.delayed, fused_step, steps)
    for ours, theirs in zip(sharded, reference, strict=True):
        assert_bitwise(ours, theirs)
    return sharded


@pytest.mark.in_turn
@pytest.mark.parametrize("case", SAMPLE, ids=str)
@pytest.mark.sampled(1)
def test_zero1_is_bitwise_all_reduce(case: Case) -> None:
    """Every number of ranks, and every value of the other axes at least once."""
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_zero1_is_bitwise_all_reduce_everywhere(case: Case) -> None:
    check(case)


def test_the_sample_has_every_value_of_every_axis() -> None:
    for axis in Case._fields:
        assert {getattr(case, axis) for case in SAMPLE} == {getattr(case, axis) for case in MATRIX}
    assert len(MATRIX) == 2 * 2 * 2 * 4 * 5
    assert len(SAMPLE) <= 8


LAYOUTS: dict[str, dict[str, Any]] = {
    "one bucket for each parameter": {"bucket_size": 1},
    "one bucket of each kind": {"bucket_size": None},
    "about four buckets": {"num_buckets": 4},
    "padded for bus bandwidth": {"pad_buckets_for_high_nccl_busbw": True, "num_buckets": 2},
    "whole parameters": {"keep_params_whole": True, "fused_step": False},
    "whole parameters, four buckets": {"keep_params_whole": True, "num_buckets": 4, "fused_step": False},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sampled(1)
def test_no_layout_changes_a_bit(layout: dict[str, Any]) -> None:
    check(Case(microbatches=1, fused=True, delayed=False, overlap=(True, True), ranks=3), steps=5, **layout)


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fused", "delayed"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (True, False),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_width_of_2880(fused: bool, delayed: bool, ranks: int) -> None:
    common: dict[str, Any] = {"fused": fused, "delayed": delayed, "microbatches": 1}
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    whole = simulate(train, ranks, "wide", **common)
    sharded = simulate(train, ranks, "wide", use_distributed_optimizer=True, **overlap, **common, seed=2)
    for ours, theirs in zip(sharded, whole, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.in_turn
def test_the_reference_has_what_it_is_meant_to_have() -> None:
    """Each special case of the model exists, and works under plain data parallelism."""
    ranks = 4
    trained = all_reduced(ranks, 1, True, False)
    first, last = trained[0].weights[0], trained[0].weights[-1]
    dtypes = {weight.dtype for weight in first.values()}
    assert dtypes == {torch.float32, torch.bfloat16}
    assert first["scale"].shape == ()
    assert {tuple(w.shape) for w in first.values()} >= {(15, 7), (17, 16)}
    assert "tied.weight" not in first, "it is prime.weight"
    for name in ("unused", "unused_layer.weight"):
        assert not any(grads[name].values.any() for grads in trained[0].grads)
        assert last[name].norm() < first[name].norm(), "weight decay alone moves it"
    for name in ("frozen.weight", "frozen_weight.weight"):
        assert name not in trained[0].grads[0]
        assert torch.equal(first[name], last[name])
    for name in first:
        experts = name.startswith("experts")
        for rank in range(ranks):
            same = torch.equal(trained[rank].weights[-1][name], last[name])
            assert same is (not experts or rank % 2 == 0), name
        if name in trained[0].grads[0]:
            assert not torch.equal(first[name], last[name]), f"{name} does not move"
    assert len(trained[0].weights) == STEPS
