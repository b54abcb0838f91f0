"""Over NCCL the comparison of ranks is read an iteration later: both ranks raise there, or before they save."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from refusals import refusal
from sharded_on_gpus import here, nccl
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, save_checkpoint
from maingrad.fsdp import fully_shard

WIDTH = 8


class Net(nn.Module):
    """Blocks of one size. Which of them run is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, device=here()) for _ in range(4)])
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = x + torch.tanh(self.blocks[index](x))
        return x


def sharded(group: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=group)
    fully_shard(model, mesh=group)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, done: list[int]) -> None:
    for step in range(steps):
        model(torch.ones(2, WIDTH, device=here())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done.append(step)


def on_two_gpus() -> list[tuple[str, list[int]]]:
    group, rank = nccl(), dist.get_rank()
    found: list[tuple[str, list[int]]] = []

    # Units, and then the same model with one order on both ranks.
    model, optimizer = sharded(group)
    model.order = [0, 1 + rank, 3]
    done: list[int] = []
    found.append((refusal(lambda: train(model, optimizer, 4, done)), done))
    model.order, done = [0, 1, 3], []
    found.append((refusal(lambda: train(model, optimizer, 4, done)), done))

    # A save reads what is under way.
    model, optimizer = sharded(group)
    model.order, done = [0, 1 + rank, 3], []
    train(model, optimizer, 1, done)
    folder = Path(tempfile.gettempdir()) / "maingrad-mixed"
    found.append((refusal(lambda: save_checkpoint(folder, model, optimizer)), done))

    # Steps under DistributedDataParallel.
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    ddp = DistributedDataParallel(Net(), config, process_group=group)
    optimizer, done = torch.optim.SGD(ddp.parameters(), lr=0.1), []

    def skip() -> None:
        for step in range(5):
            loss = ddp(torch.ones(2, WIDTH, device=here())).square().mean()
            if step == 1 + rank:
                continue
            loss.backward()
            ddp.finish_grad_sync()
            ddp.expose_grads()
            optimizer.step()
            ddp.zero_grad()
            done.append(step)

    found.append((refusal(skip), done))
    return found


@pytest.mark.gpu(2)
def test_both_ranks_raise_an_iteration_later() -> None:
    first, second = run_ranks(on_two_gpus, 2, timeout=200.0)
    assert [text for text, _ in first] == [text for text, _ in second]
    units, alike, saved, steps = first
    for text, done in (units, saved):
        assert "gathered unit 'blocks.1' on rank 0, unit 'blocks.2' on rank 1, before the end of iteration 1" in text, (
            text
        )
        assert done == [0]
    assert alike == ("nothing was raised", [0, 1, 2, 3])
    assert "skipped different batches before iteration 2" in steps[0], steps[0]
    assert (steps[1], second[3][1]) == ([0, 2], [0, 1]), "one update with the gradients of iteration 2"
