"""Stages with sharded parameters, each a root of its own; and a norm over all stages of a pipeline."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, clip_grad_norm
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline import PipelineStage

WIDTH = 8
MICROBATCHES = 4
STAGES = 4
loss_fn = nn.functional.mse_loss
SCHEDULES = {
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
    "one stage, Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "one stage, ZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
}
PIPES = {"ZBV": 2, "one stage, Interleaved1F1B": STAGES, "one stage, ZeroBubble": STAGES}
"""Ranks of a pipeline, where it is more than one."""


def make_layers(fused: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused, name=f"layer {index}"),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
        )
        for index in range(STAGES)
    ]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    return x, 5 * torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)


def train_plain(steps: int, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """Norms before clipping, and the weights of two replicas' training in one process."""
    model = nn.Sequential(*make_layers(fused=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(steps):
        for replica in range(2):
            for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch(step, replica)), strict=True):
                (loss_fn(model(x), target) / MICROBATCHES / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: param.detach() for name, param in model.named_parameters()}


class Rank:
    """The stages of this rank: one, two in a V, or all of them where there is one rank in a pipeline."""

    def __init__(self, kind: str) -> None:
        pipes = PIPES.get(kind, 1)
        self.mesh = init_device_mesh("cpu", (2, pipes), mesh_dim_names=("dp", "pp"))
        rank = self.mesh.get_local_rank("pp")
        self.indices = {1: list(range(STAGES)), 2: [rank, STAGES - 1 - rank], STAGES: [rank]}[pipes]
        layers = make_layers(fused=True)
        self.layers = [layers[index] for index in self.indices]

    def connect(self, kind: str, models: list[nn.Module]) -> None:
        group = self.mesh.get_group("pp")
        self.stages = [
            PipelineStage(model, index, STAGES, torch.device("cpu"), group=group)
            for model, index in zip(models, self.indices, strict=True)
        ]
        self.schedule = SCHEDULES[kind](self.stages, MICROBATCHES, loss_fn, scale_grads=False)

    def step(self, step: int) -> None:
        x, target = batch(step, self.mesh.get_local_rank("dp"))
        given = {"target": target, "losses": []} if STAGES - 1 in self.indices else {}
        self.schedule.step(*((x,) if 0 in self.indices else ()), **given)


def total_norm(models: list[nn.Module], pipeline: dist.ProcessGroup) -> Tensor:
    """The norm as the documentation computes it: the norm of sharded gradients covers all ranks of a stage."""
    grads = [[param.grad for param in model.parameters()] for model in models]
    squares = torch.stack([nn.utils.get_total_norm(stage) for stage in grads]).square().sum()
    dist.all_reduce(squares, group=pipeline)
    return squares.sqrt()


def train_sharded(
    kind: str, placements: str, max_norm: float, fails: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    rank = Rank(kind)
    mesh: DeviceMesh = rank.mesh["dp"]
    models = [fully_shard(layer, mesh, placements) for layer in rank.layers]
    rank.connect(kind, models)
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    norms = []
    for step in range(2):
        if fails is not None:
            fail_at(rank, step, fails)
        rank.step(step)
        for model in models:
            model.finish_grad_sync()
        norm = total_norm(models, rank.mesh.get_group("pp"))
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, Tensor] = {}
    for index, model in zip(rank.indices, models, strict=True):
        with model.unsharded():
            weights |= {f"{index}.{name}": param.detach().clone() for name, param in model.named_parameters()}
    return norms, weights


def fail_at(rank: Rank, step: int, forward: int) -> None:
    """A step of other data that fails on all replicas, and is abandoned."""
    seen = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == forward:
            raise ArithmeticError("in the middle")

    handles = [stage.submod[1].register_forward_pre_hook(fail) for stage in rank.stages]
    with pytest.raises(RuntimeError):
        rank.step(step + 1)
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError, match=r"an earlier step failed .* stage.abandon_step"):
        rank.step(step)
    for stage in rank.stages:
        stage.abandon_step()


