"""The bytes that ``maingrad plan`` foretells are those that a GPU's allocator holds between two steps, within 1 %."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ending_ranks import run_to_the_end
from tiny_run import tiny_config

from maingrad.launch.config.run import Config
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.training.train import train
from maingrad.launch.training.watching.progress import Status

_MODEL = {
    "param_dtype": "bfloat16",
    "dim": 1536,
    "num_layers": 10,
    "num_heads": 12,
    "num_kv_heads": 4,
    "ffn_dim": 4096,
    "vocab_size": 32768,
}
"""0.4 billion parameters: 1 % of what a rank holds is more than the inputs of a step."""


class Meter:
    """A display that reads the allocator after each step."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def update(self, status: Status) -> None:
        self.held.append(torch.cuda.memory_allocated())

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def held_between_steps(config: Config) -> int:
    """A job of one rank: bytes that its GPU's allocator holds before the last step."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    torch.cuda.set_device(dist.get_rank())
    square = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()  # cuBLAS keeps a workspace for each thread, which is no plan's
    square.grad = None
    before = torch.cuda.memory_allocated()
    meter = Meter()
    train(config, display=meter)
    return meter.held[-2] - before


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
@pytest.mark.sampled(3)
def test_a_gpu_holds_what_was_planned(tmp_path: Path, parallel: str) -> None:
    ranks = min(torch.cuda.device_count(), 2)
    train_options = {"device": "cuda", "steps": 4, "global_batch_size": 2 * ranks, "num_microbatches": 1}
    config = tiny_config(tmp_path, parallel=parallel, model=_MODEL, train=train_options | {"eval_every": 100})
    plan = plan_run(config, ranks)
    both = "cpu:gloo,cuda:nccl"
    ended = run_to_the_end(held_between_steps, ranks, config, collective_timeout=60.0, limit=280.0, backend=both)
    held = [rank.returned for rank in ended]
    assert None not in held, "\n".join(rank.output for rank in ended)
    assert held == [pytest.approx(plan.rank_bytes.total, rel=0.01)] * ranks
