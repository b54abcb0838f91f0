"""Damaged and missing files of a run: a page that names what it lacks, or an error that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_pages import ReadPage
from tiny_run import tiny_config

from maingrad.launch.cli import main
from maingrad.launch.report.page.page import write_page
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_config(folder, train={"steps": 4}))
    return folder / "run"


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    target = tmp_path / "run"
    target.mkdir()
    for name in ("metrics.jsonl", "resolved_config.json"):
        (target / name).write_bytes((whole_run / name).read_bytes())
    return target


def changed(run: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the last record of a kind."""
    records = read_metrics(run / "metrics.jsonl")
    change(next(record for record in reversed(records) if record["kind"] == kind))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no records": (lambda run: (run / "metrics.jsonl").unlink(), "it has no metrics.jsonl"),
    "empty": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl' has no records"),
    "a torn line": (
        lambda run: (run / "metrics.jsonl").write_text('{"kind": "st\n{"kind": "final"}\n'),
        "metrics.jsonl', line 1: no record",
    ),
    "a loss in words": (
        lambda run: changed(run, "step", lambda record: record.update(loss="low")),
        "a step record of step 4: loss is 'low', and must be a number",
    ),
    "no step": (
        lambda run: changed(run, "validation", lambda record: record.pop("step")),
        "a validation record: step is None, and must be a whole number",
    ),
    "an end in words": (
        lambda run: changed(run, "final", lambda record: record.update(peak_memory_bytes="much")),
        "a final record of step 4: peak_memory_bytes is 'much'",
    ),
    "ranks in words": (
        lambda run: changed(run, "observed", lambda record: record.update(world_size="two")),
        "an observed record: world_size is 'two'",
    ),
    "a span without its end": (
        lambda run: changed(run, "timeline", lambda record: record["buckets"][0].pop("finished")),
        "one of its buckets has finished = None",
    ),
    "no backwards": (
        lambda run: changed(run, "timeline", lambda record: record.update(backwards=[])),
        "it has no backwards",
    ),
    "spans that are none": (
        lambda run: changed(run, "timeline", lambda record: record.update(waits=7)),
        "one of its waits has bucket = None",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_damaged_records_are_refused_by_name(run: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    apply, message = REFUSED[damage]
    apply(run)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert str(run) in error
    assert message in error
    assert not (run / "report.html").exists()


def test_a_run_is_given_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), str(run / ".." / "run")]) == 2
    assert f"'{run}' is given twice" in capsys.readouterr().err


def edited(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((run / "resolved_config.json").read_text())
    change(document)
    (run / "resolved_config.json").write_text(json.dumps(document))


LACKING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda run: (run / "resolved_config.json").unlink(), "resolved_config.json is missing"),
    "half of it": (
        lambda run: (run / "resolved_config.json").write_text('{"config": {'),
        "resolved_config.json is damaged (Expecting",
    ),
    "no configuration": (
        lambda run: (run / "resolved_config.json").write_text("{}"),
        "resolved_config.json is damaged (it has no configuration)",
    ),
    "ranks in words": (
        lambda run: edited(run, lambda document: document.update(world_size="two")),
        "resolved_config.json is damaged (its versions are no table",
    ),
    "another version": (
        lambda run: edited(run, lambda document: document["config"]["train"].update(turbo=True)),
        "resolved_config.json is of another version of maingrad: unknown key 'train.turbo'",
    ),
}


@pytest.mark.parametrize("damage", LACKING)
def test_a_page_without_the_configuration_says_so(run: Path, tmp_path: Path, damage: str) -> None:
    apply, message = LACKING[damage]
    apply(run)
    page = ReadPage(write_page([run], tmp_path / "page.html"))
    assert message in page.text
    assert ("planned_bytes", "run") not in page.figures
    assert len(page.curve("loss", "run, training")) == 4
    assert ("train.turbo" in page.tables.get("settings", {})) == (damage == "another version"), "keys are shown as text"
    assert page.tables["versions"]["torch"] != ["none"], "from the first step's record"
