"""Collectives run under the backward: measured on two gloo processes whose layers and collectives sleep 20 ms each.

Each collective is one interval of the thread that runs it, each backward the interval of the call. What counts is the
share of the collectives' time, the last bucket's left out, that lies inside the backward.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import delayed_group
from gloo import run_ranks
from plain_grads import assert_reduced_to, plain_grads
from sleepy import SleepInBackward
from torch import Tensor
from towers import (
    LAYER_NUMEL,
    WIDTH,
    IterationTimes,
    Tower,
    batches_of,
    loss_of,
    repeat_on_a_busy_machine,
    run_iteration,
)

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, recorded_backward_order

SLEEP = 0.02
COLLECTIVES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: a model, a configuration, and the number of microbatches of each iteration."""

    sharded: bool
    num_microbatches: tuple[int, ...] = (1, 1)
    overlap: bool = True
    find_unused: bool = False
    unused_spares: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    registered: tuple[int, ...] = tuple(range(8))
    record_order: bool = False
    fused: bool = True


class Measured(NamedTuple):
    """One iteration on one rank."""

    share: float
    backward_seconds: float
    sleep_seconds: float
    num_collectives: int
    num_called_inside: int
    """Collectives that were called, though perhaps not run, before the backward ended."""
    num_called_last: int
    """Of these, the ones behind all of the backward's work."""


def share_inside(times: IterationTimes) -> float:
    """Share of the collectives' time inside the backward; the last collective does not count."""
    start, end = times.backward
    counted = times.collectives[:-1]
    inside = sum(max(0.0, min(end, c.end) - max(start, c.start)) for c in counted)
    return inside / sum(c.end - c.start for c in counted)


def measure(case: Case) -> list[Measured]:
    """Every iteration of ``case`` on this rank, from the first; gradients are compared with a plain model's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sleep = SleepInBackward(0.0)
    shape = {"unused_spares": case.unused_spares, "skipped": case.skipped, "registered": case.registered}
    torch.manual_seed(1)
    plain = Tower(sleep, fused=False, **shape)
    torch.manual_seed(1)
    model = Tower(sleep, fused=case.fused, **shape)
    order = recorded_backward_order(model, lambda m: loss_of(m, torch.ones(1, WIDTH))) if case.record_order else None
    expected = [
        plain_grads(
            plain,
            [batch for r in range(size) for batch in batches_of(i, r, count)],
            loss_of,
            scale=1 / (size * count),
        )
        for i, count in enumerate(case.num_microbatches)
    ]
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=case.overlap,
        use_distributed_optimizer=case.sharded,
        find_unused_parameters=case.find_unused,
        bucket_size=LAYER_NUMEL,
    )
    measured = []
    with delayed_group(0.0) as group:
        ddp = DistributedDataParallel(model, config, process_group=group, backward_order=order)
        assert len(ddp.buckets) == len(case.registered)
        sleep.seconds = group.delay = SLEEP
        for i, count in enumerate(case.num_microbatches):
            sleep.intervals.clear()
            times = run_iteration(ddp, batches_of(i, rank, count), group)
            assert_reduced_to(ddp, expected[i])
            start, end = times.backward
            slept = sum(b - a for a, b in sleep.intervals if a >= start)
            called_inside = sum(c.queued < end for c in times.collectives)
            last = sum(sleep.intervals[-1][1] <= c.queued < end for c in times.collectives)
            measured.append(
                Measured(share_inside(times), end - start, slept, len(times.collectives), called_inside, last)
            )
    return measured


def check_overlap(case: Case) -> None:
    """At least 80 % in every iteration on every rank, while the backward does not wait for collectives."""
    repeat_on_a_busy_machine(lambda: _too_little_overlap(run_ranks(measure, 2, case), len(case.registered)))


def _too_little_overlap(by_rank: list[list[Measured]], num_buckets: int) -> dict[str, str]:
    late = {}
    for rank, iterations in enumerate(by_rank):
        for i, (share, backward, slept, num_collectives, _, _) in enumerate(iterations):
            line = (
                f"rank {rank}, iteration {i}: {share:.1%} inside; backward {backward:.3f} s, of it slept {slept:.3f} s"
            )
            print(line)
            assert num_collectives == num_buckets
            if share < 0.8 or backward > 1.5 * slept:
                late[f"iteration {i}"] = line
    return late


@COLLECTIVES
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
@pytest.mark.sampled(1)
def test_collectives_run_inside_the_backward_from_the_first_iteration(sharded: bool, num_microbatches: int) -> None:
    check_overlap(Case(sharded=sharded, num_microbatches=(num_microbatches,) * 2))


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_the_number_of_microbatches_may_change_between_iterations(sharded: bool) -> None:
    check_overlap(Case(sharded=sharded, num_microbatches=(2, 1, 3)))


@COLLECTIVES
@pytest.mark.sampled(1)
def test_gradients_from_autograd_overlap_like_fused_ones(sharded: bool) -> None:
    check_overlap(Case(sharded=sharded, fused=False))


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.parametrize(
    "unused",
    [
        {"unused_spares": (7,)},
        {"unused_spares": (3,)},
        {"unused_spares": (0,)},
        {"unused_spares": (0, 3, 7)},
        # A collective without a backward of its own delays the rest by one: 12 layers, so that one counts for less.
        {"skipped": (6,), "registered": tuple(range(12))},
    ],
    ids=["first_bucket", "middle_bucket", "last_bucket", "three_buckets", "whole_bucket"],
)
@pytest.mark.sampled(1)
def test_unused_parameters_hold_nothing_back(sharded: bool, unused: dict[str, Any]) -> None:
    check_overlap(Case(sharded=sharded, find_unused=True, num_microbatches=(1, 2), **unused))


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_unfound_unused_parameters_are_reduced_as_zeros_when_the_backward_ends(sharded: bool) -> None:
    """The bucket without its gradient, and the buckets behind it, come behind the work and inside the backward."""
    for unused_layer in (7, 3):
        case = Case(sharded=sharded, unused_spares=(unused_layer,), num_microbatches=(1, 2))
        for iterations in run_ranks(measure, 2, case):
            for measured in iterations:
                assert measured.num_collectives == 8
                assert measured.num_called_inside == 8
                assert measured.num_called_inside - measured.num_called_last == 7 - unused_layer


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_layers_registered_in_another_order_than_they_run(sharded: bool) -> None:
    shuffled = (5, 2, 7, 0, 3, 6, 1, 4)
    check_overlap(Case(sharded=sharded, registered=shuffled, record_order=True))


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_the_measure_fails_without_overlap(sharded: bool) -> None:
    for iterations in run_ranks(measure, 2, Case(sharded=sharded, overlap=False)):
        assert all(measured.share < 0.01 for measured in iterations)


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_the_measure_fails_in_the_wrong_order(sharded: bool) -> None:
    """Without backward_order for a reversed registration: the plan's first bucket is the last to be ready."""
    backwards = tuple(reversed(range(8)))
    for iterations in run_ranks(measure, 2, Case(sharded=sharded, registered=backwards)):
        assert all(measured.share < 0.5 for measured in iterations)


