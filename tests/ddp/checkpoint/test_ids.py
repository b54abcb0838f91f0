"""All files of a checkpoint belong to one save: other files are refused, and a user's own files stay."""

import io
import itertools
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
from python_processes import python_process
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.background import PendingSave
from maingrad.ddp.checkpoint.checkpoint import ExpertSets
from maingrad.ddp.checkpoint.files import folder, opened
from maingrad.ddp.checkpoint.files.folder import MARK_FILE
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.ddp.checkpoint.files.opened import OpenedCheckpoint
from maingrad.ddp.checkpoint.source import CheckpointRanks
from maingrad.ddp.collectives.rank_grid import RankGrid
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
    with pytest.raises(ValueError, match="two checkpoints are mixed") as error:
        load_checkpoint(folder, ddp, optimizer)
    assert_same(model_state(ddp), before)
    return str(error.value).removesuffix(" (on rank 0)")


@pytest.mark.parametrize("name", ["maingrad.json", "rank-00000.safetensors", "rank-00001.safetensors"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(2)
def test_a_file_of_another_step_is_refused_by_name(tmp_path: Path, name: str, ranks: int) -> None:
    simulate(two_steps, 2, tmp_path)
    shutil.copy(tmp_path / "step-1" / name, tmp_path / "step-0" / name)
    errors = simulate(load_and_say, ranks, tmp_path / "step-0")
    named = "rank-00000.safetensors" if name == "maingrad.json" else name
    for error in errors:
        assert re.search(rf"'{tmp_path}/step-0/{re.escape(named)}' is 'maingrad-\w+ {named}', and the manifest", error)
        assert "files of two checkpoints are mixed in this folder" in error
    with pytest.raises(ValueError, match="files of two checkpoints are mixed in this folder"):
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


def test_a_version_to_come_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete checkpoint of a newer maingrad, whose sum is right."""
    with monkeypatch.context() as newer:
        newer.setattr("maingrad.ddp.checkpoint.files.manifest.VERSION", 5)
        save_checkpoint(tmp_path / "c", Everything(seed=1))
    with pytest.raises(ValueError, match=r"version 5 of .* reads version 4: .*, a newer maingrad reads later ones"):
        load_checkpoint(tmp_path / "c", Everything())


# ---- A load beside a save. ----


@pytest.mark.parametrize("times", [1, 5])
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is of one save, and the data files are of the next one."""
    save_checkpoint(tmp_path / "c", Everything(seed=1), extra="first")
    original, read = Manifest.read, []

    def replaced(folder: Path) -> Manifest:
        read.append(original(folder))
        if len(read) <= times:
            save_checkpoint(tmp_path / "c", Everything(seed=1 + len(read)), extra=len(read))
        return read[-1]

    monkeypatch.setattr(Manifest, "read", replaced)
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == times
    assert_same(weights(model), weights(Everything(seed=1 + times)))


def test_a_file_that_is_gone_when_it_is_opened_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save is between its two renames."""
    for name, seed in (("c", 1), ("next", 2)):
        save_checkpoint(tmp_path / name, Everything(seed=seed), extra=name)
    original, looked = opened.check_size, []

    def replaced(path: Path, nbytes: int) -> None:
        original(path, nbytes)
        looked.append(path.parent.name)
        if len(looked) == 1:
            left_by_a_save(tmp_path / "c", "c.replaced")
            left_by_a_save(tmp_path / "next", "c.incomplete")

    monkeypatch.setattr(opened, "check_size", replaced)
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == "next"
    assert_same(weights(model), weights(Everything(seed=2)))
    assert looked == ["c", "c.incomplete"]


def test_a_load_does_not_try_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "_MOST_TRIES", 3)
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    original, count = Manifest.read, itertools.count()

    def replaced(folder: Path) -> Manifest:
        found = original(folder)
        if next(count) < 5:
            save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
        return found

    monkeypatch.setattr(Manifest, "read", replaced)
    with pytest.raises(ValueError, match="was replaced 3 times while it was opened: load it when nothing saves there"):
        load_checkpoint(tmp_path / "c", nn.Linear(2, 2))


def test_a_file_that_is_replaced_while_its_header_is_read_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "c", Everything(seed=1), extra="first")
    original, opened = Path.open, []

    def late(path: Path, mode: str = "r", *args: Any) -> Any:
        file = original(path, mode, *args)
        if path.suffix == ".safetensors" and mode == "rb":
            opened.append(path)
            if len(opened) == 1:
                save_checkpoint(tmp_path / "c", Everything(seed=2), extra="second")
        return file

    monkeypatch.setattr(Path, "open", late)
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == "first"
    assert_same(weights(model), weights(Everything(seed=1)))
    assert len(opened) > 1, "the first rank looks at its own files before a save is complete"


SAVES = """
import sys
import torch
from maingrad.ddp import save_checkpoint

model = torch.nn.Linear(3, 5)
for count in range(10**6):
    for param in model.parameters():
        torch.nn.init.constant_(param, count)
    save_checkpoint(sys.argv[1], model, extra=count)
"""


def test_a_load_is_not_ahead_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load looks beside the path between the two renames of a save, and opens files after the next save's manifest:
    the next load would go back."""
    save_checkpoint(tmp_path / "c", Everything(seed=1), extra="first")
    (tmp_path / "c").rename(tmp_path / "c.incomplete")
    (tmp_path / "c.incomplete" / MARK_FILE).touch()
    original, found = folder.find, []

    def late(path: Path) -> Path:
        found.append(original(path))
        if len(found) == 1:
            save_checkpoint(path, Everything(seed=2), extra="second")
            with monkeypatch.context() as stopped:
                stopped.setattr(folder.Staging, "complete", lambda staging: staging._release())
                save_checkpoint(path, Everything(seed=3), extra="third")
        return found[-1]

    monkeypatch.setattr(opened, "find", late)
    model = Everything()
    assert [load_checkpoint(tmp_path / "c", model) for _ in range(2)] == ["second", "second"]
    assert found[0] == tmp_path / "c.incomplete"
    assert_same(weights(model), weights(Everything(seed=2)))


@pytest.mark.in_turn
def test_every_load_beside_a_program_that_saves_all_the_time_is_whole(tmp_path: Path) -> None:
    model, counts = nn.Linear(3, 5), []
    with python_process("-c", SAVES, tmp_path / "c") as saves:
        while not (tmp_path / "c").exists():
            saves.process.join(0.01)
            assert saves.process.is_alive(), saves.ended(1.0).stderr
        while len(counts) < 200 or len({*counts}) <= 20:  # a busy machine may run one of the two far longer
            counts.append(load_checkpoint(tmp_path / "c", model))
            assert all((param == counts[-1]).all() for param in model.parameters())
    assert counts == sorted(counts)


def test_what_is_open_is_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save replaces the checkpoint between the checks and the reading, and deletes its files."""
    save_checkpoint(tmp_path / "c", Everything(seed=1), extra="first")
    original = OpenedCheckpoint.read

    def late(opened: OpenedCheckpoint) -> None:
        save_checkpoint(tmp_path / "c", Everything(seed=2), extra="second")
        original(opened)

    monkeypatch.setattr(OpenedCheckpoint, "read", late)
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == "first"
    assert_same(weights(model), weights(Everything(seed=1)))


def test_ranks_that_opened_different_checkpoints_open_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(two_steps, 2, tmp_path)
    original, reads, finds = Manifest.read, [], []

    def read(folder: Path) -> Manifest:
        reads.append(folder)
        return original(folder)

    def find(path: Path) -> Path:
        finds.append(dist.get_rank())
        # The first rank that comes opens one step, and the other one the step that replaces it.
        early = finds[-1] == finds[0] and finds.count(finds[0]) <= 2
        return tmp_path / ("step-0" if early else "step-1")

    def load() -> Any:
        ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
        return load_checkpoint(tmp_path / "step-0", ddp, optimizer)

    monkeypatch.setattr(Manifest, "read", read)
    monkeypatch.setattr(opened, "find", find)
    assert simulate(load, 2) == [1, 1]
    assert sorted(folder.name for folder in reads) == ["step-0", *3 * ["step-1"]], "each rank opened it twice"


class FewBytes(io.FileIO):
    """A file of which each call gives at most 100 bytes."""

    calls = 0

    def readinto(self, memory: Any) -> int | None:
        type(self).calls += 1
        return super().readinto(memoryview(memory)[:100])


def test_a_file_system_that_gives_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "c", Everything(seed=1), extra="first")
    original = Path.open

    def opened(path: Path, mode: str = "r") -> Any:
        return io.BufferedReader(FewBytes(path)) if path.suffix == ".safetensors" else original(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == "first"
    assert_same(weights(model), weights(Everything(seed=1)))
    assert FewBytes.calls >= (tmp_path / "c" / "rank-00000.safetensors").stat().st_size // 100


# ---- Two jobs. ----


def save_and_wait(path: Path, reached: Any, goes_on: Any) -> None:
    """Save, and wait after all tensors are written."""
    original = os.fsync

    def waits(descriptor: int) -> None:
        original(descriptor)
        if not reached.is_set() and (path.parent / f"{path.name}.incomplete" / "rank-00000.safetensors").exists():
            reached.set()
            assert goes_on.wait(60.0)

    os.fsync = waits
    try:
        save_checkpoint(path, Everything(seed=1), extra="first")
    finally:
        os.fsync = original


def test_who_writes() -> None:
    """The first instance, where all hold the same; else all ranks."""

    def on_each_rank() -> tuple[int, bool, int, int]:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        model = DistributedDataParallel(nn.Linear(2, 2), config)
        ranks = CheckpointRanks(model.grids["dense"], model.failures)
        _, places = ranks.run_and_gather(lambda: ranks.place, lambda place: place, "the places")
        assert places == [0, 1, 2, 3]
        return ranks.place, ranks.is_first, ranks.num_writers, ranks._replace(instances_alike=False).num_writers

    found = simulate(on_each_rank, 4)
    assert sorted(place for place, *_ in found) == [0, 1, 2, 3]
    assert [is_first for _, is_first, *_ in found] == [place == 0 for place, *_ in found]
    assert {(alike, apart) for *_, alike, apart in found} == {(2, 4)}
    assert CheckpointRanks().num_writers == 1 and CheckpointRanks().is_first


def test_errors_know_the_ranks_of_all_groups() -> None:
    """Of a wrapper, of tensor parallelism, and of a pipeline; each once."""

    def on_each_rank() -> None:
        pairs = [
            [dist.get_rank() % 2, dist.get_rank() % 2 + 2],
            [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1],
        ]
        tensor, pipeline = (dist.new_group(pair, use_local_synchronization=True) for pair in pairs)
        model = DistributedDataParallel(nn.Linear(2, 2))
        known = [*model.failures.grids]
        ranks = CheckpointRanks(model.grids["dense"], model.failures).with_tensor(tensor).with_pipeline(pipeline)
        assert (ranks.tensor, ranks.pipeline) == (tensor, pipeline)
        assert ranks.with_tensor(None) is ranks
        grids = [*known, RankGrid(tensor, None, None), RankGrid(pipeline, None, None)]
        assert [*model.failures.grids] == grids
        ranks.with_tensor(tensor).with_pipeline(pipeline)
        assert [*model.failures.grids] == grids
        assert ranks.axes == [ranks.grid.inner, tensor, pipeline]

    simulate(on_each_rank, 4)


def test_experts_of_several_sets_have_names_of_their_own() -> None:
    own, alone = ExpertSets("@a", ["@a", "@b"]), ExpertSets("", [])
    assert (own.number, alone.number) == (2, 1)
    assert own.number_in(["weight", "expert@b"]) == 2
    assert own.number_in(["weight", "expert"]) == 1, "known as slices of a parameter of all experts"
    assert alone.number_in(["weight"]) == 1
    stored = ["weight", "expert@a", "expert@b"]
    assert own.here_of(stored) == {"weight": "weight", "expert": "expert@a"}
    assert ExpertSets("", ["@a", "@b"]).here_of(stored) == {"weight": "weight"}
    assert alone.here_of(stored) == dict(zip(stored, stored, strict=True))


def test_a_second_save_to_the_same_path_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    reached, goes_on = threading.Event(), threading.Event()
    first = threading.Thread(target=save_and_wait, args=(tmp_path / "c", reached, goes_on))
    first.start()
    try:
        assert reached.wait(60.0)
        with pytest.raises(FileExistsError, match=r"another save is writing into '\S+c\.incomplete'"):
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
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["maingrad.json", "rank-00000.safetensors"]


def save_in_the_background_beside(path: Path, other: Path) -> None:
    """Another job's files lie where rank 1 has just written, on a file system without locks."""
    ddp, optimizer = build(torch.bfloat16, **ZERO1)
    with pytest.raises(ValueError, match="files of two checkpoints are mixed"):
        save_checkpoint(path, ddp, optimizer, background=True).wait()


def test_two_jobs_that_write_to_one_path_in_the_background_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> None:
        save_checkpoint(tmp_path / "other", *build(torch.bfloat16, **ZERO1))

    simulate(save, 2)
    original = PendingSave._write

    def write(pending: PendingSave) -> None:
        if pending._ranks.place == 1:
            name = "rank-00001.safetensors"
            copy = shutil.copy(tmp_path / "other" / name, pending._staging.folder / f"{name}.tmp")
            Path(copy).rename(pending._staging.folder / name)  # as a save does: no other rank sees a part of the file
        else:
            original(pending)

    monkeypatch.setattr(PendingSave, "_write", write)
    simulate(save_in_the_background_beside, 2, tmp_path / "c", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
