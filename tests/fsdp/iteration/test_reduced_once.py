"""Units that keep whole gradients under ``no_sync`` and reduce them once in an iteration: what is trained, and how
often ranks talk.

To the bit like a data-parallel model that sums microbatches where they are computed, and reduces the sum: inside an
instance first, then across.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import assert_same_files
from loops import assert_same
from parity_models import Trained
from sharded_training import (
    DELAYS,
    UNITS,
    Job,
    Sharded,
    assert_agrees,
    mesh_of,
    reduced_once,
    reference,
    shard,
    train_sharded,
)
from sharded_twin import Net, assert_same_grads, batches_of, both, mean_loss, one_backward, plain_grads, rank_and_size
from torch import Tensor, nn

from maingrad.ddp import save_checkpoint
from maingrad.ddp.torch_grads.sharded_grad import ShardedGrad
from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear

STEPS = 3
ALL = (*UNITS, "")

# ---- Parity. ----


@functools.lru_cache(maxsize=8)
def data_parallel(job: Job, once: frozenset[str]) -> list[Trained]:
    return simulate(reference, job.ranks, job, once)


def check(job: Job, **how: Any) -> list[Sharded]:
    sharded = simulate(train_sharded, job.ranks, job, seed=job.ranks)
    neutral = job._replace(units=(), placements="", delay="none", reshard=None, holding=())
    whole = data_parallel(neutral, reduced_once(job))
    replicas = 1 if job.placements == "hsdp_zero1" else job.instances
    assert_agrees(sharded, whole, replicas=replicas, **how)
    return sharded


KINDS: dict[str, tuple[str, bool | None]] = {
    "zero2": ("zero2", None),
    "zero3, resharded": ("zero3", True),
    "zero3, kept": ("zero3", False),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [3, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_agree_to_the_bit(kind: str, microbatches: int, fused: bool, delay: str, ranks: int) -> None:
    placements, reshard = KINDS[kind]
    options = {"fused": fused, "delay": delay, "microbatches": microbatches, "reshard": reshard}
    check(Job("everything", UNITS, placements, inner=ranks, steps=STEPS, holding=ALL, **options))


@pytest.mark.in_turn
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("microbatches", [3, 1])
@pytest.mark.parametrize("placements", ["hsdp", "hsdp_zero1"])
@pytest.mark.sampled(1)
def test_hybrids_agree_to_the_bit(placements: str, microbatches: int, inner: int, fused: bool, delay: str) -> None:
    options = {"fused": fused, "delay": delay, "microbatches": microbatches}
    check(Job("everything", UNITS, placements, instances=2, inner=inner, steps=STEPS, holding=ALL, **options))


@pytest.mark.parametrize("placements", ["zero3", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_microbatches_are_summed_before_they_are_reduced(placements: str) -> None:
    """A check of the tests above: with another order of sums the bits differ."""
    job = Job("shapes", ("odd", "prime"), placements, 2 if placements == "hsdp" else 1, 2, microbatches=3, steps=STEPS)
    held = check(job._replace(holding=("odd", "prime", "")))
    reduced_each = check(job)
    assert [trained.losses for trained in held] != [trained.losses for trained in reduced_each]


@pytest.mark.parametrize("placements", ["zero2", pytest.param("hsdp_zero1", marks=pytest.mark.slow)])
def test_bf16_over_fp32_masters(placements: str) -> None:
    instances, inner = (2, 2) if placements.startswith("hsdp") else (1, 3)
    job = Job("shapes", ("odd", "prime"), placements, instances, inner, microbatches=3, low=True, steps=STEPS)
    check(job._replace(holding=("odd", "prime", "")))


# ---- Some units hold, and others reduce every microbatch. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("delay", ["none", "modules, lagging", "queue"])
@pytest.mark.parametrize("holding", [("",), UNITS, ("odd", "frozen_weight", "unused_layer")], ids=str)
@pytest.mark.parametrize(("placements", "instances"), [("zero3", 1), ("hsdp", 2), ("zero2", 1)])
@pytest.mark.sampled(1)
def test_each_unit_as_it_was_told(placements: str, instances: int, holding: tuple[str, ...], delay: str) -> None:
    job = Job("everything", UNITS, placements, instances, 2, delay=delay, microbatches=3, steps=STEPS)
    check(job._replace(holding=holding))


@pytest.mark.in_turn
@pytest.mark.parametrize("holding", [("experts.1",), ("",), ("experts.0", "experts.1", "")], ids=str)
@pytest.mark.sampled(1)
def test_experts_on_a_mesh_of_their_own(holding: tuple[str, ...]) -> None:
    """Ranks 0 and 2 share experts, ranks 1 and 3 others. All experts have seen the tokens of all four ranks."""
    job = Job(inner=4, microbatches=3, variants=2, steps=STEPS, holding=holding)
    check(job, holders=lambda name: [(0, 2), (1, 3)] if name.startswith("experts") else [range(4)])


class Nested(nn.Module):
    """A unit in a unit: the inner unit's parameters do not belong to the outer unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Net()
        self.after = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inside(x).tanh())


