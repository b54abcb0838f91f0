"""Saves delete and replace what saves have written: no link's target, and no file of somebody else's."""

from pathlib import Path

import pytest
import torch
from torch import nn

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.folder import remove


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
