"""What an iteration over sharded parameters does on GPUs: in which order, on which streams, and never on the host."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from sharded_on_gpus import (
    COPYING,
    FORMS,
    HYBRIDS,
    MAX_NORM,
    NUM_BLOCKS,
    SLEEP_CYCLES,
    Form,
    Model,
    batch,
    here,
    loss_of,
    nccl,
    relative_error,
    shard,
    slowed,
    two_instances,
    whole,
)
from torch import Tensor, nn

from maingrad.ddp.buckets.reducer import BucketLauncher
from maingrad.ddp.collectives.timeline import BackwardSpan, BucketSpan, GatherSpan, WaitSpan
from maingrad.ddp.gathers.param_gather import ParamGather
from maingrad.fsdp import fully_shard
from maingrad.te_integration import Linear


def iteration(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, *, delayed: bool = False) -> None:
    for index in range(2):
        with nullcontext() if index else model.no_sync():
            loss_of(model, tokens).backward()
            if delayed:
                model.drain()
    model.finish_grad_sync()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def iterations_without_a_host_wait() -> bool:
    group = nccl()
    forms = FORMS | COPYING
    if dist.get_world_size() == 4:
        forms |= HYBRIDS
        mesh = two_instances()
    for form in forms.values():
        model = shard(Model(delayed=form.delayed).cuda(), form, mesh if form.placements.startswith("hsdp") else group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        tokens = batch(0, 0, dist.get_rank()).cuda()
        for _ in range(2):
            iteration(model, optimizer, tokens, delayed=form.delayed)
        with cuda_waits_are_errors():
            for _ in range(2):
                iteration(model, optimizer, tokens, delayed=form.delayed)
    return True


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]
)
def test_no_iteration_waits_on_the_host(ranks: int) -> None:
    assert all(run_ranks(iterations_without_a_host_wait, ranks, timeout=100.0))


@contextmanager
def issued() -> Iterator[list[tuple[str, int]]]:
    """What is issued for the blocks, in order: ("gather" or "reduce", index of the block)."""
    log: list[tuple[str, int]] = []
    start, launch = ParamGather.start, BucketLauncher.launch

    def note(what: str, bucket: str) -> None:
        found = re.match(r"blocks\.(\d+)\.", bucket)
        if found:
            log.append((what, int(found[1])))

    def noting_start(self: ParamGather, *args: Any, **kwargs: Any) -> None:
        note("gather", self.name)
        start(self, *args, **kwargs)

    def noting_launch(self: BucketLauncher, bucket: Any, *how: Any) -> None:
        note("reduce", bucket.records[0].name)
        launch(self, bucket, *how)

    ParamGather.start, BucketLauncher.launch = noting_start, noting_launch  # type: ignore[method-assign]
    try:
        yield log
    finally:
        ParamGather.start, BucketLauncher.launch = start, launch  # type: ignore[method-assign]


def order_of_backward() -> list[tuple[str, int]]:
    model = shard(Model().cuda(), Form("zero3"), nccl())
    tokens = batch(0, 0, dist.get_rank()).cuda()
    loss_of(model, tokens).backward()
    loss = loss_of(model, tokens)
    with issued() as log:
        loss.backward()
    return log


@pytest.mark.gpu(2)
def test_backward_issues_gathers_before_the_reduction_that_they_would_wait_behind() -> None:
    for log in run_ranks(order_of_backward, 2, timeout=60.0):
        assert [index for what, index in log if what == "reduce"] == list(reversed(range(NUM_BLOCKS)))
        # The last block stays from forward; each other one is gathered once.
        assert [index for what, index in log if what == "gather"] == list(reversed(range(NUM_BLOCKS - 1)))
        for index in range(1, NUM_BLOCKS):
            assert log.index(("gather", index - 1)) < log.index(("reduce", index)), log


class Recorded(NamedTuple):
    """The entries of a timeline in one iteration."""

    backwards: list[BackwardSpan]
    reductions: list[BucketSpan]
    gathers: list[GatherSpan]
    waits: list[WaitSpan]


def timeline_under_long_computation() -> Recorded:
    """The timeline of a third iteration; each block takes 50 ms in forward and in backward."""
    computing = [False]

    def pause(where: str) -> None:
        if computing[0]:
            torch.cuda._sleep(SLEEP_CYCLES // 2)

    model: Any = shard(Model(pause).cuda(), Form("zero3"), nccl())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = batch(0, 0, dist.get_rank()).cuda()
    for _ in range(2):
        iteration(model, optimizer, tokens)
    computing[0] = True
    with model.record_timeline() as timeline:
        iteration(model, optimizer, tokens)
    return Recorded(timeline.backwards, timeline.buckets, timeline.gathers, timeline.waits)


@pytest.mark.gpu(2)
def test_collectives_run_under_computation_and_the_timeline_says_so() -> None:
    for recorded in run_ranks(timeline_under_long_computation, 2, timeout=60.0):
        intermediate, final = recorded.backwards
        assert (intermediate.synced, final.synced) == (False, True)
        assert final.end - final.start > 0.04 * NUM_BLOCKS
        assert len(recorded.reductions) == 2 * (NUM_BLOCKS + 1)
        for span in recorded.reductions:
            assert 0 <= span.ready <= span.launched <= span.finished
        for gather in recorded.gathers:
            assert 0 <= gather.launched <= gather.finished
        # A reduction takes far less than a block. A block's pause is a hook on its output, which comes before the hook
        # that sends the gradients of the block above: those of the last two units are sent when all pauses are over.
        for backward in recorded.backwards:
            inside = [span for span in recorded.reductions if backward.start <= span.launched <= backward.end]
            times = [(span.bucket, span.ready, span.launched, span.finished) for span in recorded.reductions]
            assert sum(span.finished < backward.end for span in inside) >= NUM_BLOCKS - 2, f"{backward}: {times}"
        assert sum(wait.end - wait.start for wait in recorded.waits) < 0.03, recorded.waits


# ---- Streams inside a forward. ----


class SlowGrad(torch.autograd.Function):
    """The identity, whose backward takes long, on the stream that forward ran on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES // 2)
        return grads[0].clone()


