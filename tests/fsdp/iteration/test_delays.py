"""Ranks that go on in any order, and gathers, reductions and computation that take long: nothing changes."""

import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from delayed_group import DELAY, DELAYED, Delays, Watched, delayed_group, new_groups_delayed
from gloo import run_ranks
from sharded_training import Job, shard, train_sharded
from sleepy import SleepInBackward
from stale_memory import stale_memory
from towers import WIDTH, Tower

from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

UNITS = ("odd", "low", "frozen_weight", "unused_layer")
SEEDS = range(1, 4)


@pytest.mark.in_turn
@pytest.mark.parametrize("delay", ["none", "modules", "queue, lagging"])
@pytest.mark.parametrize(
    ("placements", "instances"),
    [("zero1", 1), ("zero2", 1), ("zero3", 1), ("hybrid", 2), ("hsdp", 2), ("hsdp_zero1", 2)],
)
@pytest.mark.sampled(1)
def test_no_order_of_ranks_changes_a_bit(placements: str, instances: int, delay: str) -> None:
    """Memory that a rank reads without a wait contains NaN, or values of the last microbatch."""
    job = Job(
        units=UNITS,
        placements=placements,
        instances=instances,
        inner=2 if instances > 1 else 3,
        delay=delay,
        microbatches=2,
        steps=3,
    )
    prompt = simulate(train_sharded, job.ranks, job)
    assert len({loss for trained in prompt for loss in trained.losses}) == 6 * job.ranks
    for seed in SEEDS:
        with stale_memory() as taken:
            shuffled = simulate(train_sharded, job.ranks, job, seed=seed)
        assert taken
        for ours, theirs in zip(shuffled, prompt, strict=True):
            assert ours.losses == theirs.losses
            for mine, other in zip((*ours.weights, *ours.grads), (*theirs.weights, *theirs.grads), strict=True):
                assert mine.keys() == other.keys()
                for name, piece in mine.items():
                    assert piece is None or torch.equal(piece.values, other[name].values), name


# ---- Delays, on real processes. ----

LAYERS = ("layer0", "layer1", "layer2")
STEPS = 2
MICROBATCHES = 2


def train_delayed(placements: str, by_rank: list[Delays]) -> Watched:
    """Two steps of two microbatches; three layers, each a unit that sleeps in backward."""
    delays = by_rank[dist.get_rank()]
    sleep = SleepInBackward(0.0)
    torch.manual_seed(0)
    losses = []
    with delayed_group(0.0) as reduce, new_groups_delayed(0.0) as made, stale_memory():
        tower = Tower(sleep, fused=True, registered=range(3), unused_spares=[1])
        model = shard(tower, LAYERS, mesh=reduce, placements=placements)
        root_of(model)
        (gather,) = made
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
        reduce.delay, gather.delay, sleep.seconds = delays
        reduce.intervals.clear()
        start = time.perf_counter()
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            for index in range(MICROBATCHES):
                with nullcontext() if index == MICROBATCHES - 1 else model.no_sync():
                    loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - start
        weights = [param.detach().clone() for param in model.parameters()]
        return Watched(losses, weights, len(reduce.intervals), len(gather.intervals), len(sleep.intervals), seconds)


REDUCTIONS = {"zero1": STEPS * 3, "zero2": STEPS * MICROBATCHES * 3, "zero3": STEPS * MICROBATCHES * 3}


EVERYTHING = [
    pytest.param(placements, what, marks=pytest.mark.slow)
    for placements in REDUCTIONS
    for what in DELAYED
    if (placements, what) != ("zero3", "each rank something else")
]


@pytest.mark.parametrize(("placements", "what"), [("zero3", "each rank something else"), *EVERYTHING])
@pytest.mark.slow
def test_delays_of_100_ms_change_nothing(placements: str, what: str) -> None:
    prompt: Sequence[Watched] = run_ranks(train_delayed, 2, placements, [Delays(0, 0, 0)] * 2)
    delayed: Sequence[Watched] = run_ranks(train_delayed, 2, placements, DELAYED[what])
    for ours, theirs in zip(delayed, prompt, strict=True):
        assert ours.losses == theirs.losses
        assert len(set(ours.losses)) == STEPS * MICROBATCHES
        for one, other in zip(ours.weights, theirs.weights, strict=True):
            assert torch.equal(one, other)
        assert (ours.reductions, ours.computes) == (REDUCTIONS[placements], STEPS * MICROBATCHES * 3)
        assert ours.gathers == theirs.gathers >= STEPS * 3
        assert ours.seconds > 3 * DELAY
