"""``[checkpoint]``: which checkpoints stay, whenever the process dies; and what a failed writer does to the run."""

import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.folder import MARK_FILE, remove
from maingrad.launch import simulate
from maingrad.launch.config.file import config_to_dict
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.data.tokens import Digest
from maingrad.launch.model.gpt import build_model
from maingrad.launch.training import run_state
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.pace import Pace
from maingrad.launch.training.run_state import RunSaver, where_to_resume
from maingrad.launch.training.train import train


def config_of(folder: Path, checkpoint: dict[str, Any], **train_settings: Any) -> Config:
    settings = {"steps": 10, "save_every": 1, "resume": "auto", "eval_every": 100, **train_settings}
    return tiny_config(folder, model={"num_layers": 1}, train=settings, checkpoint=checkpoint)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.in_turn
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    "keep, wanted",
    [({}, [*range(1, 11)]), ({"keep_last": 1}, [10]), ({"keep_last": 2, "keep_every": 4}, [4, 8, 9, 10])],
)
@pytest.mark.sampled(1)
def test_the_newest_stay_and_those_of_round_numbers(
    keep: dict[str, int], wanted: list[int], background: bool, tmp_path: Path
):
    simulate(train, 2, config_of(tmp_path, {**keep, "background": background}))
    assert kept(tmp_path) == wanted
    assert load_checkpoint(
        tmp_path / "run/checkpoints/step-00000010", build_model(config_of(tmp_path, {}).model, seed=1)
    )
    saves = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "checkpoint"]
    assert [record["step"] for record in saves] == [*range(1, 11)]
    assert all(record["seconds"] > 0.0 for record in saves)


@pytest.mark.in_turn
def test_a_run_that_goes_on_from_an_older_one_deletes_none_of_its_future(tmp_path: Path):
    """They are of another run by then; the new run writes over them in turn."""
    train(config_of(tmp_path, {}, steps=6))
    older = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    train(config_of(tmp_path, {"keep_last": 1}, steps=4, resume=older))
    assert kept(tmp_path) == [4, 5, 6]


@pytest.mark.in_turn
@pytest.mark.parametrize("keep_last, wanted", [(1, [5]), (3, [3, 4, 5])])
def test_a_checkpoint_whose_save_was_killed_before_its_rename_is_kept_and_deleted_as_others(
    keep_last: int, wanted: list[int], tmp_path: Path
):
    train(config_of(tmp_path, {}, steps=3))
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    (newest / MARK_FILE).touch()
    newest.rename(newest.with_name(f"{newest.name}.incomplete"))
    assert train(config_of(tmp_path, {"keep_last": keep_last}, steps=5)).steps == 5
    assert kept(tmp_path) == wanted


