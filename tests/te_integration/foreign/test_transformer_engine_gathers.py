"""Transformer Engine's modules under ZeRO-1 while all-gathers are in flight: its extensions read the weights without
asking ``__torch_function__``."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

WIDTH = 256
STEPS = 6
SLEEP_CYCLES = 200_000_000  # about 100 ms
Outputs = list[tuple[Tensor, Tensor]]
"""After each step: the model's output at once, and when nothing is under way any more."""


class Attached(nn.Module):
    """Reads a weight of a child whose forward does not run."""

    def __init__(self, te: Any, **options: Any) -> None:
        super().__init__()
        self.norm = te.LayerNorm(WIDTH, params_dtype=torch.bfloat16)
        self.linear = te.Linear(WIDTH, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.norm.weight


def make_model(fused: bool) -> nn.Sequential:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused, "device": "cuda"}
    model = nn.Sequential(
        te.Linear(WIDTH, WIDTH, **options),
        te.LayerNormLinear(WIDTH, WIDTH, bias=False, **options),
        te.LayerNormMLP(WIDTH, WIDTH, bias=False, **options),
        Attached(te, **options),
    )
    return model.cuda()


def batch(seed: int) -> Tensor:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to("cuda", torch.bfloat16)


def outputs_right_after_steps(overlap: bool, fused: bool) -> Outputs:
    """Runs on each gloo process of a job, with an NCCL group as well. Ranks take turns in making their step late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=overlap,
        bucket_size=WIDTH * WIDTH,
    )
    model = make_model(fused)
    ddp = DistributedDataParallel(model, config, process_group=group)
    # A large eps keeps AdamW from turning rounding noise in tiny gradients into steps of full length.
    optimizer = DistributedOptimizer(ddp, lr=1e-2, eps=1.0)
    probe, outputs = batch(-1 + 2**20), []
    for step in range(STEPS):
        ddp(batch(size * step + rank)).float().square().sum().backward()
        ddp.finish_grad_sync()
        if step % size == rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        optimizer.step()
        with torch.no_grad():
            seen = model(probe)
            optimizer.finish_param_sync()
            outputs.append((seen, model(probe)))
        ddp.zero_grad_buffer()
    return [(seen.float().cpu(), after.float().cpu()) for seen, after in outputs]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fused", [False, True], ids=["hook", "fused"])
def test_23_their_forwards_wait_for_their_weights(fused: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    overlapped = run_ranks(outputs_right_after_steps, 2, True, fused, timeout=120.0)
    waiting = run_ranks(outputs_right_after_steps, 2, False, fused, timeout=120.0)
    for late, early in zip(overlapped, waiting, strict=True):
        before = None
        for (seen, after), (_, expected) in zip(late, early, strict=True):
            assert torch.equal(seen, after)
            # Two runs of their backwards need not agree in the last bits, of bf16 weights after a few steps.
            assert (after - expected).norm() <= 2**-5 * expected.norm()
            assert before is None or (after - before).norm() > 2**-4 * before.norm(), "or the test shows nothing"
            before = after
