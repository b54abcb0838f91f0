"""Collectives are called in the plan's order on every rank, nobody waits for them, and the timeline tells it all."""

import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import delayed_group
from gloo import run_ranks
from plain_grads import assert_reduced_to, plain_grads
from sleepy import SleepInBackward
from torch import Tensor, nn
from towers import LAYER_NUMEL, WIDTH, Tower, batches_of, loss_of, repeat_on_a_busy_machine, run_iteration

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.collectives import in_flight
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.rank_grid import make_grid, with_separate_gather
from maingrad.ddp.collectives.step_check import StepCheck
from maingrad.launch import simulate

SLEEP = 0.02


def test_a_gather_in_place_keeps_its_memory_and_runs_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    start = in_flight.start_all_gather

    def start_on(*arguments: Any, on_stream: bool = False) -> Any:
        told.append(on_stream)
        return start(*arguments)

    monkeypatch.setattr(in_flight, "start_all_gather", start_on)

    def on_each_rank(on_stream: bool) -> None:
        flat = torch.full((6,), -1.0)
        flat.view(2, 3)[dist.get_rank()] = dist.get_rank()
        flight = in_flight.all_gather_shards(flat, dist.group.WORLD, on_stream=on_stream)
        kept = {each.untyped_storage().data_ptr() for each in flight.tensors}
        assert kept == {flat.untyped_storage().data_ptr()}
        flight.wait()
        assert flat.tolist() == [0.0] * 3 + [1.0] * 3

    for on_stream in (True, False):
        simulate(on_each_rank, 2, on_stream)
        assert set(told) == {on_stream}
        told.clear()
    kept = torch.ones(1)
    assert in_flight.in_stages(iter([None]), (kept,)).tensors[0] is kept
    assert in_flight.in_stages(iter([]), (kept,)).work is None
    alone = in_flight.all_gather_shards(torch.ones(2), None)
    assert alone.work is None
    alone.wait()


COLLECTIVES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])


BRANCHES = {"narrow": 3, "medium": 5, "wide": 8}


class Branches(nn.Module):
    """Branches of different widths; which one runs first depends on the data."""

    def __init__(self, sleeps: dict[str, SleepInBackward]) -> None:
        super().__init__()
        self.sleeps = sleeps
        for name, width in BRANCHES.items():
            self.add_module(
                name, nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH, bias=False))
            )

    def forward(self, x: Tensor) -> Tensor:
        names = list(BRANCHES) if x.mean() > 0 else list(reversed(BRANCHES))
        return sum((self.sleeps[name](self.get_submodule(name)(x)) for name in names), torch.zeros(()))


class Order(NamedTuple):
    """What one rank has recorded."""

    ready: list[str]
    """Parameters as their gradients came in."""
    launched: list[int]
    """Sizes of the collectives, in order."""
    planned: list[int]


def launch_order(sharded: bool) -> list[Order]:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Each rank's slowest branch is another one.
    sleeps = {name: SleepInBackward(0.004 * ((i + rank) % 3)) for i, name in enumerate(BRANCHES)}
    model = Branches(sleeps)
    batches = [
        torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(r)) * (1 - 2 * (r % 2)) for r in range(size)
    ]
    expected = plain_grads(model, batches, loss_of, scale=1 / size)
    ready: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=1)
    orders = []
    with delayed_group(0.0) as group:
        ddp = DistributedDataParallel(model, config, process_group=group)
        group.delay = 0.002
        for _ in range(3):
            ready.clear()
            times = run_iteration(ddp, [batches[rank]], group)
            assert_reduced_to(ddp, expected)
            orders.append(Order(list(ready), [c.numel for c in times.collectives], [b.numel for b in ddp.plan.buckets]))
    return orders


@COLLECTIVES
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.sampled(1)
def test_all_ranks_launch_in_the_plans_order(sharded: bool, world_size: int) -> None:
    by_rank = run_ranks(launch_order, world_size, sharded)
    for orders in zip(*by_rank, strict=True):
        assert orders[0].ready != orders[1].ready, "the ranks' gradients came in one order: nothing was tested"
        assert sorted(orders[0].ready) == sorted(orders[1].ready)
        for order in orders:
            assert order.launched == order.planned


# ---- Hooks do not wait. ----


class Waiting(NamedTuple):
    backward: float
    first_collective_outlasts_backward: bool
    launched_before_first_ended: int


