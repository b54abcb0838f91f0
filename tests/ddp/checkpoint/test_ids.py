"""All files of a checkpoint belong to one save: other files are refused, and a user's own files stay."""

import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, left_by_a_save, model_state, take_steps
from loops import assert_same, weights
from torch.distributed.checkpoint import load as torchs_load

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.boxes import TensorSlice
from maingrad.ddp.checkpoint.files.deferred import DeferredWrite
from maingrad.ddp.checkpoint.files.save_id import new_id
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}


def two_steps(folder: Path) -> None:
    ddp, optimizer = build(torch.bfloat16, **ZERO1)
    for step in range(2):
        take_steps(ddp, optimizer, range(step, step + 1), dist.get_rank())
        save_checkpoint(folder / f"step-{step}", ddp, optimizer, extra=step)


def load_and_say(folder: Path) -> str:
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    before = model_state(ddp)
    with pytest.raises(ValueError, match="of another save") as error:
        load_checkpoint(folder, ddp, optimizer)
    assert_same(model_state(ddp), before)
    return str(error.value).removesuffix(" (on rank 0)")


@pytest.mark.parametrize("name", ["maingrad.json", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(2)
def test_a_file_of_another_step_is_refused_by_name(tmp_path: Path, name: str, ranks: int) -> None:
    simulate(two_steps, 2, tmp_path)
    shutil.copy(tmp_path / "step-1" / name, tmp_path / "step-0" / name)
    errors = simulate(load_and_say, ranks, tmp_path / "step-0")
    named = "__0_0.distcp" if name == "maingrad.json" else name
    for error in errors:
        assert re.search(rf"'{tmp_path}/step-0/{re.escape(named)}' is of another save", error), error
        assert "files of two checkpoints are mixed in this folder" in error
    with pytest.raises(ValueError, match="is of another save"):
        export_safetensors(tmp_path / "step-0", tmp_path / "weights")
    shutil.copy(tmp_path / "step-1" / name, tmp_path / "step-1" / f"{name}.copy")
    model = Everything(torch.bfloat16)
    assert load_checkpoint(tmp_path / "step-1", model) == 1, "a further file harms nobody"


def test_a_copy_and_a_renamed_folder_are_the_same_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Everything(seed=1))
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    (tmp_path / "c").rename(tmp_path / "renamed")
    for name in ("copy", "renamed"):
        model = Everything()
        load_checkpoint(tmp_path / name, model)
        assert_same(weights(model), weights(Everything(seed=1)))


def test_torchs_metadata_are_for_torchs_tools(tmp_path: Path) -> None:
    """Torch's metadata may be another save's, damaged or missing: a load does not read them."""
    simulate(two_steps, 2, tmp_path)
    whole = Everything(torch.bfloat16)
    load_checkpoint(tmp_path / "step-1", whole)
    metadata = tmp_path / "step-1" / ".metadata"
    for content in ((tmp_path / "step-0" / ".metadata").read_bytes(), b"cposix\nsystem\n(S'false'\ntR.", None):
        metadata.unlink() if content is None else metadata.write_bytes(content)
        model = Everything(torch.bfloat16, seed=1)
        assert load_checkpoint(tmp_path / "step-1", model) == 1
        assert_same(weights(model), weights(whole))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("version", [1, 2])
def test_a_version_of_before_the_index_is_refused_with_the_ways_out(tmp_path: Path, version: int) -> None:
    save_checkpoint(tmp_path / "c", Everything(seed=1))
    path = tmp_path / "c" / "maingrad.json"
    manifest = json.loads(path.read_text())
    for key in ("files", "tensors", "checksum", "save_id")[: 4 if version == 1 else 2]:
        del manifest[key]
    path.write_text(json.dumps({**manifest, "version": version}))
    with pytest.raises(
        ValueError, match=rf"maingrad\.json' has version {version} of .* reads version 3: the maingrad"
    ) as error:
        load_checkpoint(tmp_path / "c", Everything())
    assert "torch.distributed.checkpoint.load reads its tensors" in str(error.value)
    with pytest.raises(ValueError, match=f"has version {version} of the format"):
        export_safetensors(tmp_path / "c", tmp_path / "weights")
    # As the error says.
    plain = torch.nn.Module()
    plain.scale = torch.nn.Parameter(torch.zeros(()))
    torchs_load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert plain.scale == Everything(seed=1).scale


def test_a_version_to_come_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete checkpoint of a newer maingrad, whose sum is right."""
    with monkeypatch.context() as newer:
        newer.setattr("maingrad.ddp.checkpoint.files.manifest.VERSION", 4)
        save_checkpoint(tmp_path / "c", Everything(seed=1))
    with pytest.raises(ValueError, match=r"version 4 of .* reads version 3: a newer maingrad has written it"):
        load_checkpoint(tmp_path / "c", Everything())


# ---- Two jobs. ----


def save_and_wait(path: Path, reached: Any, goes_on: Any) -> None:
    """Save, and wait after all tensors are written."""
    original = os.fsync

    def waits(descriptor: int) -> None:
        original(descriptor)
        if not reached.is_set() and (path.parent / f"{path.name}.incomplete" / "__0_0.distcp").exists():
            reached.set()
            assert goes_on.wait(60.0)

    os.fsync = waits
    try:
        save_checkpoint(path, Everything(seed=1), extra="first")
    finally:
        os.fsync = original


def test_a_second_save_to_the_same_path_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    reached, goes_on = threading.Event(), threading.Event()
    first = threading.Thread(target=save_and_wait, args=(tmp_path / "c", reached, goes_on))
    first.start()
    try:
        assert reached.wait(60.0)
        here = f"process {os.getpid()} on "
        with pytest.raises(FileExistsError, match=rf"another save is writing into '\S+c\.incomplete' \({here}"):
            save_checkpoint(tmp_path / "c", Everything(seed=2), extra="second")
        save_checkpoint(tmp_path / "d", Everything(seed=2))
    finally:
        goes_on.set()
        first.join()
    assert load_checkpoint(tmp_path / "c", Everything()) == "first"
    save_checkpoint(tmp_path / "c", Everything(seed=2), extra="second")
    assert load_checkpoint(tmp_path / "c", Everything()) == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


# ---- Folders that are named like a save's own. ----


@pytest.mark.parametrize("suffix", ["incomplete", "replaced"])
@pytest.mark.parametrize("there", [True, False])
def test_somebodys_checkpoint_beside_the_path_is_not_deleted(tmp_path: Path, suffix: str, there: bool) -> None:
    theirs = tmp_path / f"best.{suffix}"
    if there:
        save_checkpoint(tmp_path / "best", Everything(seed=1), extra="best")
    save_checkpoint(theirs, Everything(seed=2), extra="theirs")
    with pytest.raises(FileExistsError, match=rf"'{theirs}' is in the way and is not what a save has left there"):
        save_checkpoint(tmp_path / "best", Everything(seed=3))
    assert load_checkpoint(theirs, Everything()) == "theirs"
    if there:
        assert load_checkpoint(tmp_path / "best", Everything()) == "best"
    else:
        with pytest.raises(FileNotFoundError, match=rf"'{theirs}' is a checkpoint of its own"):
            load_checkpoint(tmp_path / "best", Everything())
    save_checkpoint(theirs, Everything(seed=4), extra="newer")
    assert load_checkpoint(theirs, Everything()) == "newer"


@pytest.mark.parametrize("suffix", ["incomplete", "replaced"])
def test_what_a_save_has_left_is_taken_up(tmp_path: Path, suffix: str) -> None:
    save_checkpoint(tmp_path / "best", Everything(seed=1), extra="left")
    left_by_a_save(tmp_path / "best", f"best.{suffix}")
    assert load_checkpoint(tmp_path / "best", Everything()) == "left"
    save_checkpoint(tmp_path / "best", Everything(seed=2), extra="new")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == [".metadata", "__0_0.distcp", "maingrad.json"]


def test_two_jobs_that_write_to_one_path_in_the_background_are_told(tmp_path: Path) -> None:
    """The first rank of each job waits for notes of its own save, and finds the other job's."""
    mine, others = (DeferredWrite(tmp_path, new_id()) for _ in range(2))
    for write in (mine, others):
        write.propose([TensorSlice(("model", "weight"), (3,), 0, 3, torch.ones(3))], None)
        write.agree(None, None)
        write.copy_to_host()
    others.write()
    with pytest.raises(ValueError, match="__0_0' is of another save: two jobs write to one path"):
        mine.collect(lambda: True)
    mine.write()
    collected = mine.collect(lambda: True)
    assert collected is not None and set(collected[1].tensors) == {"model.weight"}