def check(outcomes: list[tuple[list[float], dict[str, Tensor]]], max_norm: float) -> None:
    norms, weights = train_plain(2, max_norm)
    assert min(norms) > max_norm, "clipped"
    pipes = len(outcomes) // 2
    for mine, _ in outcomes:
        assert mine == pytest.approx(norms, rel=1e-5)
    for first in range(0, len(outcomes), pipes):
        found = {name: value for _, part in outcomes[first : first + pipes] for name, value in part.items()}
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert (found[name] - value).abs().max() < 1e-5, name


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.sampled(1)
def test_stages_of_sharded_parameters_train_as_one_model(kind: str, placements: str) -> None:
    check(simulate(train_sharded, 2 * PIPES.get(kind, 1), kind, placements, 0.5), 0.5)


@pytest.mark.parametrize("placements", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["Interleaved1F1B", "ZeroBubble"])
@pytest.mark.sampled(1)
def test_a_step_of_sharded_stages_that_failed_is_abandoned(kind: str, placements: str) -> None:
    check(simulate(train_sharded, 2, kind, placements, 0.5, fails=3 * STAGES), 0.5)


ONE_STAGE = "one stage, Interleaved1F1B"


def step_under_no_sync(schedule: list[tuple[int, str]], placements: str) -> None:
    """A step that a later one completes; words before and after each."""
    rank = Rank(ONE_STAGE)
    models = [fully_shard(layer, rank.mesh["dp"], placements) for layer in rank.layers]
    rank.connect(ONE_STAGE, models)
    for step in range(2):
        schedule.append((dist.get_rank(), f"step {step}"))
        with ExitStack() as stack:
            for model in models if step == 0 else ():
                stack.enter_context(model.no_sync())
            rank.step(step)


@pytest.mark.in_turn
def test_a_step_under_no_sync_reduces_nothing() -> None:
    """Whole gradients wait for the step that ends the iteration."""
    schedule: list[tuple[int, str]] = []
    simulate(step_under_no_sync, 2 * STAGES, schedule, "zero1", schedule=schedule)
    words = [word for rank, word in schedule if rank == 0]
    middle = words.index("step 1")
    parts = (words[:middle], words[middle:])
    counts = [sum(word.startswith("launch reduce_scatter") for word in part) for part in parts]
    assert counts[0] == 0 and counts[1] == 1


def train_wrapped(kind: str, max_norm: float, sharded: bool) -> tuple[list[float], dict[str, Tensor]]:
    rank = Rank(kind)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=sharded)
    models = [DistributedDataParallel(layer, config, process_group=rank.mesh.get_group("dp")) for layer in rank.layers]
    rank.connect(kind, models)
    optimizers = [DistributedOptimizer(model, 0.1, optimizer_class=torch.optim.SGD) for model in models]
    norms = []
    for step in range(2):
        rank.step(step)
        for model in models:
            model.finish_grad_sync()
        norms.append(float(clip_grad_norm(models, max_norm, pipeline_group=rank.mesh.get_group("pp"))))
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.step()
            model.zero_grad_buffer()
    named = zip(rank.indices, rank.layers, strict=True)
    return norms, {f"{i}.{name}": p.detach().clone() for i, layer in named for name, p in layer.named_parameters()}


@pytest.mark.in_turn
@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "ZeRO-1"])
@pytest.mark.parametrize("kind", ["ZeroBubble", "ZBV", "one stage, Interleaved1F1B"])
@pytest.mark.sampled(1)
def test_clipping_goes_by_the_norm_of_all_stages(kind: str, sharded: bool) -> None:
    check(simulate(train_wrapped, 2 * PIPES.get(kind, 1), kind, 0.5, sharded), 0.5)


def test_clipping_no_wrapper_is_refused() -> None:
    with pytest.raises(ValueError, match="no wrapper was given"):
        clip_grad_norm([], 1.0)