def slow_collectives(sharded: bool) -> Waiting:
    sleep = SleepInBackward(0.0)
    model = Tower(sleep, fused=True)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=LAYER_NUMEL
    )
    with delayed_group(0.0) as group:
        ddp = DistributedDataParallel(model, config, process_group=group)
        sleep.seconds, group.delay = 0.002, 0.2
        (start, end), collectives = run_iteration(ddp, batches_of(0, dist.get_rank(), 1), group)
    first_ended = collectives[0].end
    return Waiting(end - start, first_ended > end, sum(c.queued < first_ended for c in collectives))


@pytest.mark.in_turn
@COLLECTIVES
@pytest.mark.sampled(1)
def test_hooks_never_wait_for_a_collective(sharded: bool) -> None:
    """Eight collectives of 200 ms: the backward of 16 ms has called all of them before the first has ended."""
    for waiting in run_ranks(slow_collectives, 2, sharded):
        assert waiting.first_collective_outlasts_backward, f"the backward took {waiting.backward:.3f} s"
        assert waiting.launched_before_first_ended == 8


# ---- The timeline says the same. ----


class Disagreement(NamedTuple):
    """The largest differences between ``record_timeline`` and what was injected, in seconds."""

    backward: float
    launched: float
    finished: float
    synced: list[bool]
    ready_after_launch: int
    nbytes: int


def compare_timeline(sharded: bool) -> Disagreement:
    rank = dist.get_rank()
    sleep = SleepInBackward(0.0)
    model = Tower(sleep, fused=True)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=LAYER_NUMEL
    )
    with delayed_group(0.0) as group:
        ddp = DistributedDataParallel(model, config, process_group=group)
        sleep.seconds = group.delay = SLEEP
        origin = time.perf_counter()
        with ddp.record_timeline() as timeline:
            (start, end), collectives = run_iteration(ddp, batches_of(0, rank, 2), group)
    spans = timeline.buckets
    assert [span.bucket for span in spans] == [bucket.name for bucket in ddp.buckets]
    assert {span.collective for span in spans} == {"reduce_scatter" if sharded else "all_reduce"}
    last = timeline.backwards[-1]
    return Disagreement(
        backward=max(abs(origin + last.start - start), abs(origin + last.end - end)),
        launched=max(abs(origin + s.launched - c.queued) for s, c in zip(spans, collectives, strict=True)),
        finished=max(abs(origin + s.finished - c.end) for s, c in zip(spans, collectives, strict=True)),
        synced=[span.synced for span in timeline.backwards],
        ready_after_launch=sum(span.ready > span.launched for span in spans),
        nbytes=sum(span.nbytes for span in spans),
    )


@COLLECTIVES
@pytest.mark.sampled(1)
def test_the_recorded_timeline_agrees_with_the_injected_intervals(sharded: bool) -> None:
    def disagreement() -> dict[str, str]:
        off = {}
        for found in run_ranks(compare_timeline, 2, sharded):
            print(found)
            assert found.synced == [False, True]
            assert found.ready_after_launch == 0
            assert found.nbytes == 8 * 4 * 256  # fp32; three parameters that start at multiples of 64, padded to 256
            if max(found.backward, found.launched, found.finished) > SLEEP / 4:
                off["timeline"] = str(found)
        return off

    repeat_on_a_busy_machine(disagreement)


def test_the_comparison_travels_over_the_groups_of_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of another wrapper may be launched before it on one rank, and behind it on another."""
    groups: list[Any] = []
    all_reduce = dist.all_reduce

    def reduce(*arguments: Any, group: Any, **options: Any) -> Any:
        groups.append(group)
        return all_reduce(*arguments, group=group, **options)

    monkeypatch.setattr(dist, "all_reduce", reduce)

    def on_each_rank() -> list[Any]:
        own = dist.new_group([dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1], use_local_synchronization=True)
        grids = [with_separate_gather(make_grid(ranks)) for ranks in (None, own)]
        steps = StepCheck(grids[0], FailureReporter(), torch.device("cpu"), None, grids)
        steps.log_of(grids[1].inner)
        steps.start()
        steps.finish()
        assert all(grid.gather is not grid.inner for grid in grids)
        return [grid.gather for grid in grids]

    assert {group for each in simulate(on_each_rank, 4) for group in each} == set(groups)
