"""One model cut into the stages of torch.distributed.pipelining, and the same model in one piece to compare with."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.buckets.bucket import Phase
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline import PipelineStage

WIDTH = 8
ROWS = 3
BLOCKS = 8
STEPS = 2
FUSED = {f"{block}.{layer}" for block in range(BLOCKS) for layer in ("in", "out")}


class Block(nn.Module):
    """Fused layers, a plain one and a norm: gradients that are delayed, and others that are not.

    The gate is used in some microbatches only, and one parameter never. Their buckets are the first to launch.
    """

    def __init__(self, index: int, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 2 * WIDTH, fuse_wgrad_accumulation=fused, name=f"{index}.in")
        self.down = Linear(2 * WIDTH, WIDTH, fuse_wgrad_accumulation=fused, name=f"{index}.out")
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.ParameterDict({"gate": torch.ones(WIDTH), "unused": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(torch.tanh(self.down(torch.relu(self.up(self.norm(x))))))
        return x + (y * self.seldom["gate"] if x[0, 0] > 0 else y)


def make_blocks(fused: bool = True) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({str(index): Block(index, fused) for index in range(BLOCKS)})


class Stage(nn.Module):
    """Some of the blocks, under the names they have in the whole model."""

    def __init__(self, blocks: nn.ModuleDict, first: int, last: int, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleDict({str(index): blocks[str(index)] for index in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def batch(step: int, replica: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(microbatches * ROWS, WIDTH, generator=generator)
    return x, torch.randn(microbatches * ROWS, WIDTH, generator=generator)


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Outcome(NamedTuple):
    """What one rank saw, step by step."""

    losses: list[list[float]]
    """Of the microbatches, where the last stage is."""
    grads: list[dict[str, Tensor]]
    """Every ``main_grad`` of the rank's stages after ``finish_grad_sync``."""
    launched: list[bool]
    """Whether every bucket's reduction was under way before ``finish_grad_sync``."""
    early: list[bool]
    """Whether some reduction was under way before the last W was over."""
    slots: list[dict[int, list[tuple[str, int, list[str]]]]]
    """By stage: slot, its microbatch, and the layers whose weight gradients ran in it."""
    planned: dict[int, list[tuple[str, int]]]
    """By stage: the backward slots of the schedule; empty where it does not write them down."""


def all_launched(ddp: DistributedDataParallel) -> bool:
    return all(bucket.phase in (Phase.REDUCING, Phase.REDUCED) for bucket in ddp.buckets)


