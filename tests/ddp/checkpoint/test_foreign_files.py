"""Saves delete and replace what saves have written: no link's target, and no file of somebody else's."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maingrad.ddp import DistributedDataParallel, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.folder import (
    Staging,
    belongs_to_checkpoint,
    is_being_deleted,
    is_complete,
    is_left_to_delete,
    remove,
)
from maingrad.ddp.checkpoint.files.rank_file import file_name
from maingrad.ddp.collectives.failure_report import CollectiveError
from maingrad.launch import simulate


def saved(path: Path, extra: int) -> dict[str, bytes]:
    save_checkpoint(path, nn.Linear(3, 2), extra=extra)
    return content(path)


def content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("name", ["c.incomplete", "c.replaced"])
def test_a_link_beside_the_path_keeps_its_target(name: str, tmp_path: Path) -> None:
    """Also where the target looks like what a save has left there."""
    saved(tmp_path / "archive", 1)
    (tmp_path / "archive/maingrad.saving").touch()
    before = content(tmp_path / "archive")
    (tmp_path / name).symlink_to(tmp_path / "archive")
    with pytest.raises(FileExistsError, match=f"'{tmp_path}/{name}' is in the way"):
        saved(tmp_path / "c", 2)
    with pytest.raises(FileExistsError, match="is not just a checkpoint"):
        remove(tmp_path / name)
    assert (tmp_path / name).is_symlink() and content(tmp_path / "archive") == before


@pytest.mark.parametrize("target", ["nowhere", "empty"])
def test_a_save_to_a_link_is_one_to_its_target(target: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / target)
    for extra in (1, 2):
        saved(tmp_path / "c", extra)
        assert (tmp_path / "c").is_symlink() and load_checkpoint(tmp_path / target, nn.Linear(3, 2)) == extra


def test_ranks_may_name_one_folder_by_several_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def on_each_rank() -> Any:
        path = tmp_path / ("link" if dist.get_rank() else "real") / "c"
        model = DistributedDataParallel(nn.Linear(3, 2))
        save_checkpoint(path, model, extra=7)
        return load_checkpoint(path, model)

    assert simulate(on_each_rank, 2) == [7, 7]


def a_file(path: Path) -> None:
    path.write_bytes(b"mine")


def a_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_bytes(b"mine")
    path.symlink_to(path.parent.parent / "elsewhere")


FOREIGN = ["weights.safetensors", "rank-7.safetensors", "__7_0.distcp", "notes.tmp"]
"""A save gives other names to its files."""


@pytest.mark.parametrize(
    "name, make",
    [
        *((name, a_file) for name in FOREIGN),
        *((name, a_link) for name in [*FOREIGN, "rank-00007.safetensors", "rank-00007.safetensors.tmp"]),
    ],
)
def test_a_file_of_somebody_elses_is_kept(name: str, make, tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    make(tmp_path / "c" / name)
    before = content(tmp_path / "c")
    with pytest.raises(FileExistsError, match="is not just a checkpoint: saving would delete all of it"):
        saved(tmp_path / "c", 2)
    with pytest.raises(FileExistsError, match="is not just a checkpoint: delete it by hand"):
        remove(tmp_path / "c")
    assert content(tmp_path / "c") == before
    (tmp_path / "c" / name).unlink()
    saved(tmp_path / "c", 2)
    remove(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_names_of_ours_are_those_of_any_number_of_ranks() -> None:
    for name in ("maingrad.json", "maingrad.saving", *map(file_name, (0, 99_999, 100_000, 999_999_999))):
        assert belongs_to_checkpoint(name) and belongs_to_checkpoint(f"{name}.tmp"), name
        assert not belongs_to_checkpoint(f"{name}.old") and not belongs_to_checkpoint(f"my-{name}")


def test_a_checkpoint_of_torchs_is_kept(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    saved(tmp_path / "c", 1)
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    (tmp_path / "torchs/__0_0.distcp").rename(tmp_path / "c/__9_0.distcp")
    with pytest.raises(FileExistsError, match="is not just a checkpoint"):
        saved(tmp_path / "c", 2)


def test_a_file_that_comes_while_a_checkpoint_is_replaced_stays(tmp_path: Path, monkeypatch) -> None:
    """Saving ends well, and the folder that was put away keeps what is not a save's."""
    saved(tmp_path / "c", 1)
    rename = Path.rename

    def rename_and_write(path: Path, target: Path) -> Path:
        found = rename(path, target)
        if target.name == "c.replaced":
            (target / "notes.txt").write_text("mine")
        return found

    monkeypatch.setattr(Path, "rename", rename_and_write)
    saved(tmp_path / "c", 2)
    assert content(tmp_path / "c.replaced") == {"notes.txt": b"mine"}
    assert load_checkpoint(tmp_path / "c", nn.Linear(3, 2)) == 2


