"""The disk is full during a save: the error says where and why, and no file stays."""

import errno
from pathlib import Path

import pytest
from python_processes import run_python
from torch import nn

from maingrad.ddp import load_checkpoint, save_checkpoint

# No file may become larger than so many bytes: to a program it is what a full disk is, with another reason.
PROGRAM = """
import resource, sys
import torch
from maingrad.ddp import save_checkpoint
from maingrad.launch.safetensors_io import export_safetensors

path, limit, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = torch.nn.Linear(300, 300)
if what != "checkpoint":
    save_checkpoint(path + "-checkpoint", model)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    if what == "checkpoint":
        save_checkpoint(path, model, extra=list(range(100_000)) if limit > 400_000 else None)
    else:
        export_safetensors(path + "-checkpoint", path)
except OSError as error:
    print(error)
    print(error.errno, error.filename)
"""

ROOM = {"none": 10, "for the head": 100, "for a part of a tensor": 100_000, "for all but the end": 361_000}


def run(path: Path, limit: int, what: str) -> str:
    done = run_python("-c", PROGRAM, path, str(limit), what)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.sampled(1)
def test_a_full_disk_is_said_with_the_file_and_the_reason(tmp_path: Path, room: str) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra="before")
    said = run(tmp_path / "c", ROOM[room], "checkpoint")
    assert "File too large" in said, said
    assert f"'{tmp_path}/c.incomplete/rank-00000.safetensors.tmp'" in said, said
    assert f"{errno.EFBIG} {tmp_path}/c.incomplete/rank-00000.safetensors.tmp" in said
    assert [path.name for path in tmp_path.iterdir()] == ["c"], "half a checkpoint would keep the disk full"
    assert load_checkpoint(tmp_path / "c", nn.Linear(2, 2)) == "before"


@pytest.mark.in_turn
def test_a_manifest_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    said = run(tmp_path / "c", 500_000, "checkpoint")
    assert f"File too large: '{tmp_path}/c.incomplete/maingrad.json.tmp'" in said, said
    assert not list(tmp_path.iterdir())


def test_half_a_safetensors_file_is_removed(tmp_path: Path) -> None:
    said = run(tmp_path / "weights", 100_000, "safetensors")
    assert f"'{tmp_path}/weights' could not be written (" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["weights-checkpoint"]