def delete_and_die(path: Path, at: int) -> bool:
    """In a child, which is killed before its ``at``-th operation on files; whether it was."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = [at]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("os.remove", "os.rmdir") or (name == "open" and arguments[2] & os.O_CREAT):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    remove(path)
    os._exit(0)


@pytest.mark.in_turn
def test_a_kill_while_one_is_deleted_leaves_a_whole_one_or_none(tmp_path: Path):
    config = config_of(tmp_path, {}, steps=4, save_every=4)
    train(config)
    whole, model = tmp_path / "run" / "checkpoints" / "step-00000004", build_model(config.model, seed=1)
    shutil.copytree(whole, tmp_path / "copy")
    at = 1
    while True:
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(tmp_path / "copy", whole)
        if not delete_and_die(whole, at):
            break
        if where_to_resume(config) is None:
            save_checkpoint(whole, model, extra="over what is left")
            assert load_checkpoint(whole, model) == "over what is left"
        else:
            assert load_checkpoint(where_to_resume(config) or "", model)["step"] == 4
        at += 1
    assert at > 4, "nothing was killed"
    assert not whole.exists()


def test_what_is_no_checkpoint_is_not_deleted(tmp_path: Path):
    mine = tmp_path / "run" / "checkpoints" / "step-00000001"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("keep")
    config = config_of(tmp_path, {"keep_last": 1}, steps=3, save_every=3, resume=None)
    with pytest.raises(ConfigError, match="of an earlier run is there"):
        train(config)
    assert train(config_of(tmp_path, {"keep_last": 1}, steps=6, save_every=3, resume=str(saved(tmp_path)))).steps == 6
    assert (mine / "notes.txt").exists()
    assert kept(tmp_path) == [1, 6]


def test_links_and_empty_folders_stay(tmp_path: Path):
    folder, archive = tmp_path / "run" / "checkpoints", tmp_path / "archive"
    train(config_of(tmp_path, {}, steps=3))
    (folder / "step-00000001").rename(archive)
    (folder / "step-00000001").symlink_to(archive)
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    (folder / "step-2").mkdir()
    (folder / "step-5").mkdir()
    train(config_of(tmp_path, {"keep_last": 2}, steps=6, save_every=2))
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before
    assert (folder / "step-00000001").is_symlink()
    assert kept(tmp_path) == [1, 2, 4, 5, 6], "an empty folder stays, and is none of the last two"


def test_a_run_writes_over_no_checkpoint_behind_a_link(tmp_path: Path):
    folder, archive = tmp_path / "run" / "checkpoints", tmp_path / "archive"
    train(config_of(tmp_path, {}, steps=4))
    (folder / "step-00000004").rename(archive)
    (folder / "step-00000004").symlink_to(archive)
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    older = config_of(tmp_path, {}, steps=6, resume=str(folder / "step-00000002"))
    with pytest.raises(ConfigError, match=rf"step-00000004' is a link, .* write over '{archive}': remove the link"):
        train(older)
    assert train(config_of(tmp_path, {}, steps=6)).steps == 6, "from the one behind the link"
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before


def saved(folder: Path) -> Path:
    """A checkpoint of the same run in another folder."""
    config = config_of(folder, {}, steps=3, save_every=3, resume=None, out_dir=str(folder / "other"))
    train(config)
    return folder / "other" / "checkpoints" / "step-00000003"


class FullAfter:
    """A display under which the disk is full from a step on, with all earlier checkpoints complete."""

    def __init__(self, step: int, complete: Path | None) -> None:
        self.step, self.complete, self.seen = step, complete, 0

    def update(self, status: Any) -> None:
        self.seen = status.step
        if status.step == self.step:
            while self.complete is not None and not self.complete.exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Watched:
    """A display that notes after which steps a checkpoint is there, and after step 11 lets the next one be written."""

    def __init__(self, watched: Path, written: threading.Event) -> None:
        self.watched, self.written, self.there = watched, written, list[int]()

    def update(self, status: Any) -> None:
        while status.step == 5 and not self.watched.exists():  # it is written in the background too
            time.sleep(0.01)
        time.sleep(0.01)
        if self.watched.exists():
            self.there.append(status.step)
        if status.step == 11:
            self.written.set()

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.in_turn
def test_the_last_one_stays_until_the_next_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``keep_last = 1``, and a file system so slow that training goes on for steps while the second is written."""
    written, run = threading.Event(), threading.Thread.run

    def run_slowly(thread: threading.Thread) -> None:
        if thread.name == "save of step-00000008":
            written.wait(20.0)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_slowly)
    display = Watched(tmp_path / "run" / "checkpoints" / "step-00000004", written)
    train(config_of(tmp_path, {"keep_last": 1}, steps=12, save_every=4), display=display)
    assert [step for step in display.there if step < 12] == [5, 6, 7, 8, 9, 10, 11]
    assert kept(tmp_path) == [12]


