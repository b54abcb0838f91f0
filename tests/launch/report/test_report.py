"""Records, the picture of the loss, and what is shown while a run trains."""

import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.text
import pytest
from report_pages import leave_pictures_empty
from tiny_run import tiny_config

from maingrad.launch.cli import main
from maingrad.launch.report import page
from maingrad.launch.report.curves import draw_loss
from maingrad.launch.report.page import print_report
from maingrad.launch.report.run_folder import read_runs
from maingrad.launch.report.table import write_csv
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.train import train
from maingrad.launch.training.watching.progress import Display, Status, format_duration, format_rate


@dataclass
class Row:
    a: int
    c: float


def test_records_are_whole_lines_at_once(tmp_path: Path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write("step", loss=1.5, nested={"x": [math.nan, 2]})
    assert read_metrics(path) == [{"kind": "step", "loss": 1.5, "nested": {"x": [None, 2]}}], "before close()"
    writer.write("step", loss=math.inf)
    writer.close()
    assert read_metrics(path)[1]["loss"] is None


def test_writer_without_a_file_is_silent():
    writer = MetricsWriter(None)
    writer.write("step", loss=1.0)
    writer.close()


@pytest.mark.in_turn
def test_loss_picture_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tiny_config(tmp_path, data={"source": "stdlib", "paths": []})
    result = train(config)
    (run,) = read_runs([Path(config.train.out_dir)])
    said = [text.get_text() for text in draw_loss([run]).findobj(matplotlib.text.Text)]
    assert f"byte-bigram counts: {result.bigram_loss:.4g}" in said
    assert f"{result.validation_loss:.4g}" in said
    assert "nats per byte" in said
    capsys.readouterr()
    print_report(Path(config.train.out_dir))
    names = ("loss.png", "overlap.png", "overlap.json")
    assert capsys.readouterr().out.split() == [f"{config.train.out_dir}/{name}" for name in names], "nothing is sent"


def test_report_of_an_interrupted_run_draws_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("step", step=1, loss=5.0)
    writer.write("interrupted", step=1)
    writer.close()
    print_report(tmp_path)
    assert capsys.readouterr().out.split() == [str(tmp_path / "loss.png")]


def test_all_that_is_damaged_is_said_and_what_is_missing_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": "low"}\n{"kind": "step"\n')
    print_report(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in said] == [["maingrad", "left out"]] * 3
    for what in ("line 1: loss of a step record is no number", "line 2: no record", "resolved_config.json' is missing"):
        assert sum(what in line for line in said) == 1, said


@pytest.mark.parametrize(("gap", "side"), [(0.25, "below"), (-0.25, "above")])
def test_the_picture_says_on_which_side_of_the_bigram_model_a_run_has_ended(
    gap: float, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    titles: list[str] = []
    monkeypatch.setattr(page, "draw_loss", lambda runs, title: titles.append(title))
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("step", step=1, loss=5.0)
    writer.write("final", step=1, nats_below_bigram=gap)
    writer.close()
    print_report(tmp_path)
    assert titles == [f"Validation ends 0.2500 nats per token {side} the bigram model"]


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "is given twice" in capsys.readouterr().err
    (tmp_path / "a").mkdir()
    assert main(["report", str(tmp_path), str(tmp_path / "a")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "report takes folders of runs; got none" in capsys.readouterr().err


def test_the_page_lies_where_it_is_to_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of one run beside it, that of several in a folder of its own; each run's pictures are drawn."""
    leave_pictures_empty(monkeypatch)
    runs = []
    for name in "ab":
        writer = MetricsWriter(tmp_path / name / "metrics.jsonl")
        writer.write("step", step=1, loss=5.0)
        writer.close()
        runs.append(str(tmp_path / name))
    pictures = [f"{run}/loss.png" for run in runs]
    for arguments, page_at, drawn in (
        ([runs[0]], tmp_path / "a/report.html", pictures[:1]),
        ([*runs, "--out-dir", str(tmp_path / "new/folder")], tmp_path / "new/folder/report.html", pictures),
        ([*runs, "--page", str(tmp_path / "other/both.html")], tmp_path / "other/both.html", pictures),
    ):
        assert main(["report", *arguments]) == 0
        assert capsys.readouterr().out.split() == [str(page_at), *drawn]
        assert page_at.exists()
    for peak in ("0", "-1", "inf", "nan"):
        assert main(["report", runs[0], "--peak-tflops", peak]) == 2
        assert "must be positive" in capsys.readouterr().err


def test_tables_of_measurements_have_all_columns(tmp_path: Path) -> None:
    """Of dataclasses and dicts, some of which lack some; lines end alike on every system."""
    table = tmp_path / "new" / "folder" / "table.csv"
    write_csv(table, [{"a": 1, "b": "x,y"}, Row(2, 3.5), {"c": 4}])
    assert table.read_bytes() == b'a,b,c\n1,"x,y",nan\n2,nan,3.5\nnan,nan,4\n'


@pytest.mark.slow
def test_pictures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path)
    train(config)
    capsys.readouterr()
    assert main(["report", config.train.out_dir]) == 0
    out = capsys.readouterr().out
    files = ("report.html", "loss.png", "overlap.png", "overlap.json")
    assert out.split() == [f"{config.train.out_dir}/{name}" for name in files], "one rank sends nothing"


# ---- What is shown while a run trains. ----

STATUS = Status(step=50, steps=200, fraction=0.25, elapsed=60.0, loss=2.5, lr=1e-3, tokens_per_second=31234.0)


def test_each_record_is_a_line(capsys: pytest.CaptureFixture[str]):
    display = Display()
    display.message("data: a text")
    display.update(STATUS)
    display.update(STATUS._replace(step=200, fraction=1.0))
    first, *steps = capsys.readouterr().out.splitlines()
    assert first == "data: a text"
    assert steps[0] == "step    50/200  loss 2.5000  lr 1.00e-03  31.2k tokens/s  ETA 3:00"
    assert steps[1].startswith("step   200/200") and steps[1].endswith("ETA 0:00")


def test_a_line_is_seen_at_once(monkeypatch: pytest.MonkeyPatch):
    """In a file or a pipe too, which have buffers."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"))
    Display().update(STATUS)
    assert raw.getvalue().startswith(b"step    50/200  loss 2.5000")


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]):
    display = Display(is_main=False)
    display.update(STATUS)
    display.message("hello")
    assert capsys.readouterr() == ("", "")


def test_numbers_for_people():
    assert [format_duration(s) for s in (4.4, 75, 4000, math.inf)] == ["0:04", "1:15", "1:06:40", "-"]
    assert [format_rate(r) for r in (12, 1500, 2.5e6, 3e9)] == ["12", "1.5k", "2.5M", "3.0G"]
