"""Checkpoints of models on GPUs: the same files, into and out of device memory, and over NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, assert_same_files, build, model_state, take_steps
from gloo import run_ranks
from loops import assert_same
from safetensors.torch import load_file
from torch import Tensor

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    prepare_background_saves,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.background import finish_pending
from maingrad.launch.safetensors_io import export_safetensors

CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=300
)


def on_gpu(seed: int = 0, group: Any = None, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    ddp = DistributedDataParallel(Everything(torch.bfloat16, seed=seed).cuda(), CONFIG, process_group=group)
    return ddp, DistributedOptimizer(ddp, lr=0.02, **options)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items() if name != "scratch"}


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_from_a_gpu_to_the_cpu_and_back(tmp_path: Path, cls: type[torch.optim.Optimizer]) -> None:
    ddp, optimizer = on_gpu(optimizer_class=cls)
    take_steps(ddp, optimizer, range(2), 0)
    save_checkpoint(tmp_path / "gpu", ddp, optimizer)
    other, its = build(torch.bfloat16, seed=1, optimizer={"optimizer_class": cls})
    load_checkpoint(tmp_path / "gpu", other, its)
    assert_same(on_cpu(model_state(other)), on_cpu(model_state(ddp)))
    save_checkpoint(tmp_path / "cpu", other, its)
    again, its = on_gpu(seed=2, optimizer_class=cls)
    load_checkpoint(tmp_path / "cpu", again, its)
    assert_same(on_cpu(model_state(again)), on_cpu(model_state(ddp)))
    save_checkpoint(tmp_path / "again", again, its)
    assert_same_files(tmp_path / "gpu", tmp_path / "again")
    take_steps(ddp, optimizer, range(2, 4), 0)
    take_steps(again, its, range(2, 4), 0)
    assert_same(on_cpu(model_state(again)), on_cpu(model_state(ddp)))


@pytest.mark.gpu
def test_prepared_saves_take_no_more_memory_of_the_host(tmp_path: Path) -> None:
    """And none is taken anew by the saves after it."""
    ddp, optimizer = on_gpu()
    take_steps(ddp, optimizer, range(1), 0)
    taken = []
    for prepare in (True, False):
        if prepare:
            prepare_background_saves(ddp, optimizer)
            finish_pending(ddp)
        taken.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        save_checkpoint(tmp_path / "c", ddp, optimizer, background=True).wait()
        taken.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert taken[0] > 0 and taken == taken[:1] * 4
    other, its = build(torch.bfloat16, seed=1)
    load_checkpoint(tmp_path / "c", other, its)
    assert_same(on_cpu(model_state(other)), on_cpu(model_state(ddp)))


def over_nccl(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    ddp, optimizer = on_gpu(group=group)
    take_steps(ddp, optimizer, range(2), rank)
    save_checkpoint(folder, ddp, optimizer)
    take_steps(ddp, optimizer, range(2, 4), rank)
    resumed, its = on_gpu(seed=1, group=group)
    load_checkpoint(folder, resumed, its)
    take_steps(resumed, its, range(2, 4), rank)
    return on_cpu(model_state(resumed)), on_cpu(model_state(ddp))


@pytest.mark.gpu(count=2)
def test_a_run_over_nccl_resumes_bitwise(tmp_path: Path) -> None:
    for resumed, straight in run_ranks(over_nccl, 2, tmp_path / "c", timeout=120.0):
        assert_same(resumed, straight)
    export_safetensors(tmp_path / "c", tmp_path / "exported")
    assert load_file(tmp_path / "exported")
