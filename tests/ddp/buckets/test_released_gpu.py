"""``release_grads`` on GPUs: bytes at the peak, streams, and a host that waits for nothing."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

WIDTH, LAYERS = 1024, 16
NUMEL = WIDTH * WIDTH
WHOLE = 4 * NUMEL * LAYERS
"""Bytes of all gradients: 64 MB."""


def wrapped(*, released: bool) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    """A stack of layers, and a bucket for each."""
    torch.manual_seed(0)
    layers = (Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=index % 2 == 0) for index in range(LAYERS))
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=NUMEL, release_grads=released
    )
    group = dist.new_group(backend="nccl")
    model = DistributedDataParallel(nn.Sequential(*layers).to("cuda", torch.bfloat16), config, process_group=group)
    return model, DistributedOptimizer(model, lr=2**-8, max_grad_norm=1.0)


def drawn(step: int) -> Tensor:
    draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(64, WIDTH, generator=draws).to("cuda", torch.bfloat16)


def step_of(model: DistributedDataParallel, optimizer: DistributedOptimizer, x: Tensor, num: int) -> None:
    for number in range(num):
        with nullcontext() if number + 1 == num else model.no_sync():
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peaks() -> tuple[dict[bool, int], dict[bool, int], bool]:
    """By ``release_grads``: most bytes of a step, and bytes after it; and whether the weights have the same bits."""
    torch.cuda.set_device(dist.get_rank())
    most, after, weights = {}, {}, {}
    for released in (True, False, True):  # the first run makes cuBLAS's workspaces, and its numbers are not kept
        before = torch.cuda.memory_allocated()
        model, optimizer = wrapped(released=released)
        for step in range(4):
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            step_of(model, optimizer, drawn(step), 1)
        torch.cuda.synchronize()
        most[released] = torch.cuda.max_memory_allocated() - before
        after[released] = torch.cuda.memory_allocated() - before
        weights[released] = [param.detach().clone() for param in model.parameters()]
        del model, optimizer
    return most, after, all(map(torch.equal, *weights.values()))


@pytest.mark.gpu(2)
def test_memory_goes_back() -> None:
    """Half of the gradients stays, as this rank's shard; a backward has three of 16 buckets beside it."""
    for most, after, same in run_ranks(peaks, 2, timeout=120.0):
        assert same
        slack = WHOLE // 64
        assert abs(after[False] - after[True] - WHOLE // 2) <= slack
        assert most[False] - most[True] >= WHOLE // 2 - 3 * WHOLE // LAYERS - slack


def steps_without_a_host_wait() -> bool:
    torch.cuda.set_device(dist.get_rank())
    model, optimizer = wrapped(released=True)
    x = drawn(0)
    for _ in range(2):
        step_of(model, optimizer, x, 2)
    with cuda_waits_are_errors():
        for num in (1, 2):
            step_of(model, optimizer, x, num)
    return True


@pytest.mark.gpu(2)
def test_the_host_waits_for_nothing() -> None:
    assert all(run_ranks(steps_without_a_host_wait, 2, timeout=120.0))


class Slow(torch.autograd.Function):
    """Identity with a slow backward, on the stream of its forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        torch.cuda._sleep(50_000_000)  # about 25 ms
        return dy.clone()


class Branches(nn.Module):
    """Layers on two streams by turns, which share buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side = torch.cuda.Stream()
        self.here = nn.ModuleList(Linear(64, 64, fuse_wgrad_accumulation=index % 2 == 0) for index in range(6))
        self.there = nn.ModuleList(Linear(64, 64, fuse_wgrad_accumulation=index % 2 == 1) for index in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for here, there in zip(self.here, self.there, strict=True):
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                y = Slow.apply(there(x))
            torch.cuda.current_stream().wait_stream(self.side)
            x = torch.tanh(here(x) + y)
        return x


def trains_on_two_streams() -> bool:
    torch.cuda.set_device(dist.get_rank())
    group, weights = dist.new_group(backend="nccl"), []
    for released in (False, True):
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=3000, release_grads=released
        )
        model = DistributedDataParallel(Branches().cuda(), config, process_group=group)
        optimizer = DistributedOptimizer(model, lr=2**-6)
        for step in range(5):
            x = torch.randn(10, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
            step_of(model, optimizer, x, 1 + step % 2)
        weights.append([param.detach().clone() for param in model.parameters()])
    return all(map(torch.equal, *weights))


@pytest.mark.gpu(2)
def test_streams_that_share_a_bucket_wait_for_its_memory() -> None:
    assert all(run_ranks(trains_on_two_streams, 2, timeout=120.0))


def drains_aside() -> bool:
    """The queue is drained on another stream, where the second rank is late. That stream waits for older buckets."""
    torch.cuda.set_device(dist.get_rank())
    group, weights = dist.new_group(backend="nccl"), []
    for released in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(Linear(64, 64, bias=False) for _ in range(LAYERS))).cuda()
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=64 * 64, release_grads=released
        )
        model = DistributedDataParallel(net, config, process_group=group)
        optimizer, queue, side = DistributedOptimizer(model, lr=2**-6), WgradQueue(), torch.cuda.Stream()
        for step in range(3):
            x = torch.randn(10, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
            with delayed_wgrad(queue):
                model(x).square().mean().backward()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000 * dist.get_rank())  # about 100 ms
                queue.drain()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    return all(map(torch.equal, *weights))


@pytest.mark.gpu(2)
def test_a_step_waits_for_what_another_stream_has_waited_for() -> None:
    assert all(run_ranks(drains_aside, 2, timeout=120.0))
