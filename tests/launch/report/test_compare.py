"""`maingrad report` compares two runs over the same tokens, and refuses runs over different tokens."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from maingrad.launch.cli import main
from maingrad.launch.config.run import ConfigError
from maingrad.launch.report.compare import compare_runs
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32}


def run(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    out_dir = folder / name
    train(tiny_config(folder, **{**sections, "train": {"out_dir": str(out_dir), **sections.get("train", {})}}))
    return out_dir


def last_validation(out_dir: Path) -> float:
    return next(r["loss"] for r in reversed(read_metrics(out_dir / "metrics.jsonl")) if r["kind"] == "validation")


@pytest.mark.in_turn
def test_the_table_holds_both_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, sparse = run(tmp_path, "dense"), run(tmp_path, "sparse", model=EXPERTS)
    capsys.readouterr()
    arguments = ["report", "--compare", str(dense), str(sparse), "--out-dir", str(tmp_path / "docs"), "--stem", "pair"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    with (tmp_path / "docs" / "pair.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [4, 6]
    assert [int(row["tokens"]) for row in rows] == [4 * 24 * 24, 6 * 24 * 24]
    last = rows[-1]
    assert (float(last["base_loss"]), float(last["loss"])) == (last_validation(dense), last_validation(sparse))
    difference = last_validation(sparse) - last_validation(dense)
    assert float(last["difference"]) == pytest.approx(difference)
    side = "below" if difference < 0 else "above"
    assert f"# sparse ends {abs(difference):.4f} nats per byte {side} dense" in text
    assert "| step | tokens | dense | sparse | difference |" in text
    assert "| model.num_experts | 0 | 4 |" in text
    # Two blocks; an expert has 3 * 32 * 32 parameters, and two of four are idle. Routers have 2 * 4 * 32.
    total, active = (float(part) for part in re.findall(r"\*\*sparse\*\*: ([\d.]+) M parameters, ([\d.]+) M", text)[0])
    assert total - active == pytest.approx(2 * 2 * 3 * 32 * 32 / 1e6, abs=1e-3)
    assert (tmp_path / "docs" / "pair.md").read_text() in text
    assert (tmp_path / "docs" / "pair.png").stat().st_size > 10_000


def test_a_run_that_read_other_tokens_is_refused(tmp_path: Path) -> None:
    first, longer = run(tmp_path, "first"), run(tmp_path, "longer", train={"steps": 7})
    with pytest.raises(ConfigError, match=r"first has train\.steps = 6 and longer 7"):
        compare_runs(first, longer, tmp_path, "pair")


def test_a_run_that_stopped_early_is_refused(tmp_path: Path) -> None:
    first, second = run(tmp_path, "first"), run(tmp_path, "second")
    path = second / "metrics.jsonl"
    records = read_metrics(path)
    for record in records:
        if record["kind"] == "validation" and record["step"] == 6:
            record["step"] = 5
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ConfigError, match="first ended after 6 steps and second after 5"):
        compare_runs(first, second, tmp_path, "pair")
    path.write_text("".join(json.dumps(record) + "\n" for record in records if record["kind"] != "final"))
    with pytest.raises(ConfigError, match="second' has not come to its end"):
        compare_runs(first, second, tmp_path, "pair")


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--compare", str(tmp_path), str(tmp_path)]) == 2
    assert "is given twice" in capsys.readouterr().err
    (tmp_path / "a").mkdir()
    assert main(["report", "--compare", str(tmp_path), str(tmp_path / "a")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "--compare BASE RUN" in capsys.readouterr().err


@pytest.mark.in_turn
def test_a_validation_that_is_no_number_is_named(tmp_path: Path) -> None:
    first, second = run(tmp_path, "first"), run(tmp_path, "second")
    records = read_metrics(second / "metrics.jsonl")
    for record in records:
        if record["kind"] == "validation":
            record["loss"] = None
    (second / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = compare_runs(first, second, tmp_path / "docs", "pair")
    assert "# second ends in no number" in table
    assert "| no number | no number |" in table


@pytest.mark.slow
def test_pictures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_dir = run(tmp_path, "run")
    capsys.readouterr()
    assert main(["report", str(out_dir)]) == 0
    out = capsys.readouterr().out
    files = ("report.html", "loss.png", "overlap.png", "overlap.json")
    assert out.split() == [str(out_dir / name) for name in files], "one rank sends nothing"
