"""docs/benchmarks/pointwise.py: every contender computes the same results and gradients."""

from pathlib import Path

import pointwise
import pytest
from tables import read_csv


@pytest.mark.in_turn
def test_every_contender_computes_the_same(tmp_path: Path) -> None:
    options = ["--shapes", "24x32", "--num-repetitions", "1", "--backend", "aot_eager"]
    assert pointwise.main([*options, "--out-dir", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "pointwise.csv")
    assert {row.op for row in rows} == set(pointwise.OPS)
    assert {row.name for row in rows} >= {"modules", "inductor"}
    for row in rows:
        assert row.error <= 0.02, row  # a few roundings to bf16, relative to the largest element
    assert "share of a copy's bandwidth" in (tmp_path / "pointwise.md").read_text()


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pointwise, "scaled_by_kernel", lambda op, x: x[:, :32] * 2)
    options = ["--shapes", "24x32", "--num-repetitions", "1", "--backend", "eager", "--ops", "swiglu"]
    pointwise.main([*options, "--out-dir", str(tmp_path)])
    errors = {row.name: row.error for row in read_csv(tmp_path / "pointwise.csv")}
    assert errors["modules"] <= 0.02
    assert errors["kernel"] > 0.1


def test_unknown_operations_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert pointwise.main(["--ops", "relu"]) == 2
    assert "unknown op 'relu': it is one of LayerNorm" in capsys.readouterr().err