@pytest.mark.parametrize("holds", [(False, True, False), (True, False, True), (None, True, None)], ids=str)
@pytest.mark.sampled(1)
def test_a_unit_inside_another_has_a_will_of_its_own(holds: Sequence[bool | None]) -> None:
    """A block, the net around it, and the model around that."""

    def shard_each(model: Any) -> None:
        for module, held in zip((model.inside.blocks[1], model.inside, model), holds, strict=True):
            fully_shard(module, reduce_every_microbatch=None if held is None else not held)

    def on_each_rank() -> list[int]:
        rank, size = rank_and_size()
        model, twin = both(Nested, shard_each)
        with model.record_timeline() as timeline:
            one_backward(model, batches_of(rank, 3))
        assert_same_grads(model, plain_grads(twin, one_backward, [batches_of(other, 3) for other in range(size)]))
        units = ("inside.blocks.1.linear", "inside.head", "after.bias")
        return [sum(name in span.bucket for span in timeline.buckets) for name in units]

    assert simulate(on_each_rank, 2) == [[1 if held else 3 for held in holds]] * 2


# ---- Collectives. ----

LAUNCHED = re.compile(r"launch (\w+?)(?:_single)? (?:SUM )?float\d+\[\d+\] of group '\w+' \(ranks (.*)\)")


def reductions(placements: str, instances: int, **how: Any) -> list[tuple[list[str], list[str]]]:
    """Of rank 0, in each stretch of an iteration: what reduced inside the instance, and across."""
    schedule: list[tuple[int, str]] = []
    simulate(an_iteration, 2 * instances, schedule, placements, instances, schedule=schedule, **how)
    stretches: list[tuple[list[str], list[str]]] = []
    for rank, event in schedule:
        if rank == 0 and event == "stretch":
            stretches.append(([], []))
        found = LAUNCHED.fullmatch(event) if rank == 0 and stretches else None
        if found is not None and found[1] in ("reduce_scatter", "reduce_scatter_tensor", "all_reduce"):
            stretches[-1][found[2] != "0, 1"].append(found[1])
    return stretches


def an_iteration(
    schedule: list[tuple[int, str]],
    placements: str,
    instances: int,
    *,
    holding: Sequence[str] = ("blocks.0", "blocks.1", "blocks.2", ""),
    synced: Sequence[bool] = (False, False, True),
    **how: Any,
) -> None:
    """The second iteration: a stretch for each microbatch, and one for ``finish_grad_sync``."""
    torch.manual_seed(0)
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    mesh = mesh_of(instances, 2)
    model = shard(Net(), blocks, holding=holding, placements=placements, mesh=mesh, **how)
    one_backward(model, batches_of(dist.get_rank(), 1, dtype=torch.float32))
    model.zero_grad()
    for batch, final in zip(batches_of(dist.get_rank(), 3, dtype=torch.float32), synced, strict=True):
        schedule.append((dist.get_rank(), "stretch"))
        with nullcontext() if final else model.no_sync():
            mean_loss(model(batch)).backward()
    schedule.append((dist.get_rank(), "stretch"))
    model.finish_grad_sync()
    model.finish_grad_sync()


NONE: tuple[list[str], list[str]] = ([], [])


@pytest.mark.parametrize("placements", ["zero2", "zero3"])
@pytest.mark.sampled(1)
def test_each_unit_is_reduced_once_in_the_last_microbatch(placements: str) -> None:
    once = (["reduce_scatter"] * 4, [])
    assert reductions(placements, 1) == [NONE, NONE, once, NONE]
    assert reductions(placements, 1, synced=(False, False, False)) == [NONE, NONE, NONE, once]
    assert reductions(placements, 1, synced=(True, True, True)) == [once, once, once, NONE]
    each = reductions(placements, 1, holding=())
    assert each == [once, once, once, NONE], "those that do not hold"


