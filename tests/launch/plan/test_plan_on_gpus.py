"""The bytes that ``maingrad plan`` foretells are those that a GPU's allocator holds between two steps, within 1 %."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tiny_run import tiny_config

from maingrad.launch.config.run import Config
from maingrad.launch.plan.plan import plan_run, plan_units
from maingrad.launch.training.runtime import process_group_from_env
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


def held_between_steps(rank: int, config: Config, ranks: int, port: int, results: Any) -> None:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.cuda.set_device(rank)
    square = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()  # cuBLAS keeps a workspace for each thread, which is no plan's
    square.grad = None
    before = torch.cuda.memory_allocated()
    meter = Meter()
    with process_group_from_env("cuda"):
        train(config, display=meter)
    results[rank] = meter.held[-2] - before


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
@pytest.mark.sampled(3)
def test_a_gpu_holds_what_was_planned(tmp_path: Path, parallel: str) -> None:
    ranks = min(torch.cuda.device_count(), 2)
    train_options = {"device": "cuda", "steps": 4, "global_batch_size": 2 * ranks, "num_microbatches": 1}
    config = tiny_config(tmp_path, parallel=parallel, model=_MODEL, train=train_options | {"eval_every": 100})
    plan = plan_units(config, ranks) if config.fully_sharded else plan_run(config, ranks)
    with mp.Manager() as manager:
        results = manager.dict()
        port = 29700 + ["ddp", "zero1", "fsdp"].index(parallel)
        mp.spawn(held_between_steps, (config, ranks, port, results), nprocs=ranks)  # type: ignore[no-untyped-call]
        held = dict(results)
    assert held == {rank: pytest.approx(plan.rank_bytes.total, rel=0.01) for rank in range(ranks)}