def test_a_link_to_an_empty_folder_a_link_to_nothing_and_a_file_are_kept(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "c.incomplete").symlink_to(tmp_path / "empty")
    with pytest.raises(FileExistsError, match="is in the way"):
        saved(tmp_path / "c", 1)
    (tmp_path / "d").write_text("mine")
    with pytest.raises(FileExistsError, match=r"'.*d' is there and is not just a checkpoint"):
        saved(tmp_path / "d", 1)
    (tmp_path / "e").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="is not just a checkpoint: delete it by hand"):
        remove(tmp_path / "e")
    remove(tmp_path / "nowhere")
    saved(tmp_path / "left", 1)
    (tmp_path / "left/maingrad.json").rename(tmp_path / "left/maingrad.saving")
    (tmp_path / "f").symlink_to(tmp_path / "left")
    assert is_left_to_delete(tmp_path / "left") and not is_left_to_delete(tmp_path / "f")
    assert not is_left_to_delete(tmp_path / "empty") and is_being_deleted(tmp_path / "empty")
    assert is_being_deleted(tmp_path / "left") and not is_being_deleted(tmp_path / "f")
    remove(tmp_path / "left")
    (tmp_path / "f").unlink()
    saved(tmp_path / "g", 1)
    (tmp_path / "g" / "rank-00007.safetensors").mkdir()
    with pytest.raises(FileExistsError, match="is not just a checkpoint: delete it by hand"):
        remove(tmp_path / "g")
    assert is_complete(tmp_path / "g") and not is_being_deleted(tmp_path / "g")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c.incomplete", "d", "e", "empty", "g"]


def test_a_deletion_that_does_not_end_leaves_what_is_known_as_that(tmp_path: Path, monkeypatch) -> None:
    """Whichever file it has come to."""
    unlink = Path.unlink
    for last in range(3):
        saved(tmp_path / "c", 1)
        left = iter(range(last))

        def dies(path: Path, left=left, **options: bool) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", dies)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / "c")
        monkeypatch.undo()
        assert is_complete(tmp_path / "c") == (last == 0)
        assert is_left_to_delete(tmp_path / "c") == is_being_deleted(tmp_path / "c") == (last > 0)
        remove(tmp_path / "c")
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("error", "stays"), [(ValueError(), False), (CollectiveError("a rank is gone"), True), (KeyboardInterrupt(), True)]
)
def test_a_save_that_fails_deletes_its_files_unless_others_may_write(tmp_path: Path, error, stays: bool) -> None:
    def fails() -> None:
        with Staging(tmp_path / "c") as staging:
            staging.begin()
            (staging.folder / "rank-00001.safetensors").write_bytes(b"of another rank")
            raise error

    with pytest.raises(type(error)):
        fails()
    assert (tmp_path / "c.incomplete/rank-00001.safetensors").exists() is stays