def reduced_grads(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Every ``main_grad``, put together from the ranks' shards where they are sharded."""
    for bucket in ddp.buckets if ddp.ddp_config.use_distributed_optimizer else ():
        first, last = ddp.owned_range(bucket.layout)
        bucket.grad_data[:first] = 0
        bucket.grad_data[last:] = 0
        dist.all_reduce(bucket.grad_data, group=ddp.grids["dense"].inner)
    return {record.name: record.view.clone() for record in ddp.records}


def unpipelined(replica: int | None, microbatches: int, fused: bool, **config: Any) -> Outcome:
    """The model in one piece, weight gradients in backward; ``replica`` None: the rank's own."""
    replica = dist.get_rank() if replica is None else replica
    ddp = DistributedDataParallel(Stage(make_blocks(fused), 0, BLOCKS), DistributedDataParallelConfig(**config))
    losses, grads, launched = [], [], []
    for step in range(STEPS):
        x, target = (tensor.chunk(microbatches) for tensor in batch(step, replica, microbatches))
        losses.append([])
        for index in range(microbatches):
            loss = loss_fn(ddp(x[index]), target[index])
            losses[-1].append(loss.item())
            if index < microbatches - 1:
                with ddp.no_sync():
                    (loss / microbatches).backward()
            else:
                (loss / microbatches).backward()
        launched.append(all_launched(ddp))
        ddp.finish_grad_sync()
        grads.append(reduced_grads(ddp))
        ddp.zero_grad_buffer()
    return Outcome(losses, grads, launched, [], [], {})


def stage_indices(kind: str, rank: int, ranks: int) -> list[int]:
    if kind in ("1F1B", "GPipe", "ZeroBubble"):
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if kind in ("ZBV", "DualPipeV") else [rank, ranks + rank]


def make_schedule(kind: str, stages: list[pipelining.PipelineStage], microbatches: int, **options: Any) -> Any:
    if kind in ("1F1B", "GPipe"):
        return getattr(schedules, f"Schedule{kind}")(stages[0], microbatches, loss_fn, **options)
    name = {"ZBV": "ZBVZeroBubble", "ZeroBubble": "InterleavedZeroBubble"}.get(kind, kind)
    return getattr(schedules, f"Schedule{name}")(stages, microbatches, loss_fn, **options)


def make_stages(
    kind: str, pipes: dist.ProcessGroup, replicas: dist.ProcessGroup, stage_class: Any, fused: bool, **config: Any
) -> list[Any]:
    """This rank's stages, each wrapped."""
    ranks = dist.get_world_size(pipes)
    indices = stage_indices(kind, dist.get_rank(pipes), ranks)
    num_stages = ranks * len(indices)
    per_stage = BLOCKS // num_stages
    blocks = make_blocks(fused)
    stages = []
    for index in indices:
        module = Stage(blocks, index * per_stage, (index + 1) * per_stage)
        ddp = DistributedDataParallel(module, DistributedDataParallelConfig(**config), process_group=replicas)
        stages.append(stage_class(ddp, index, num_stages, torch.device("cpu"), group=pipes))
    return stages


def watch_slots(stage: PipelineStage, slots: list[tuple[str, int, list[str]]]) -> None:
    """Note what runs in each backward slot of ``stage``."""
    backward, weight = stage.backward_one_chunk, stage.backward_weight_one_chunk

    def run(slot: str, method: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        before = list(stage.queue.log)
        method(chunk, *args, **kwargs)
        ran = stage.queue.log[len(before) :]
        assert {record.microbatch for record in ran} <= {chunk}, f"slot {slot}{chunk} ran {ran}"
        slots.append((slot, chunk, [record.owner for record in ran]))

    def backward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        run("B" if kwargs.get("full_backward", True) else "I", backward, chunk, *args, **kwargs)

    def backward_weight_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        run("W", weight, chunk, *args, **kwargs)

    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


def watch_end(stage: PipelineStage, early: list[bool]) -> None:
    """Note whether a bucket was launched before the stage's work was over."""
    end = stage.perform_reduce_grad

    def perform_reduce_grad(factor: int) -> None:
        early.append(any(bucket.phase is Phase.REDUCING for bucket in stage.submod.buckets))
        end(factor)

    stage.perform_reduce_grad = perform_reduce_grad


def pipelined(
    kind: str, num_replicas: int, microbatches: int, fused: bool, config: dict[str, Any], recompute: bool = False
) -> Outcome:
    """A job for gloo ranks: ``num_replicas`` pipelines next to each other."""
    ranks = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, ranks), mesh_dim_names=("dp", "pp"))
    pipes, replicas = mesh.get_group("pp"), mesh.get_group("dp")
    stages = make_stages(kind, pipes, replicas, PipelineStage, fused, **config)
    for stage in stages:
        stage.submod.module.recompute = recompute
    schedule = make_schedule(kind, stages, microbatches, scale_grads=False)
    outcome = Outcome([], [], [], [], [], {})
    for rank_actions in [getattr(schedule, "pipeline_order_with_comms", {}).get(dist.get_rank(pipes), [])]:
        for action in (part for whole in rank_actions for part in whole.sub_actions or (whole,)):
            if action.computation_type.value in ("I", "W", "B"):
                slot = action.computation_type.value, action.microbatch_index
                outcome.planned.setdefault(action.stage_index, []).append(slot)
    for stage in stages:
        stage.queue.log = []
    watched = {stage.stage_index: [] for stage in stages}
    early: list[bool] = []
    for stage in stages:
        watch_slots(stage, watched[stage.stage_index])
        watch_end(stage, early)
    for step in range(STEPS):
        x, target = batch(step, dist.get_rank(replicas), microbatches)
        losses: list[Tensor] = []
        has_first = any(stage.is_first for stage in stages)
        has_last = any(stage.is_last for stage in stages)
        schedule.step(*((x,) if has_first else ()), **({"target": target, "losses": losses} if has_last else {}))
        outcome.losses.append([loss.item() for loss in losses])
        outcome.launched.append(all(all_launched(stage.submod) for stage in stages))
        for stage in stages:
            stage.submod.finish_grad_sync()
        outcome.grads.append({name: g for stage in stages for name, g in reduced_grads(stage.submod).items()})
        outcome.early.append(any(early))
        early.clear()
        outcome.slots.append({index: list(slots) for index, slots in watched.items()})
        for stage in stages:
            watched[stage.stage_index].clear()
            stage.submod.zero_grad_buffer()
    return outcome
