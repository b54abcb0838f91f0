"""Experts over ranks in the stages of a zero-bubble pipeline: weight gradients stay in their slots."""

import torch
import torch.distributed as dist
from dispatched import DIM, EXPERTS, Tokens, experts_of, routed
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.te_integration import Linear, TokenDispatcher
from maingrad.te_integration.pipeline import PipelineStage

MICROBATCHES, ROWS = 4, 3


class Block(nn.Module):
    """A router and experts of two ranks, which differ between stages."""

    def __init__(self, stage: int, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.router = Linear(DIM, EXPERTS, fuse_wgrad_accumulation=True)
        self.experts = experts_of(ranks.rank(), 2, fuse_wgrad_accumulation=True)
        with torch.no_grad():
            for param in self.experts.parameters():
                param.mul_(1 - 0.5 * stage)
        self.dispatcher = TokenDispatcher(EXPERTS, ranks)

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = self.router(x).softmax(-1).topk(2)
        return x + routed(Tokens(x, ids, probs), self.experts, self.dispatcher)


def wrapped(module: nn.Module, ranks: dist.ProcessGroup) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=100)
    return DistributedDataParallel(module, config, process_group=ranks, expert_process_group=WORLD_OF_ONE)


def batch(replica: int) -> Tensor:
    return torch.randn(MICROBATCHES * ROWS, DIM, generator=torch.Generator().manual_seed(replica))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def gradients(ddp: DistributedDataParallel) -> list[Tensor]:
    ddp.finish_grad_sync()
    return [param.main_grad.clone() for param in ddp.parameters()]


def pipelined() -> tuple[list[Tensor], set[str]]:
    """This stage's gradients, and who computed weight gradients in the slots for these."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    pipes, ranks = mesh.get_group("pp"), mesh.get_group("ep")
    ddp = wrapped(Block(pipes.rank(), ranks), ranks)
    stage = PipelineStage(ddp, pipes.rank(), 2, torch.device("cpu"), group=pipes)
    stage.queue.log = []
    weight, owners = stage.backward_weight_one_chunk, set()

    def in_slot(*args: int, **options: int) -> None:
        before = len(stage.queue.log)
        weight(*args, **options)
        owners.update(record.owner for record in stage.queue.log[before:])

    stage.backward_weight_one_chunk = in_slot
    schedule = schedules.ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss_of, scale_grads=False)
    x = batch(ranks.rank())
    if pipes.rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.flip(-1))
    assert len(stage.queue.log) == 3 * MICROBATCHES
    return gradients(ddp), owners


def whole() -> list[list[Tensor]]:
    ranks = dist.group.WORLD
    ddp = wrapped(nn.Sequential(Block(0, ranks), Block(1, ranks)), ranks)
    x = batch(ranks.rank())
    for index, part in enumerate(x.chunk(MICROBATCHES)):
        loss = loss_of(ddp(part), part.flip(-1)) / MICROBATCHES
        if index < MICROBATCHES - 1:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    found = gradients(ddp)
    return [found[: len(found) // 2], found[len(found) // 2 :]]


def test_a_zero_bubble_pipeline_has_the_gradients_of_its_blocks_in_one_process() -> None:
    expected = simulate(whole, 2)
    owners: set[str] = set()
    for rank, (found, in_slots) in enumerate(simulate(pipelined, 4)):
        stage, replica = divmod(rank, 2)
        owners |= in_slots
        for one, other in zip(found, expected[replica][stage], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert any("GroupedMLP" in owner or "experts" in owner for owner in owners), owners
