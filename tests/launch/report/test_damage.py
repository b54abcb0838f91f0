"""Damaged, missing and non-finite records: what is sound is drawn, and the rest is named with its file and line."""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_pages import ReadPage
from tiny_run import tiny_config, tiny_toml

from maingrad.launch.cli import main
from maingrad.launch.report.page import print_report, write_page
from maingrad.launch.report.run_folder import read_runs
from maingrad.launch.simulation.simulate import simulate
from maingrad.launch.training.train import train


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    simulate(train, 2, tiny_config(folder, train={"steps": 4}))
    return folder / "run"


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    target = tmp_path / "run"
    target.mkdir()
    for name in ("metrics.jsonl", "resolved_config.json"):
        (target / name).write_bytes((whole_run / name).read_bytes())
    return target


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def report(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[ReadPage, str]:
    """The page, and what was said on stderr; damage costs at most 2 s and 200 MB more than the sound run did."""
    before, began = peak_kib(), time.process_time()
    assert main(["report", str(run)]) == 0
    seconds = time.process_time() - began
    SECONDS.append(seconds)  # the first run of a process loads modules and fonts
    assert seconds < SECONDS[0] + 2, f"{seconds:.1f} s"
    assert peak_kib() - before < 200_000
    return ReadPage(run / "report.html"), capsys.readouterr().err


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


SECONDS: list[float] = []


@pytest.fixture(autouse=True)
def warm(whole_run: Path) -> None:
    """Draw the sound run once."""
    if not SECONDS:
        began = time.process_time()
        write_page(read_runs([whole_run]), whole_run / "report.html")
        print_report(whole_run)
        SECONDS.append(time.process_time() - began)


VALUES = {
    "nan": "NaN",
    "infinity": "-Infinity",
    "1e308": "1e308",
    "1e999": "1e999",
    "10**400": "1" + "0" * 400,
    "a word": '"low"',
    "half a character": '"\\ud800"',
    "a list": "[1, [2]]",
    "a table": '{"a": 1}',
    "true": "true",
    "500 brackets": "[" * 500 + "]" * 500,
}


def write(run: Path, records: list[dict[str, Any]]) -> None:
    """Write records in which the text ``<name>`` stands for ``VALUES[name]``."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    for name, value in VALUES.items():
        text = text.replace(f'"<{name}>"', value)
    (run / "metrics.jsonl").write_text(text)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "kind, name",
    [("step", "loss"), ("step", "step"), ("validation", "loss"), ("final", "bigram_loss"), ("final", "seconds")],
)
@pytest.mark.sampled(1)
def test_values_that_are_no_numbers(run: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value in a record more."""
    records = lines_of(run)
    sound = next(record for record in reversed(records) if record["kind"] == kind)
    write(run, records + [{**sound, name: f"<{value}>"} for value in VALUES])
    page, said = report(run, capsys)
    first = len(records) + 1
    lines = ", ".join(str(first + at) for at in range(6))
    where = f"'{run / 'metrics.jsonl'}', line {lines}, ...: {name} of a {kind} record is no"
    assert where in page.text
    assert where in said
    assert [step for step, loss in page.column("training loss", "run").items() if loss != "no number"][:3] == [1, 2, 3]
    assert (run / "loss.png").stat().st_size > 10_000


@pytest.mark.in_turn
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.sampled(1)
def test_all_fields_at_once(run: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A record more of each kind, with the value in each field."""
    records = lines_of(run)
    kinds = {record["kind"]: record for record in records}
    damaged = [dict.fromkeys(record, f"<{value}>") | {"kind": kind} for kind, record in kinds.items()]
    write(run, records + damaged)
    page, _ = report(run, capsys)
    assert len(page.column("training loss", "run")) == 4


@pytest.mark.in_turn
def test_spans_of_a_timeline(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A span more for each value and each field; the sound spans are drawn."""
    records = lines_of(run)
    number, timeline = next((at, record) for at, record in enumerate(records, 1) if record["kind"] == "timeline")
    rows = len(timeline["buckets"]) + len(timeline["gathers"])
    for spans in ("forwards", "backwards", "buckets", "gathers", "waits", "phases"):
        fields = [name for name in timeline[spans][0] if name != "synced"]
        assert fields, "each kind was recorded"
        timeline[spans] += [
            {**timeline[spans][0], name: f"<{value}>"}
            for name in fields
            for value in VALUES
            if not (name in ("bucket", "collective", "name") and VALUES[value].startswith('"'))
        ]
        timeline[spans] += [None, 7]
    write(run, records)
    page, said = report(run, capsys)
    assert f"line {number}: finished of one of the timeline's buckets is damaged (nan)" in page.text
    assert f"line {number}: start of one of the timeline's waits is damaged" in said
    assert len(page.buckets) == rows
    assert (run / "overlap.png").stat().st_size > 10_000
    assert json.loads((run / "overlap.json").read_text())["traceEvents"]


@pytest.mark.in_turn
def test_names_of_all_kinds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mathematics, halves of characters, markup, other scripts and lines in the names of buckets are text."""
    records = lines_of(run)
    timeline = next(record for record in records if record["kind"] == "timeline")
    names = ["$\\frac{", "_a", "\ud800", "<b>&\"'", "重み\u202e", "a\nb\u0000", "x" * 5000]
    for span, name in zip(timeline["buckets"] * 2, names, strict=False):
        timeline["buckets"].append({**span, "bucket": name})
    write(run, records)
    page, _ = report(run, capsys)
    assert {row["data-bucket"] for row in page.buckets} >= {"$\\frac{", "<b>&\"'", "重み\u202e"}


@pytest.mark.in_turn
def test_a_timeline_without_a_sound_reduction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = lines_of(run)
    for record in records:
        if record["kind"] == "timeline":
            record.update(buckets=7, backwards=[])
    write(run, records)
    assert "No reduction of a step was timed" in report(run, capsys)[0].text


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
        "\x00\x01",
        "{}",
        '{"kind": [1]}',
        '{"kind": "st',
    ],
    ids=["open brackets", "brackets", "tables", "bytes", "no kind", "a list for kind", "cut"],
)
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.sampled(1)
def test_a_line_that_is_no_record(run: Path, line: str, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[at] = line
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" * (at == 0))
    page, said = report(run, capsys)
    number = 1 if at == 0 else len(lines)
    assert f"'{run / 'metrics.jsonl'}', line {number}: no record" in page.text
    assert f"line {number}: no record" in said
    assert len(said) < 1000


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no records": (lambda run: (run / "metrics.jsonl").unlink(), "it has no metrics.jsonl"),
    "empty": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl' has no records"),
    "brackets alone": (lambda run: (run / "metrics.jsonl").write_text("[" * 100_000), "line 1: no record"),
    "a folder": (
        lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
        "cannot be read: it is no regular file",
    ),
    "a pipe": (lambda run: instead(run / "metrics.jsonl", os.mkfifo), "cannot be read: it is no regular file"),
    "a device": (lambda run: instead(run / "metrics.jsonl", endless), "cannot be read: it is no regular file"),
}


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("damage", REFUSED)
def test_a_folder_without_any_record_is_refused(run: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    apply, message = REFUSED[damage]
    apply(run)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert str(run) in error and message in error
    assert not (run / "report.html").exists()


def test_a_run_is_given_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), str(run / ".." / "run")]) == 2
    assert f"'{run}' is given twice" in capsys.readouterr().err


@pytest.mark.in_turn
def test_a_run_that_goes_to_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends as any other run, and its page says from which step on there is no number."""
    toml = tiny_toml(tmp_path, optimizer={"lr": 1e6, "warmup_steps": 0, "max_grad_norm": 1e9}, train={"steps": 12})
    assert main(["train", str(toml)]) == 0
    records = lines_of(tmp_path / "run")
    assert any(record["kind"] == "step" and record["loss"] is None for record in records), "else it shows nothing"
    capsys.readouterr()
    page, said = report(tmp_path / "run", capsys)
    first = next(at for at, r in enumerate(records, 1) if r["kind"] == "step" and r["loss"] is None)
    assert f"line {first}" in said
    assert "loss of a step record is no number (null, for NaN or infinity)" in said
    assert page.figures["loss", "run"] == "no number", "and not the last finite one"


def edited(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((run / "resolved_config.json").read_text())
    change(document)
    (run / "resolved_config.json").write_text(json.dumps(document))


LACKING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda run: (run / "resolved_config.json").unlink(), "resolved_config.json' is missing or damaged ("),
    "half of it": (
        lambda run: (run / "resolved_config.json").write_text('{"config": {'),
        "is missing or damaged (Expecting",
    ),
    "brackets": (
        lambda run: (run / "resolved_config.json").write_text("[" * 100_000),
        "resolved_config.json' is missing or damaged",
    ),
    "deep": (
        lambda run: (run / "resolved_config.json").write_text('{"config": ' * 990 + "{}" + "}" * 990),
        "resolved_config.json",
    ),
    "a pipe": (
        lambda run: instead(run / "resolved_config.json", os.mkfifo),
        "is missing or damaged (it is no regular file)",
    ),
    "no configuration": (
        lambda run: (run / "resolved_config.json").write_text("{}"),
        "is missing or damaged (it has no configuration)",
    ),
    "another version": (
        lambda run: edited(run, lambda document: document["config"]["train"].update(turbo=True)),
        "of another version of maingrad (unknown key 'train.turbo'",
    ),
    "a giant": (
        lambda run: edited(run, lambda document: document["config"]["model"].update(num_layers=5_000)),
        "a model of so many modules is not counted",
    ),
    "a size of 10**400": (
        lambda run: edited(run, lambda document: document["config"]["model"].update(vocab_size=10**400)),
        "",
    ),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("damage", LACKING)
@pytest.mark.sampled(1)
def test_a_page_without_the_configuration_says_so(run: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    apply, message = LACKING[damage]
    apply(run)
    page, _ = report(run, capsys)
    assert message in page.text
    assert ("planned_bytes", "run") not in page.figures
    assert len(page.column("training loss", "run")) == 4
    assert ("train.turbo" in page.tables.get("settings", {})) == (damage == "another version"), "keys are shown as text"
    assert page.tables["versions"]["torch"] != ["none"], "from the first step's record"


@pytest.mark.in_turn
@pytest.mark.parametrize("value", [10**400, 1e308, "two", None, [1], {"a": [2]}, True])
@pytest.mark.sampled(1)
def test_fields_beside_the_configuration(run: Path, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    edited(run, lambda document: [document.update({key: value}) for key in document if key != "config"])
    page, _ = report(run, capsys)
    assert page.value("steps", "run") == 4


@pytest.mark.in_turn
def test_what_is_missing_comes_last(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, [*lines_of(run), {"kind": "step", "step": 5, "loss": "<nan>"}])
    text = report(run, capsys)[0].text
    assert text.index("Figures") < text.index("Curves") < text.index("Communication") < text.index("What is missing")
    assert text.index("What is missing") < text.index("loss of a step record")