# ---- What other systems lose. ----


def test_a_fused_layer_that_leaves_no_grad_is_reduced_under_overlap() -> None:
    """The hook finds ``.grad`` None: the layer only has to have written ``main_grad``."""
    check_overlap(Case(sharded=False, fused=True, num_microbatches=(1,)))


@pytest.mark.in_turn
def test_a_bucket_that_misses_gradients_is_launched_all_the_same() -> None:
    case = Case(sharded=False, unused_spares=(2,), skipped=(5,), num_microbatches=(1, 2, 1))
    for iterations in run_ranks(measure, 2, case):
        assert [measured.num_collectives for measured in iterations] == [8] * 3


def test_a_bucket_waits_for_the_last_microbatch() -> None:
    check_overlap(Case(sharded=False, num_microbatches=(3,)))


class Choosy(Tower):
    """Leaves out three layers that the data choose: different ones on each rank and in each microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        chooser = torch.Generator().manual_seed(int(x.abs().sum() * 1000))
        skipped = torch.randperm(8, generator=chooser)[:3].tolist()
        self.running = [i for i in range(8) if i not in skipped]
        return super().forward(x)


def choose_by_data(sharded: bool, find_unused: bool) -> None:
    rank, size, count = dist.get_rank(), dist.get_world_size(), 3
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=sharded,
        find_unused_parameters=find_unused,
        bucket_size=LAYER_NUMEL,
    )
    plain, model = (Choosy(SleepInBackward(0.0), fused=fused) for fused in (False, True))
    plain.load_state_dict(model.state_dict())
    with delayed_group(0.002) as group:
        ddp = DistributedDataParallel(model, config, process_group=group)
        for i in range(4):
            run_iteration(ddp, batches_of(i, rank, count), group)
            of_all_ranks = [batch for r in range(size) for batch in batches_of(i, r, count)]
            assert_reduced_to(ddp, plain_grads(plain, of_all_ranks, loss_of, scale=1 / (size * count)))


@COLLECTIVES
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.sampled(1)
def test_the_data_may_choose_what_is_unused(sharded: bool, find_unused: bool) -> None:
    run_ranks(choose_by_data, 2, sharded, find_unused)
