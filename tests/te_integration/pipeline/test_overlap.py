"""Reductions run under a schedule's later computation, with wrapped chunks and with sharded chunks (a root each).

Measured on two gloo processes, where each weight gradient and each reduction takes 50 ms."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import CollectiveInterval, delayed_group
from gloo import run_ranks
from pipelined import reduced_grads
from plain_grads import plain_grads
from sleeping_wgrads import SLEEP, Wgrad, share_under, sleeping_wgrads
from torch import Tensor, nn
from towers import repeat_on_a_busy_machine

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.buckets.bucket import Phase
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline.executor import ScheduleExecutor
from maingrad.te_integration.pipeline.order import parse_order

WIDTH = 16
LAYERS = 4
LAGGING = [1, 1, 2, -2, 2, -2, -2.5, -2.5, -1, -1.5, -1, -1.5]
UNDELAYED = [1, 2, -2, 1, 2, -2, -1, -1]
ONE_CHUNK = [1, 1, -1, -1, -1.5, -1.5]


class Run(NamedTuple):
    wgrads: list[Wgrad]
    collectives: list[CollectiveInterval]
    worst_error: float


def make_chunks(order: list[float]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(
            *(
                Linear(
                    WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=-chunk - 0.5 in order
                )
                for _ in range(LAYERS)
            )
        )
        for chunk in range(1, int(max(order)) + 1)
    )


def batch(index: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * index + rank))


def loss_fn(y: Tensor, microbatch: int) -> Tensor:
    return y.square().mean()


def expected(order: list[float]) -> dict[str, Tensor]:
    plain = make_chunks([max(order)])
    for chunk in plain:
        for layer in chunk:
            layer.fuse_wgrad_accumulation = False
    batches = [batch(index, rank) for rank in range(dist.get_world_size()) for index in range(order.count(1))]
    model = nn.Sequential(*plain)
    return plain_grads(model, batches, lambda model, x: loss_fn(model(x), 0), scale=1 / dist.get_world_size())


def measure(order: list[float], how: str) -> Run:
    """One run of the order; ``how``: a wrapper around all chunks, one for each, or sharded."""
    rank, grads = dist.get_rank(), expected(order)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=how == "ZeRO-1", bucket_size=1
    )
    with delayed_group(0.0) as group:
        chunks = make_chunks(order)
        if how == "sharded":
            models = [fully_shard(chunk, group, "zero1", bucket_size=1) for chunk in chunks]
        else:
            parts = chunks if how == "each" else [chunks]
            models = [DistributedDataParallel(part, config, process_group=group) for part in parts]
        executor = ScheduleExecutor(parse_order(order), models if how in ("sharded", "each") else list(chunks))
        inputs = [batch(index, rank) for index in range(order.count(1))]
        group.delay = SLEEP
        group.intervals.clear()
        with sleeping_wgrads() as wgrads:
            executor.run(inputs, loss_fn)
            for model in models:
                model.finish_grad_sync()
        intervals = [interval for interval in group.intervals if interval.op != "allgather"]  # roots that meet
        group.delay = 0.0
        worst = 0.0
        if how == "sharded":
            for name, param in chunks.named_parameters():
                assert param.grad is not None
                worst = max(worst, abs(float(param.grad.norm() - grads[name].norm())))
        else:
            for index, model in enumerate(models):
                for name, grad in reduced_grads(model).items():
                    plain = grads[f"{index}.{name}" if how == "each" else name]
                    worst = max(worst, (grad - plain).abs().max().item())
        return Run(list(wgrads), intervals, worst)


def check_share(order: list[float], how: str, last: int) -> None:
    """Check that all reductions but the ``last`` ones run under computation."""

    def attempt() -> dict[str, str]:
        late = {}
        for rank, run in enumerate(run_ranks(measure, 2, order, how)):
            assert run.worst_error < 1e-6
            assert len(run.collectives) == LAYERS * int(max(order))
            assert len(run.wgrads) == len(run.collectives) * order.count(1)
            share = share_under(run.wgrads, run.collectives[:-last])
            if share < 0.8:
                late[f"rank {rank}"] = f"{share:.0%}"
        return late

    repeat_on_a_busy_machine(attempt)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["all-reduce", "ZeRO-1"])
@pytest.mark.parametrize("order", [LAGGING, UNDELAYED, ONE_CHUNK], ids=["lagging", "undelayed", "one chunk"])
@pytest.mark.sampled(1)
def test_each_bucket_reduces_under_what_comes_after(order: list[float], how: str) -> None:
    check_share(order, how, last=1)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["each", "sharded"])
@pytest.mark.sampled(1)
def test_a_chunk_with_a_wrapper_or_root_of_its_own_reduces_under_the_other(how: str) -> None:
    check_share(LAGGING, how, last=LAYERS)


# ---- The same, as a sequence of launches. ----


def launched_by_then(order: list[float], how: str) -> list[list[int]]:
    """By chunk: how many of its reductions are under way after each backward of the first chunk, and after the run."""
    chunks = make_chunks(order)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    models: list[nn.Module] = list(chunks)
    if how == "sharded":
        wrappers = models = [fully_shard(chunk, placements="zero1", bucket_size=1) for chunk in chunks]
        buckets = [[bucket.grad_bucket for bucket in model.grad_parts.root.buckets] for model in models]
    elif how == "each":
        wrappers = models = [DistributedDataParallel(chunk, config) for chunk in chunks]
        buckets = [list(model.buckets) for model in models]
    elif how == "inside":
        models = [nn.Sequential(*(DistributedDataParallel(layer, config) for layer in chunk)) for chunk in chunks]
        buckets = [[bucket for layer in model for bucket in layer.buckets] for model in models]
        wrappers = [layer for model in models for layer in model]
    else:
        wrappers = [wrapper := DistributedDataParallel(chunks, config)]
        names = [f"{chunk}." for chunk in range(len(chunks))]
        buckets = [[b for b in wrapper.buckets if b.records[0].name.startswith(name)] for name in names]
    seen: list[list[int]] = []

    def note(grad: Tensor | None = None) -> None:
        seen.append([sum(bucket.phase in (Phase.REDUCING, Phase.REDUCED) for bucket in mine) for mine in buckets])

    inputs = [batch(index, dist.get_rank()).requires_grad_() for index in range(order.count(1))]
    for x in inputs:
        x.register_hook(note)
    ScheduleExecutor(parse_order(order), models).run(inputs, loss_fn)
    note()
    for model in wrappers:
        model.finish_grad_sync()
    return seen


ALL = LAYERS
SEQUENCES = {
    # The last backward launches what it completes: before the chunk's step is over, and of the other chunk before that.
    ("undelayed", "around"): (UNDELAYED, [[0, ALL], [ALL, ALL], [ALL, ALL]]),
    ("undelayed", "each"): (UNDELAYED, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("undelayed", "inside"): (UNDELAYED, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("undelayed", "sharded"): (UNDELAYED, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("lagging", "around"): (LAGGING, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("lagging", "each"): (LAGGING, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("lagging", "inside"): (LAGGING, [[0, ALL], [0, ALL], [ALL, ALL]]),
    ("lagging", "sharded"): (LAGGING, [[0, ALL], [0, ALL], [ALL, ALL]]),
}


@pytest.mark.parametrize("order, how", SEQUENCES, ids="-".join)
def test_a_chunk_launches_when_it_is_complete(order: str, how: str) -> None:
    numbers, expected = SEQUENCES[order, how]
    assert simulate(launched_by_then, 2, numbers, how) == [expected, expected]
