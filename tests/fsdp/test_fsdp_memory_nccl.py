"""Bytes on a GPU under sharded parameters: at rest by formula, at the peak within the pool, none after the model."""

import gc
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from sharded_on_gpus import here, nccl, two_instances
from torch import Tensor, nn

from maingrad.ddp.collectives.step_check import NUM_COLUMNS
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.te_integration import Linear

NUM_BLOCKS, WIDTH = 6, 1024
UNIT = 2 * WIDTH * 4 * WIDTH  # elements of a block
SLACK = 4 * 2**20  # activations and their gradients, of 8 tokens; a unit's parameters are four times that


class Block(nn.Module):
    """Large weights."""

    def __init__(self, delayed: bool) -> None:
        super().__init__()
        how = {"bias": False, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
        self.up = Linear(WIDTH, 4 * WIDTH, **how)
        self.down = Linear(4 * WIDTH, WIDTH, **how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    """Blocks; the outermost unit has next to no parameters."""

    def __init__(self, delayed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(delayed) for _ in range(NUM_BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(placements: str, mesh: Any, *, delayed: bool = False) -> Any:
    model = Tower(delayed).to(here())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh, placements, policy)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Two microbatches of 8 tokens."""
    x = torch.ones(8, WIDTH, device=here())
    for index in range(2):
        with nullcontext() if index else model.no_sync():
            model(x).float().square().mean().backward()
            for block in reversed(model.blocks):
                block.down.backward_dw()
                block.up.backward_dw()
    model.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def meshes() -> dict[str, Any]:
    """Placements, and the mesh that they are tested on."""
    group = nccl()
    found: dict[str, Any] = dict.fromkeys(("zero1", "zero2", "zero3"), group)
    if dist.get_world_size() == 4:
        found |= dict.fromkeys(("hsdp", "hsdp_zero1"), two_instances())
    return found


def requested() -> int:
    """Bytes of tensors as requested, before the allocator rounds them."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def nbytes_at_rest(placements: str, numel: int, parts: int, num_params: int) -> int:
    """By formula, with bf16 parameters over fp32 shards under AdamW.

    numel  of all units, padded
    parts  ranks between which the optimizer's state lies
    """
    shards = 4 * numel // parts
    moments = 2 * shards + 4 * num_params  # and a step count for each parameter
    grads = shards
    if placements == "zero1":
        return shards + moments + grads + 2 * numel + 4 * numel
    if placements == "zero2":
        return shards + moments + grads + 2 * numel
    if placements == "zero3":
        return shards + moments + grads
    inner = 2
    partial = 4 * numel // inner  # what was summed inside an instance, and not across yet
    if placements == "hsdp":
        return shards + moments + grads + partial
    return shards + moments + grads + partial + 2 * numel // inner  # the instance's parameters, gathered once a step


def bytes_at_rest() -> list[tuple[str, int, int]]:
    """(placements, measured, formula)."""
    found = []
    for index, (placements, mesh) in enumerate([("zero3", None), *meshes().items()]):
        before = requested()
        model = build(placements, mesh if index else dist.new_group(backend="nccl"))
        optimizer = adamw(model)
        for _ in range(2):
            step(model, optimizer)
        torch.cuda.synchronize()
        measured = requested() - before
        buckets = [bucket for unit in model.units for bucket in unit.buckets]
        numel = sum(bucket.layout.numel for bucket in buckets)
        assert numel - (NUM_BLOCKS * UNIT + WIDTH) < 1000  # padding
        parts = 2 if placements == "hsdp" else dist.get_world_size()
        formula = nbytes_at_rest(placements, numel, parts, len(list(model.parameters())))
        groups = 2 if placements.startswith("hsdp") else 1
        formula += 8 * NUM_COLUMNS * groups  # each group's row of integers, by which its ranks compare steps
        if index:  # the first one leaves the libraries' workspaces
            found.append((placements, measured, formula))
        del model, optimizer, buckets
    return found


RANKS = [pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_at_rest_are_those_of_the_formula(ranks: int) -> None:
    for found in run_ranks(bytes_at_rest, ranks, timeout=100.0):
        assert len(found) >= 3
        for placements, measured, formula in found:
            assert measured == formula, placements


def bytes_at_the_peak() -> list[tuple[str, bool, int, int]]:
    """(placements, delayed, largest allocation over rest in an iteration, segments that the allocator took in it)."""
    found = []
    ranks = meshes()
    for delayed in (False, True):
        for placements, mesh in ranks.items():
            model = build(placements, mesh, delayed=delayed)
            optimizer = adamw(model)
            for _ in range(3):
                step(model, optimizer)
            torch.cuda.synchronize()
            rest, segments = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["segment.all.allocated"]
            torch.cuda.reset_peak_memory_stats()
            step(model, optimizer)
            torch.cuda.synchronize()
            taken = torch.cuda.memory_stats()["segment.all.allocated"] - segments
            found.append((placements, delayed, torch.cuda.max_memory_allocated() - rest, taken))
            del model, optimizer
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_the_peak_is_three_units_of_parameters_and_two_of_gradients(ranks: int) -> None:
    for found in run_ranks(bytes_at_the_peak, ranks, timeout=100.0):
        for placements, delayed, peak, segments in found:
            params = 0 if placements in ("zero1", "zero2") else 3 * 2 * UNIT
            # Delayed gradients are reduced once in an iteration: between microbatches all units' stay whole.
            grads = 0 if placements == "zero1" else (NUM_BLOCKS if delayed else 2) * 4 * UNIT
            assert peak <= params + grads + SLACK, (placements, delayed, peak / UNIT)
            if params:  # the model is large enough for its units to show
                assert peak >= 2 * UNIT + 4 * UNIT, (placements, delayed, peak / UNIT)
            assert segments == 0, (placements, delayed)  # the same memory goes round, and the device is not asked


def bytes_after_the_model() -> list[tuple[str, int]]:
    """(when it was let go, bytes that stayed)."""
    group = nccl()
    found = []
    gc.disable()
    for placements in ("zero3", "zero3", "zero2", "zero1"):  # the first one leaves the libraries' workspaces
        for until in ("wrapped", "forward", "backward", "step"):
            before = torch.cuda.memory_allocated()
            model = build(placements, group)
            optimizer = adamw(model)
            if until == "step":
                step(model, optimizer)
            elif until != "wrapped":
                loss = model(torch.ones(8, WIDTH, device=here())).float().square().mean()
                if until == "backward":
                    with model.no_sync():
                        loss.backward()
                del loss
            del model, optimizer
            torch.cuda.synchronize()
            found.append((f"{placements}, {until}", torch.cuda.memory_allocated() - before))
    gc.enable()
    return found[4:]


@pytest.mark.gpu(2)
def test_a_deleted_model_frees_everything_without_the_collector() -> None:
    for found in run_ranks(bytes_after_the_model, 2, timeout=100.0):
        assert len(found) == 12
        assert [(when, stayed) for when, stayed in found if stayed] == []


# Lets its model go before its groups end, and ends.
TIDY = """
import os
import torch
import torch.distributed as dist
from torch import nn
from maingrad.fsdp import fully_shard

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)

def train():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model, copy_engine_gather=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.ones(4, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train()
torch.cuda.empty_cache()
dist.destroy_process_group()
torch.cuda.empty_cache()
"""


@pytest.mark.gpu(2)
def test_a_program_with_mapped_memory_ends_with_status_zero(tmp_path: Path) -> None:
    (tmp_path / "tidy.py").write_text(TIDY)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(tmp_path / "tidy.py")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