class TwoStreams(nn.Module):
    """One branch runs on a stream of its own, in forward and therefore in backward."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.here = Linear(64, 64, fuse_wgrad_accumulation=fused)
        self.there = Linear(64, 64, fuse_wgrad_accumulation=fused)
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            return self.here(x) + self.there(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = SlowGrad.apply(self.there(x))
        torch.cuda.current_stream().wait_stream(self.side)
        return self.here(x) + y


def two_streams(fused: bool, is_first: bool) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [TwoStreams(fused), TwoStreams(fused)]
    return nn.Sequential(*middle) if is_first else nn.Sequential(nn.Linear(64, 64), *middle)


def gradients_of_two_streams() -> list[tuple[str, dict[str, Tensor]]]:
    """Gradients of the third backward, for each type of layer, stream and placement."""
    group, found = nccl(), []
    x = torch.linspace(-1, 1, 640).view(10, 64).to(here())
    for placements in ("zero2", "zero3"):
        for fused in (True, False):
            for is_first in (True, False):
                model: Any = two_streams(fused, is_first).cuda()
                for unit in (*model, model):
                    if isinstance(unit, TwoStreams):
                        unit.side = torch.cuda.Stream()
                    fully_shard(unit, group, placements)
                with slowed("gather", dist.get_rank()):
                    for _ in range(3):
                        model.zero_grad()
                        model(x).square().sum().backward()
                grads = {name: whole(p, p.grad) for name, p in model.named_parameters()}
                found.append((f"{placements}, {fused=}, {is_first=}", grads))
    return found


@pytest.mark.gpu(2)
def test_gradients_and_parameters_on_several_streams_are_waited_for() -> None:
    for results in run_ranks(gradients_of_two_streams, 2, timeout=100.0):
        assert len(results) == 8
        for name, grads in results:
            model = two_streams(False, "is_first=True" in name)
            model(torch.linspace(-1, 1, 640).view(10, 64)).square().sum().backward()
            for param, value in model.named_parameters():
                assert value.grad is not None and relative_error(grads[param], value.grad) <= 1e-4, (name, param)
