"""Delayed weight gradients on GPUs give the undelayed numbers: in bf16, on other streams, and over NCCL."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules

STEPS = 3
MICROBATCHES = 3


def build(device: str, *, delay: bool, fused: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delay, "dtype": torch.bfloat16}
    return nn.Sequential(
        Linear(64, 96, **options),
        LayerNormLinear(96, 64, normalization="RMSNorm", **options),
        LayerNormMLP(64, 128, activation="swiglu", **options),
        Linear(64, 64, bias=False, **options),
    ).to(device)


def train(device: str, how: str, group: dist.ProcessGroup | None = None, fused: bool = True) -> list[torch.Tensor]:
    """Weights after three steps. how: "now", "modules", "queue", or "side": the queue, drained on another stream."""
    rank = 0 if group is None else group.rank()
    ddp = DistributedDataParallel(
        build(device, delay=how == "modules", fused=fused),
        DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=5000),
        process_group=group,
    )
    optimizer = DistributedOptimizer(ddp, lr=1e-2)
    queue, side = WgradQueue(), torch.cuda.Stream(device)
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
            x = torch.randn(32, 64, generator=generator).to(device, torch.bfloat16)
            with nullcontext() if index == MICROBATCHES - 1 else ddp.no_sync():
                with delayed_wgrad(queue) if how in ("queue", "side") else nullcontext():
                    loss = ddp(x).float().square().mean() / MICROBATCHES
                torch.cuda._sleep(2_000_000)  # the backward's kernels are still to come when the drain is issued
                loss.backward()
                if how == "modules":
                    drain_modules(ddp)
                with torch.cuda.stream(side) if how == "side" else nullcontext():
                    queue.drain()
                del loss
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    return [parameter.detach().cpu() for parameter in ddp.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["modules", "queue", "side"])
def test_delayed_is_bitwise_undelayed(how: str, fused: bool) -> None:
    """Also when the queue is drained on another stream than the backward's (fault 17)."""
    for plain, delayed in zip(train("cuda", "now", fused=fused), train("cuda", how, fused=fused), strict=True):
        assert plain.isfinite().all()
        assert torch.equal(plain, delayed)


def nccl_rank() -> dict[str, list[torch.Tensor]]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    results = {how: train(f"cuda:{rank}", how, group) for how in ("now", "modules", "queue", "side")}
    dist.destroy_process_group(group)
    return results


@pytest.mark.gpu(2)
def test_delayed_is_bitwise_undelayed_over_nccl() -> None:
    for results in run_ranks(nccl_rank, 2, timeout=100.0):
        for how in ("modules", "queue", "side"):
            for plain, delayed in zip(results["now"], results[how], strict=True):
                assert torch.equal(plain, delayed), how


@pytest.mark.gpu
def test_memory_of_queued_tensors_is_not_given_away() -> None:
    """Drains on another stream, then allocates on the first: operands freed too early would be overwritten."""
    layer = Linear(512, 512, bias=False, device="cuda", fuse_wgrad_accumulation=True)
    ddp = DistributedDataParallel(layer)
    side, queue = torch.cuda.Stream(), WgradQueue()
    torch.manual_seed(0)
    dy = torch.randn(512, 512, device="cuda")
    x = torch.randn(512, 512, device="cuda")
    expected = dy.t() @ x
    with delayed_wgrad(queue):
        y = ddp(x.clone())
    y.backward(dy.clone())
    del y
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        queue.drain()
    for _ in range(20):
        torch.full((512, 512), float("nan"), device="cuda")
    torch.cuda.synchronize()
    ddp.finish_grad_sync()
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_a_graphed_step_may_drain_on_another_stream() -> None:
    def trained(graphed: bool) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(
            build("cuda", delay=False),
            DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=5000),
        )
        optimizer = DistributedOptimizer(ddp, lr=1e-2)
        queue, side = WgradQueue(), torch.cuda.Stream()

        def step(x: torch.Tensor) -> torch.Tensor:
            with delayed_wgrad(queue):
                loss = ddp(x).float().square().mean()
            loss.backward()
            with torch.cuda.stream(side):
                # The host is ahead: from the steps before the capture, the queue keeps operands that are still read.
                torch.cuda._sleep(20_000_000)
                queue.drain()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = GraphedTrainingStep(step, ddp, optimizer) if graphed else step
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            call(torch.randn(32, 64, generator=generator).to("cuda", torch.bfloat16))
        return [parameter.detach().cpu() for parameter in ddp.parameters()]

    for eager, replayed in zip(trained(False), trained(True), strict=True):
        assert torch.equal(eager, replayed)