@pytest.mark.in_turn
@pytest.mark.parametrize("save_every", [2, 10])
@pytest.mark.sampled(1)
def test_a_full_disk_ends_the_run_soon_and_leaves_the_last_checkpoint(save_every: int, tmp_path: Path):
    """At the next step whose loss is exchanged, or at the end."""
    before = tmp_path / "run" / "checkpoints" / "step-00000002"
    display = FullAfter(3, before) if save_every == 2 else FullAfter(9, None)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = config_of(tmp_path, {}, save_every=save_every)
    try:
        with pytest.raises(OSError, match="File too large"):
            train(config, display=display)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert display.seen in ((4, 5, 6) if save_every == 2 else (10,))
    assert kept(tmp_path) == ([2] if save_every == 2 else [])
    assert train(config).steps == 10


@pytest.mark.parametrize(
    "given, message",
    [
        ({"keep_last": 0}, "checkpoint.keep_last = 0: must be at least 1"),
        ({"keep_every": 5}, "checkpoint.keep_every = 5: says which older checkpoints stay"),
        ({"save_every": 5}, "unknown key 'checkpoint.save_every': it is 'train.save_every'"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, given)


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [({"keep_last": 1, "keep_every": 2}, [2, 4, 5]), ({"keep_last": 2}, [4, 5]), ({}, [1, 2, 3, 4, 5])],
)
def test_what_is_deleted_behind_a_save(keep: dict[str, int], wanted: list[int], tmp_path: Path):
    """And none that is newer: it is of a run before this one."""
    for step in range(1, 7):
        save_checkpoint(tmp_path / f"run/checkpoints/step-{step:08d}", torch.nn.Linear(2, 2))
    wrapped: Any = None  # nothing of the model is needed
    RunSaver(config_of(tmp_path, keep), wrapped, is_main=True, say=print)._delete(5)
    assert kept(tmp_path) == [*wanted, 6]


def test_a_checkpoint_that_cannot_be_deleted_is_named_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor does one that a killed save has left, and that cannot be moved, keep the others."""
    stays, said = tmp_path / "run/checkpoints/step-00000001", list[str]()

    def move(path: Path) -> None:
        raise PermissionError("not yours")

    def refuse(path: Path) -> None:
        if path == stays:
            raise PermissionError("not yours")
        remove(path)

    for step in range(1, 5):
        save_checkpoint(tmp_path / f"run/checkpoints/step-{step:08d}", torch.nn.Linear(2, 2))
    monkeypatch.setattr(run_state, "remove", refuse)
    monkeypatch.setattr(run_state, "move_to_place", move)
    wrapped: Any = None  # nothing of the model is needed
    saver = RunSaver(config_of(tmp_path, {"keep_last": 1}), wrapped, is_main=True, say=said.append)
    saver._delete(3)
    assert said == [f"'{stays}' was not deleted: not yours"]
    assert kept(tmp_path) == [1, 3, 4]


# ---- What is saved beside the model, and what is asked of it. ----


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("validated", [True, False])
def test_what_is_saved_beside_the_model(
    background: bool, validated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved: list[Any] = []
    monkeypatch.setattr(run_state, "save_checkpoint", lambda *parts, **options: saved.append((parts, options)))
    config = config_of(tmp_path, {"background": background})
    wrapped: Any = SimpleNamespace(model="model", optimizer="optimizer", pipeline="stages")
    schedule: Any = SimpleNamespace(state_dict=lambda: {"last_epoch": 7})
    saver = RunSaver(config, wrapped, is_main=True, say=print)
    digests = {"training": Digest(5, "a", "b")}
    for step in (7, 9):
        saver.save(Pace(10, None, step, 1.5 * step), schedule, digests, validated=validated)
    for step, (parts, options) in zip((7, 9), saved, strict=True):
        assert parts == (tmp_path / "run/checkpoints" / f"step-0000000{step}", "model", "optimizer")
        assert options == {
            "background": background,
            "pipeline_group": "stages",
            "extra": {
                "step": step,
                "seconds": 1.5 * step,
                "validated": validated,
                "schedule": {"last_epoch": 7},
                "config": config_to_dict(config),
                "data": {"training": {"tokens": 5, "sha256": "a", "borders": "b"}},
            },
        }


def checked(folder: Path, extra: Any, data: Any = (), **train_settings: Any) -> Any:
    """What a run of this configuration makes of a checkpoint that holds ``extra``."""
    read = extra if callable(extra) else lambda: extra
    return run_state._checked(Path("c"), config_of(folder, {}, **train_settings), dict(data), read)


def extra_of(folder: Path, **changes: Any) -> dict[str, Any]:
    config = config_to_dict(config_of(folder, {}))
    return {"step": 1, "seconds": 2.0, "schedule": {}, "config": config, **changes}


@pytest.mark.parametrize("error", [FileNotFoundError("nothing is there"), ValueError("it is damaged")])
def test_a_checkpoint_that_cannot_be_read_is_a_mistake_of_the_configuration(tmp_path: Path, error: Exception):
    def read() -> None:
        raise error

    with pytest.raises(ConfigError, match=f"train.resume = 'c': {error}"):
        checked(tmp_path, read)


@pytest.mark.parametrize("lacks", ["step", "seconds", "schedule", "config"])
def test_a_checkpoint_of_a_model_alone_is_no_run(tmp_path: Path, lacks: str):
    extra = extra_of(tmp_path)
    assert checked(tmp_path, extra) is extra
    for other in ({key: value for key, value in extra.items() if key != lacks}, [*extra], None):
        with pytest.raises(ConfigError, match="a checkpoint of a model, but not one of maingrad train"):
            checked(tmp_path, other)


def test_keys_that_a_checkpoint_does_not_know_had_their_defaults(tmp_path: Path):
    extra = extra_of(tmp_path)
    del extra["config"]["model"]["rotary_base"]
    checked(tmp_path, extra)
    extra["config"]["model"]["rotary_base"] = 123.0
    with pytest.raises(ConfigError, match=r"model\.rotary_base = 10000\.0: the run in 'c' had 123\.0, and cannot"):
        checked(tmp_path, extra)
    for allowed in (False, True):  # of the data alone
        with pytest.raises(ConfigError, match=r"model\.rotary_base"):
            checked(tmp_path, extra, resume_with_other_data=allowed)
    extra = extra_of(tmp_path)
    extra["config"]["data"]["order"] = "epochs"
    with pytest.raises(ConfigError, match=r"data\.order = 'random': the run in 'c' had 'epochs'"):
        checked(tmp_path, extra)
    checked(tmp_path, extra, resume_with_other_data=True)
    extra = extra_of(tmp_path)
    extra["config"]["model"] |= {"fused_loss": True, "delay_wgrad_layers": 1}
    extra["config"]["train"] |= {"steps": 1000, "log_every": 1000}
    checked(tmp_path, extra)


def test_data_of_before_are_compared_as_far_as_they_were_noted(tmp_path: Path):
    now = {"training": Digest(5, "a", "b"), "validation": Digest(2, "c", "d")}
    checked(tmp_path, extra_of(tmp_path), now)
    noted: dict[str, Any] = {name: each._asdict() for name, each in now.items()}
    checked(tmp_path, extra_of(tmp_path, data=noted), now)
    checked(tmp_path, extra_of(tmp_path, data={"training": noted["training"]}), now)
    checked(tmp_path, extra_of(tmp_path, data={"training": {"tokens": 5, "sha256": "a"}}), now)
    for changed, said in (
        ({"tokens": 4}, "the training data had 4 tokens, and now 5: another run would go on"),
        ({"sha256": "x"}, "the training data had other tokens"),
        ({"borders": "x"}, "the training data had other borders of documents or paths"),
    ):
        extra = extra_of(tmp_path, data=noted | {"training": noted["training"] | changed})
        with pytest.raises(ConfigError, match=said):
            checked(tmp_path, extra, now)
        checked(tmp_path, extra, now, resume_with_other_data=True)
