"""What a load takes of the saved parameter groups, and what stays the program's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import build
from torch import nn

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


def sharded(named: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = fully_shard(nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.named_parameters() if named else model.parameters(), **options)


@pytest.mark.parametrize("option", ["fused", "foreach", "capturable", "differentiable"])
def test_how_a_step_is_computed_is_the_programs_own(tmp_path: Path, option: str) -> None:
    """The machine that loads may have no kernels for it."""
    save_checkpoint(tmp_path / "c", *sharded(**{option: True}, lr=0.25))
    model, optimizer = sharded(**{option: False}, lr=0.5)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert (optimizer.param_groups[0][option], optimizer.param_groups[0]["lr"]) == (False, 0.25)


@pytest.mark.parametrize("here", [True, False])
def test_a_group_keeps_the_names_that_the_program_gave(tmp_path: Path, here: bool) -> None:
    save_checkpoint(tmp_path / "c", *sharded(not here, lr=0.25))
    model, optimizer = sharded(here, lr=0.5)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0].get("param_names") == (["weight", "bias"] if here else None)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_tensor_that_the_program_has_not_yet_comes_as_a_tensor(tmp_path: Path) -> None:
    """A schedule adds ``initial_lr`` when it is made, which may be after the load."""
    model, optimizer = build(optimizer={"lr": torch.tensor(0.25)})
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.5)
    save_checkpoint(tmp_path / "c", model, optimizer)
    model, optimizer = build(optimizer={"lr": torch.tensor(1.0)})
    load_checkpoint(tmp_path / "c", model, optimizer)
    first = optimizer.param_groups[0]["initial_lr"]
    assert isinstance(first, torch.Tensor) and first == 0.5


def test_a_group_that_the_program_has_added_keeps_its_own(tmp_path: Path) -> None:
    """It has no parameters yet, and none of the saved groups is in its place."""
    save_checkpoint(tmp_path / "c", *sharded(lr=0.25))
    model, optimizer = sharded(lr=0.5)
    optimizer.add_param_group({"params": [], "lr": 0.125})
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_the_first_rank_says_what_the_options_are(tmp_path: Path) -> None:
    def save() -> None:
        model, optimizer = build(use_distributed_optimizer=True)
        optimizer.param_groups[0]["lr"] = 0.5 ** (1 + dist.get_rank())
        save_checkpoint(tmp_path / "c", model, optimizer)

    simulate(save, 3)
    optimizer = Manifest.read(tmp_path / "c").optimizer
    assert optimizer is not None and optimizer.groups[0]["lr"] == 0.5