@pytest.mark.parametrize("began_anew", [True, False])
def test_a_lock_on_what_another_save_has_renamed_meanwhile_is_none(
    tmp_path: Path, monkeypatch, began_anew: bool
) -> None:
    lock, mark = fcntl.flock, tmp_path / "c.incomplete/maingrad.saving"

    def renamed_before(file, how: int) -> None:
        if how & fcntl.LOCK_NB:
            mark.rename(tmp_path / "elsewhere")
            if began_anew:
                mark.touch()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", renamed_before)
    with pytest.raises(FileExistsError, match="another save is writing into"):
        saved(tmp_path / "c", 1)


def test_a_file_system_without_locks_takes_saves(tmp_path: Path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for extra in (1, 2):
        saved(tmp_path / "c", extra)
        assert load_checkpoint(tmp_path / "c", nn.Linear(3, 2)) == extra
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_lock_ends_with_its_save_though_a_forked_process_still_has_the_file(tmp_path: Path, monkeypatch) -> None:
    """A lock ends when the last copy of the descriptor is closed, if nobody unlocks it."""
    lock, copies = fcntl.flock, []

    def forked_after(file, how: int) -> None:
        lock(file, how)
        if how & fcntl.LOCK_NB:
            copies.append(os.dup(file.fileno()))

    def fails() -> None:
        with Staging(tmp_path / "c") as staging:
            staging.begin()
            raise CollectiveError("a rank is gone")

    monkeypatch.setattr(fcntl, "flock", forked_after)
    with pytest.raises(CollectiveError):
        fails()
    saved(tmp_path / "c", 2)
    assert len(copies) == 2
    for each in copies:
        os.close(each)


def test_what_more_ranks_have_left_is_no_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    def dies() -> None:
        with Staging(tmp_path / "c") as staging:
            staging.begin()
            (staging.folder / "rank-00007.safetensors").write_bytes(b"half of it")
            (staging.folder / "rank-00008.safetensors.tmp").write_bytes(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dies()
    saved(tmp_path / "c", 1)
    assert sorted(content(tmp_path / "c")) == ["maingrad.json", "rank-00000.safetensors"]
    (tmp_path / "c" / "maingrad.json").rename(tmp_path / "c" / "maingrad.saving")  # as a deletion that died leaves it
    saved(tmp_path / "c", 2)
    assert sorted(content(tmp_path / "c")) == ["maingrad.json", "rank-00000.safetensors"]
    assert load_checkpoint(tmp_path / "c", nn.Linear(3, 2)) == 2


def test_each_name_is_given_when_what_it_names_is_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    """After a power failure too there is a whole checkpoint: a rename may reach the disk before the bytes do."""
    saved(tmp_path / "c", 1)
    happened, sync, rename, replace, unlink = [], os.fsync, Path.rename, Path.replace, Path.unlink

    def synced(descriptor: int) -> None:
        found = os.fstat(descriptor).st_ino
        here = [tmp_path, *tmp_path.rglob("*")]
        happened.append(f"sync {next(each.name for each in here if each.stat().st_ino == found)}")
        sync(descriptor)

    def noting(verb: str, do):
        def done(path: Path, *to: Path, **options: bool):
            happened.append(" ".join([verb, path.name, *(each.name for each in to)]))
            return do(path, *to, **options)

        return done

    monkeypatch.setattr(os, "fsync", synced)
    for verb, do in (("rename", rename), ("replace", replace), ("unlink", unlink)):
        monkeypatch.setattr(Path, verb, noting(verb, do))
    save_checkpoint(tmp_path / "c", nn.Linear(3, 2), extra=2)
    monkeypatch.undo()
    outer, data, new, old = tmp_path.name, "rank-00000.safetensors", "c.incomplete", "c.replaced"
    assert happened == [
        *(f"sync {data}.tmp", f"replace {data}.tmp {data}"),
        *("sync maingrad.json.tmp", "replace maingrad.json.tmp maingrad.json"),
        *(f"sync {new}", "sync c", f"rename c {old}", f"rename {new} c", "unlink maingrad.saving", f"sync {outer}"),
        *("unlink maingrad.json", f"unlink {data}", "unlink maingrad.saving"),
    ]
