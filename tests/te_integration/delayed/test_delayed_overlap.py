"""Reductions run under later weight gradients: measured on two gloo processes, where each of both takes 50 ms.

Each weight gradient and each collective is one recorded interval. The tests check the share of the collectives' time,
without the last bucket's, during which a weight gradient is computed.
"""

import time
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import CollectiveInterval, delayed_group
from gloo import run_ranks
from plain_grads import plain_grads
from sleeping_wgrads import SLEEP, Wgrad, share_under, sleeping_wgrads
from torch import Tensor, nn
from towers import repeat_on_a_busy_machine

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import Linear, WgradQueue
from maingrad.te_integration.wgrad_queue import drain_modules

LAYERS = 8
WIDTH = 16


class Run(NamedTuple):
    """One iteration on one rank."""

    backward: tuple[float, float]
    wgrads: list[Wgrad]
    collectives: list[CollectiveInterval]
    worst_error: float


def tower(delayed: int) -> nn.Sequential:
    """The last ``delayed`` layers delay. The buckets of the head and the last layers become ready first."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            Linear(
                WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=index >= LAYERS - delayed
            )
            for index in range(LAYERS)
        )
    )


def batch(index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(4, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def measure(delayed: int, sharded: bool, microbatches: int) -> Run:
    """Run one iteration, drain W in bucket order after each B, compare the gradients with a plain model's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = tower(0)
    for layer in plain:
        layer.fuse_wgrad_accumulation = False
    batches = [batch(index, r) for r in range(world) for index in range(microbatches)]
    expected = plain_grads(plain, batches, loss_of, scale=1 / world)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=WIDTH * WIDTH
    )
    with delayed_group(0.0) as group:
        ddp = DistributedDataParallel(tower(delayed), config, process_group=group)
        group.delay = SLEEP
        group.intervals.clear()
        with sleeping_wgrads() as wgrads:
            for index in range(microbatches):
                with nullcontext() if index == microbatches - 1 else ddp.no_sync():
                    loss = loss_of(ddp, batch(index, rank))
                    start = time.perf_counter()
                    loss.backward()
                    end = time.perf_counter()
                    drain_modules(ddp)
            ddp.finish_grad_sync()
        worst = 0.0
        for bucket in ddp.buckets:
            first, last = ddp.owned_range(bucket.layout)
            for slot, record in zip(bucket.layout.slots, bucket.records, strict=True):
                begin = slot.start - bucket.layout.start
                mine = slice(max(first - begin, 0), max(min(last - begin, record.view.numel()), 0))
                difference = record.view.flatten()[mine] - expected[record.name].flatten()[mine]
                worst = max(worst, difference.abs().max().item() if difference.numel() else 0.0)
        return Run((start, end), list(wgrads), list(group.intervals), worst)


def check_share(delayed: int, sharded: bool, microbatches: int) -> None:
    def attempt() -> dict[str, str]:
        late = {}
        for rank, run in enumerate(run_ranks(measure, 2, delayed, sharded, microbatches)):
            assert run.worst_error < 1e-6
            assert len(run.collectives) == LAYERS
            assert len(run.wgrads) == LAYERS * microbatches
            in_backward = [w for w in run.wgrads if run.backward[0] <= w.start <= run.backward[1]]
            assert len(in_backward) == LAYERS - delayed, "the backward computes no delayed weight gradient"
            share = share_under(run.wgrads, run.collectives[:-1])
            if share < 0.8:
                late[f"rank {rank}"] = f"{share:.0%}"
        return late

    repeat_on_a_busy_machine(attempt)


@pytest.mark.in_turn
@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.sampled(1)
def test_each_bucket_reduces_under_the_weight_gradients_of_the_next(sharded: bool, microbatches: int) -> None:
    check_share(LAYERS, sharded, microbatches)


@pytest.mark.in_turn
@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.sampled(1)
def test_half_delayed_reduces_under_both(sharded: bool) -> None:
    """The first layers' buckets become ready as backward ends, and are reduced under the delayed products."""
    check_share(LAYERS // 2, sharded, 1)


def lagging(lag: int) -> list[tuple[int, float, float]]:
    """(bucket, when its last W ended, when its collective was called), W lagging B by ``lag`` microbatches."""
    microbatches, rank = 6, dist.get_rank()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=WIDTH * WIDTH)
    queue = WgradQueue()
    queue.log = []
    with delayed_group(0.0) as group:
        model = tower(LAYERS)
        for layer in model:
            layer.wgrad_queue = queue
        ddp = DistributedDataParallel(model, config, process_group=group)
        group.delay = 0.002
        group.intervals.clear()
        with sleeping_wgrads() as wgrads:
            for index in range(microbatches + lag):
                if index < microbatches:
                    with nullcontext() if index == microbatches - 1 else ddp.no_sync(), queue.microbatch(index):
                        loss_of(ddp, batch(index, rank)).backward()
                queue.drain_microbatch(index - lag)
            ddp.finish_grad_sync()
        ended = {entry.bucket: wgrad.end for entry, wgrad in zip(queue.log, wgrads, strict=True)}
        called = [interval.queued for interval in group.intervals]
        assert len(called) == LAYERS
        return [(bucket, ended[bucket], called[bucket]) for bucket in range(LAYERS)]


@pytest.mark.in_turn
@pytest.mark.parametrize("lag", [0, 2, 4])
@pytest.mark.sampled(1)
def test_no_bucket_launches_before_its_last_weight_gradient(lag: int) -> None:
    """Every weight gradient is delayed; W may lag B by any number of microbatches. Checked from the records."""
    for ranks in run_ranks(lagging, 2, lag):
        for bucket, last_wgrad, launched in ranks:
            assert last_wgrad <= launched, bucket
