"""``[logging]``: the numbers of ``metrics.jsonl`` reach TensorBoard and Weights & Biases."""

import importlib.machinery
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train
from maingrad.launch.training.watching import trackers
from maingrad.launch.training.watching.trackers import check_packages, trackers_of


def config_of(folder: Path, logging: dict[str, Any], **train_settings: Any) -> Config:
    return tiny_config(folder, model={"num_layers": 1}, train={"eval_every": 3, **train_settings}, logging=logging)


def in_metrics(folder: Path, kind: str, name: str) -> list[tuple[int, float]]:
    records = read_metrics(folder / "run" / "metrics.jsonl")
    return [(record["step"], record[name]) for record in records if record["kind"] == kind]


def in_tensorboard(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.in_turn
def test_tensorboard_has_every_step_once_also_of_a_resumed_run(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="of the extra maingrad[tensorboard]")
    simulate(train, 2, config_of(tmp_path, {"tensorboard": True}, save_every=2))
    resume = str(tmp_path / "run" / "checkpoints" / "step-00000004")
    train(config_of(tmp_path, {"tensorboard": True}, resume=resume, steps=7))
    for tag, kind, name in (
        ("train/loss", "step", "loss"),
        ("train/lr", "step", "lr"),
        ("train/grad_norm", "step", "grad_norm"),
        ("validation/loss", "validation", "loss"),
    ):
        wanted = in_metrics(tmp_path, kind, name)
        assert in_tensorboard(tmp_path, tag) == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    assert [step for step, _ in in_tensorboard(tmp_path, "train/loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_weights_and_biases_gets_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="of the extra maingrad[wandb], which has many packages")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(config_of(tmp_path, {"wandb_project": "tiny", "wandb_mode": "offline"}))
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"validation/loss" in content
    assert file.stem == f"run-{(tmp_path / 'run' / 'wandb_id').read_text().strip()}"


def test_what_weights_and_biases_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package: settings of the run, each number once, and the same run after a resume."""
    calls: list[tuple[str, Any]] = []

    class Run:
        id = "id-of-the-run"

        def log(self, numbers: dict[str, float], *, step: int) -> None:
            calls.append(("log", (step, numbers)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**settings: Any) -> Run:
        calls.append(("init", settings))
        return Run()

    package: Any = types.ModuleType("wandb")
    package.init, package.__spec__ = init, importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    folder = tmp_path / "run"
    folder.mkdir()
    for name, resumed_at, known in ((None, None, None), ("named", 4, Run.id), ("named", None, None)):
        logging = {"wandb_project": "tiny", "wandb_mode": "offline", **({"wandb_name": name} if name else {})}
        config = config_of(tmp_path, logging)
        check_packages(config)
        calls.clear()
        (tracker,) = trackers_of(config, resumed_at)
        tracker.add("step", {"step": 5, "loss": 2.0, "skipped": True, "what": "text"})
        tracker.add("note", {"step": 5, "loss": 2.0})
        tracker.add("final", {"step": 6, "validation_loss": None, "weights_sha256": "of all"})
        tracker.add("final", {"step": 6, "peak_memory_bytes": 4321, "validation_loss": None})
        tracker.close()
        (_, settings), *rest = calls
        assert settings.pop("config")["logging.wandb_project"] == "tiny"
        assert settings == {
            "project": "tiny",
            "name": name or "run",
            "dir": str(folder),
            "mode": "offline",
            "id": known,
            "resume": "allow" if known else None,
        }
        assert rest == [
            ("log", (5, {"train/loss": 2.0, "step": 5})),
            ("log", (6, {"final/peak_memory_bytes": 4321, "step": 6})),
            ("finish", None),
        ]
        assert (folder / "wandb_id").read_text() == f"{Run.id}\n"


def test_both_trackers_may_be_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_tensorboard", "_wandb"):
        monkeypatch.setattr(trackers, name, lambda config, resumed_at, name=name: (name, resumed_at))
    for tensorboard, project in ((True, None), (False, "tiny"), (True, "tiny"), (False, None)):
        config = config_of(tmp_path, {"tensorboard": tensorboard, "wandb_project": project})
        wanted = ["_tensorboard"] * tensorboard + ["_wandb"] * bool(project)
        assert trackers_of(config, 3) == [(name, 3) for name in wanted]


@pytest.mark.parametrize(
    "logging, package, message",
    [
        (
            {"tensorboard": True},
            "tensorboard",
            "logging.tensorboard = True: needs the package tensorboard: pip ",
        ),
        (
            {"wandb_project": "p"},
            "wandb",
            "logging.wandb_project = 'p': needs the package wandb: pip install ",
        ),
    ],
)
def test_a_missing_package_is_said_before_anything_is_written(
    logging: dict[str, Any], package: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        train(config_of(tmp_path, logging))
    assert not (tmp_path / "run").exists()


@pytest.mark.in_turn
def test_no_tracker_is_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    assert train(config_of(tmp_path, {})).steps == 6


def test_keys_without_effect_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"logging\.wandb_name = 'n': has no effect without logging\.wandb_project"):
        config_of(tmp_path, {"wandb_name": "n"})
