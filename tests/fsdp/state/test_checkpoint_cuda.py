"""Checkpoints and state dicts of shards in device memory, and of shards that are offloaded to the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, assert_same_files, batch, build
from gloo import run_ranks
from loops import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.torch_grads.sharded_grad import PlaceholderGrad
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard


def on_gpu(
    seed: int = 0, group: Any = None, *, offload: bool = False, once: bool = False
) -> tuple[Any, torch.optim.Optimizer]:
    model = Everything(torch.bfloat16, seed=seed).float().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    how: dict[str, Any] = {"offload_to_cpu": offload, "reduce_every_microbatch": False if once else None}
    fully_shard(model.norm, mesh=group, **how)
    for module in (model.up, model):
        fully_shard(module, mesh=group, mixed_precision=policy, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def take_steps(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        loss_of(model, batch(step, rank).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def shards(model: nn.Module) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_from_a_gpu_to_the_cpu_and_back(tmp_path: Path, offload: bool) -> None:
    """Through a DDP model on the CPU. It keeps frozen parameters in bf16 alone; they were in bf16 before."""
    model, optimizer = on_gpu(offload=offload)
    take_steps(model, optimizer, range(2), 0)
    save_checkpoint(tmp_path / "gpu", model, optimizer)
    other = build(torch.bfloat16, seed=1)
    load_checkpoint(tmp_path / "gpu", *other)
    save_checkpoint(tmp_path / "cpu", *other)
    again, its = on_gpu(seed=2, offload=offload)
    load_checkpoint(tmp_path / "cpu", again, its)
    save_checkpoint(tmp_path / "again", again, its)
    assert_same_files(tmp_path / "gpu", tmp_path / "again")
    take_steps(model, optimizer, range(2, 4), 0)
    take_steps(again, its, range(2, 4), 0)
    assert_same(shards(again), shards(model))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def two_microbatches(model: Any, step: int) -> dict[str, Tensor]:
    """Gradients on the CPU. Between the microbatches the gradients of offloaded shards are zeros, on the host."""
    with model.no_sync():
        loss_of(model, batch(step, 0).cuda()).backward()
    for param in model.parameters():
        if param.requires_grad:
            assert param.grad.device == param.device
            assert not param.grad.to_local().any() or not isinstance(param.grad, PlaceholderGrad)
    loss_of(model, batch(step, 1).cuda()).backward()
    return {name: param.grad.to_local().cpu() for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.gpu
def test_offloaded_shards_get_gradients_that_were_reduced_once(tmp_path: Path) -> None:
    """Gradients equal those on the device, bit for bit, over three steps, a checkpoint, and three steps."""
    model, optimizer = on_gpu(offload=True, once=True)
    grads = two_microbatches(model, 0)
    assert all(grad.any() for name, grad in grads.items() if grad.numel())
    assert_same(grads, two_microbatches(on_gpu(once=True)[0], 0))
    torch.testing.assert_close(grads, two_microbatches(on_gpu(offload=True)[0], 0), rtol=1e-5, atol=1e-7)
    for step in range(1, 3):
        optimizer.step()
        optimizer.zero_grad()
        two_microbatches(model, step)
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(tmp_path / "c", model, optimizer)
    resumed, its = on_gpu(seed=1, offload=True, once=True)
    load_checkpoint(tmp_path / "c", resumed, its)
    for step in range(3, 6):
        assert_same(two_microbatches(resumed, step), two_microbatches(model, step))
        for every in (optimizer, its):
            every.step()
            every.zero_grad()
    assert_same(shards(resumed), shards(model))


def over_nccl(folder: Path, offload: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    model, optimizer = on_gpu(group=group, offload=offload)
    take_steps(model, optimizer, range(2), rank)
    save_checkpoint(folder, model, optimizer)

    state, moments, before = model.state_dict(), optimizer.state_dict(), shards(model)
    place = "cpu" if offload else "cuda"
    for value in (state["up.weight"], next(iter(moments["state"].values()))["exp_avg"]):
        assert isinstance(value, DTensor)
        assert value.to_local().device.type == place and value.device_mesh.device_type == "cuda"
    third, its = on_gpu(seed=2, group=group, offload=offload)
    third.load_state_dict(state)
    its.load_state_dict(moments)
    assert_same(shards(third), before)

    take_steps(model, optimizer, range(2, 4), rank)
    resumed, its = on_gpu(seed=1, group=group, offload=offload)
    load_checkpoint(folder, resumed, its)
    take_steps(resumed, its, range(2, 4), rank)
    return shards(resumed), shards(model)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_a_run_over_nccl_resumes_bitwise(tmp_path: Path, offload: bool) -> None:
    for resumed, straight in run_ranks(over_nccl, 2, tmp_path / "c", offload, timeout=120.0):
        assert_same(resumed, straight)