@pytest.mark.parametrize(("placements", "across"), [("hsdp", "all_reduce"), ("hsdp_zero1", "reduce_scatter")])
@pytest.mark.sampled(1)
def test_across_instances_once_as_well(placements: str, across: str) -> None:
    once = (["reduce_scatter"] * 4, [across] * 4)
    assert reductions(placements, 2) == [NONE, NONE, once, NONE]
    assert reductions(placements, 2, synced=(False, False, False)) == [NONE, NONE, NONE, once]


def test_only_units_that_were_told_to_hold() -> None:
    some = (["reduce_scatter"] * 2, [])
    all_of_them = (["reduce_scatter"] * 4, [])
    found = reductions("zero3", 1, holding=("blocks.1", ""))
    assert found == [some, some, all_of_them, NONE]
    across = [(inside, ["all_reduce"] * 4 if inside == all_of_them[0] else []) for inside, _ in found]
    assert reductions("hsdp", 2, holding=("blocks.1", "")) == across


class Delays(nn.Module):
    """A layer with a delayed weight gradient, and a layer without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = Linear(7, 3, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("where", ["inside no_sync", "outside", "at the end"])
def test_which_microbatch_is_the_last_is_said_by_its_backward(where: str) -> None:
    """A drain after ``no_sync``, of gradients that a backward within it has delayed, reduces nothing."""

    def on_each_rank() -> list[int]:
        model = shard(Delays(), ("first", "second"), holding=("first", "second", ""))
        seen = []
        with model.record_timeline() as timeline:
            launched = counted_reductions(model)
            for index, batch in enumerate(batches_of(dist.get_rank(), 3, dtype=torch.float32)):
                with model.no_sync() if index < 2 else nullcontext():
                    mean_loss(model(batch)).backward()
                    if where == "inside no_sync":
                        model.second.backward_dw()
                if where == "outside" or (where == "at the end" and index):
                    model.second.backward_dw()
                seen.append(len(launched))
            if where == "at the end":
                model.second.backward_dw()
                seen.append(len(launched))
        assert len(timeline.buckets) == len(launched)
        assert all(type(param.grad) is ShardedGrad for param in model.parameters())
        return seen

    # Two units' buckets, and one of the delayed weight.
    assert simulate(on_each_rank, 2) == [[0, 0, 3] if where != "at the end" else [0, 0, 2, 3]] * 2


def counted_reductions(model: FSDPModule) -> list[str]:
    """A list that gets a name at each reduction that is launched."""
    launched: list[str] = []
    launcher = root_of(model).grads.launcher
    launch = launcher.launch

    def noting_launch(bucket: Any, start: Any) -> None:
        launched.append(bucket.name)
        launch(bucket, start)

    launcher.launch = noting_launch  # type: ignore[method-assign]
    return launched


# ---- What is saved. ----


def trained_and_saved(folder: Path, holding: Sequence[str], microbatches: int) -> dict[str, Tensor]:
    """Two steps and a checkpoint; the state dict on this rank."""
    torch.manual_seed(0)
    model = shard(Net(), ("blocks.0", "blocks.1", "blocks.2"), holding=holding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        one_backward(model, batches_of(dist.get_rank(), microbatches, step=step, dtype=torch.float32))
        for param in model.parameters():  # sums that were made in another order are no other sums then
            param.grad.copy_((param.grad.detach() * 64).round() / 64)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, model, optimizer)
    return {name: value.to_local().clone() for name, value in model.state_dict().items()}


@pytest.mark.in_turn
def test_checkpoints_do_not_tell_how_often_gradients_were_reduced(tmp_path: Path) -> None:
    holding = ("blocks.0", "blocks.1", "blocks.2", "")
    held = simulate(trained_and_saved, 2, tmp_path / "once", holding, 3)
    each = simulate(trained_and_saved, 2, tmp_path / "each", (), 3)
    fewer = simulate(trained_and_saved, 2, tmp_path / "fewer", holding, 2)
    for ours, theirs, others in zip(held, each, fewer, strict=True):
        assert_same(ours, theirs)
        assert not torch.equal(ours["head.weight"], others["head.weight"])
    assert_same_files(tmp_path / "once", tmp_path / "each")
