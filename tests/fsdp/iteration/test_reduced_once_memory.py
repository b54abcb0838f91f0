"""Memory of an iteration whose gradients are reduced once: whole gradients until then, sums from then on."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from sharded_training import (
    UNITS,
    Job,
    assert_agrees,
    mesh_of,
    nbytes_of_sums,
    reduced_once,
    reference,
    shard,
    train_sharded,
)
from stale_memory import stale_memory
from torch import Tensor, nn

from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear

WIDTH = 64  # nothing is padded
NUM_BLOCKS = 6
BLOCKS = tuple(f"blocks.{index}" for index in range(NUM_BLOCKS))


class Block(nn.Module):
    """A feed-forward layer around a residual."""

    def __init__(self, delayed: bool) -> None:
        super().__init__()
        self.up = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tower(nn.Module):
    """Blocks under a head, which the outermost unit has; ``watch(word)`` where backward reaches each block."""

    def __init__(self, *, delayed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(delayed) for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[int] = []
        self.meter: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda _: self.seen.append(self.meter.held_nbytes))
        return self.head(x)

    def backward_dw(self) -> None:
        for block in reversed(self.blocks):
            block.up.backward_dw()


class Seen(NamedTuple):
    """Bytes of whole gradients and of sums."""

    grads: tuple[int, ...]
    """Held after each microbatch."""
    sums: tuple[int, ...]
    """The same."""
    peak: int
    """Of whole gradients, in the last backward."""
    entering: tuple[int, ...]
    """Whole gradients when the last backward reaches each block, the last block first."""


def batch(index: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * index + rank))


def iterations(
    placements: str = "zero3",
    instances: int = 1,
    holding: Sequence[str] = (*BLOCKS, ""),
    *,
    delayed: bool = False,
    microbatches: int = 3,
    finish: bool = False,
) -> list[Seen]:
    """Three iterations; ``finish``: all microbatches are under ``no_sync``."""
    mesh = mesh_of(instances, dist.get_world_size() // instances)
    model = shard(Tower(delayed=delayed), BLOCKS, holding=holding, placements=placements, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = root_of(model)
    meter = model.meter = root.grads.meter
    found = []
    for _ in range(3):
        grads, sums = [], []
        for index in range(microbatches):
            final = index == microbatches - 1
            meter.peak_nbytes = meter.held_nbytes
            model.seen = []
            with model.no_sync() if finish or not final else nullcontext():
                model(batch(index)).square().mean().backward()
                if delayed:
                    model.backward_dw()
            if final and finish:
                model.finish_grad_sync()
            grads.append(meter.held_nbytes)
            sums.append(sum(nbytes_of_sums(bucket.grad_shard) for bucket in root.buckets))
        found.append(Seen(tuple(grads), tuple(sums), meter.peak_nbytes, tuple(model.seen)))
        optimizer.step()
        optimizer.zero_grad()
    return found


BLOCK = 4 * sum(param.numel() for param in Block(False).parameters())
HEAD = 4 * WIDTH * WIDTH
ALL = NUM_BLOCKS * BLOCK + HEAD


@pytest.mark.parametrize("finish", [False, True], ids=["", "finished by hand"])
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize(
    ("placements", "instances", "inner"), [("zero3", 1, 2), ("zero2", 1, 4), ("hsdp", 2, 2), ("hsdp_zero1", 2, 2)]
)
@pytest.mark.sampled(1)
def test_whole_gradients_are_held_once_and_sums_come_with_the_last(
    placements: str, instances: int, inner: int, delayed: bool, finish: bool
) -> None:
    """P bytes of fp32 gradients over i ranks of an instance, d that hold different shards::

    after each microbatch but the last   P                  whole gradients
    at most in the last                  P                  the same memory
    after it                             P/d                sums
                                         P/i                with instances: what was summed inside one
    """
    shards = inner * (instances if placements == "hsdp_zero1" else 1)
    sums = ALL // shards + (ALL // inner if instances > 1 else 0)
    found = simulate(iterations, instances * inner, placements, instances, delayed=delayed, finish=finish)
    for rank in found:
        for seen in rank:
            assert seen.grads == (ALL, ALL, 0)
            assert seen.sums == (0, 0, sums)
            assert seen.peak == ALL


def test_whole_gradients_go_as_the_last_backward_passes_them() -> None:
    for rank in simulate(iterations, 2):
        for seen in rank:
            # Those that backward comes to, the one that it has not left yet, and two that are being reduced.
            left = [min(NUM_BLOCKS, index + 1 + 1 + 2) for index in reversed(range(NUM_BLOCKS))]
            assert seen.entering == tuple([HEAD + count * BLOCK for count in left])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.sampled(1)
def test_one_microbatch_holds_no_more_than_ever(microbatches: int) -> None:
    """With one microbatch the pool is as small as with a reduction in every microbatch."""
    for rank in simulate(iterations, 2, microbatches=microbatches):
        for seen in rank:
            assert seen.peak == (ALL if microbatches == 2 else HEAD + 2 * BLOCK)


def test_a_unit_that_does_not_hold_leaves_with_its_microbatch() -> None:
    holding = ("blocks.1", "blocks.4")
    for rank in simulate(iterations, 2, holding=holding):
        for seen in rank:
            # Between microbatches also the last two that are being reduced, and the outermost's.
            assert seen.grads == (HEAD + 4 * BLOCK, HEAD + 4 * BLOCK, 0)
            assert seen.sums == tuple([(ALL - 2 * BLOCK) // 2] * 2 + [ALL // 2])
            assert seen.peak <= HEAD + 4 * BLOCK


def test_what_was_given_up_has_no_memory_when_the_next_backward_begins() -> None:
    def on_each_rank() -> list[tuple[int, int]]:
        model = shard(Tower(), BLOCKS, holding=(*BLOCKS, ""))
        meter = model.meter = root_of(model).grads.meter
        found = []
        for _ in range(2):
            with model.no_sync():
                model(batch(0)).square().mean().backward()
            held = meter.held_nbytes
            model.zero_grad()
            model.seen = []
            model(batch(1)).square().mean().backward()
            found.append((held, model.seen[0]))
            model.zero_grad()
        return found

    assert simulate(on_each_rank, 2) == [[(ALL, HEAD)] * 2] * 2


# ---- Stale memory. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("delay", ["none", "modules", "queue, lagging"])
@pytest.mark.parametrize("holding", [(*UNITS, ""), ("odd", "unused_layer")], ids=["all", "some"])
@pytest.mark.parametrize(("placements", "instances"), [("zero2", 1), ("zero3", 1), ("hsdp", 2), ("hsdp_zero1", 2)])
@pytest.mark.sampled(1)
def test_stale_memory_never_leaks(placements: str, instances: int, holding: tuple[str, ...], delay: str) -> None:
    """The pool's memory and every ``torch.empty`` are filled with NaN, which no sum may read."""
    job = Job("everything", UNITS, placements, instances, 2, delay=delay, microbatches=3, steps=2, holding=holding)
    with stale_memory() as taken:
        sharded = simulate(train_sharded, job.ranks, job)
    assert taken
    neutral = job._replace(units=(), placements="", delay="none", holding=())
    whole = simulate(reference, job.ranks, neutral, reduced_once(job))
    assert_agrees(sharded, whole, replicas=1 if placements == "hsdp_zero1" else instances)
