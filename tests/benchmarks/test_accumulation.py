"""docs/benchmarks/accumulation.py measures four ways to accumulate, all of which train the same model."""

import csv
import math
from pathlib import Path

import accumulation
import delayed
import pytest
import torch

TINY = ["--dim", "32", "--num-layers", "1", "--vocab-size", "64", "--num-tokens", "16", "--num-microbatches", "2"]
BRIEF = ["--num-steps", "2", "--num-rounds", "1", "--num-warmup-steps", "1"]


def test_bench_writes_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accumulation.main(["--out-dir", str(tmp_path), *TINY, *BRIEF]) == 0
    with (tmp_path / "accumulation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["fused", "hook", "autograd", "autograd fp32"]
    assert all(float(row["step_ms"]) > 0 for row in rows)
    # One seed, one set of tokens: only rounding tells the first losses apart.
    losses = [float(row["first_loss"]) for row in rows]
    assert max(losses) - min(losses) < 0.01 * math.log(64)
    assert "| fused |" in capsys.readouterr().out
    assert "| fused |" in (tmp_path / "accumulation.md").read_text()


def test_an_unknown_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        accumulation.main(["--dims", "32"])
    assert ended.value.code == 2
    assert "--dim" in capsys.readouterr().err


def test_delayed_needs_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs here: measured by hand, not in tests")
    assert delayed.main(["--out-dir", str(tmp_path), *TINY, *BRIEF]) == 2
    assert "run it under torchrun with two or more" in capsys.readouterr().err


def test_covered_merges_overlapping_intervals() -> None:
    assert delayed.covered([(0.0, 4.0), (6.0, 8.0)], [(1.0, 3.0), (2.0, 5.0), (7.5, 9.0)]) == 3.5 / 6
    assert delayed.covered([], [(0.0, 1.0)]) == 0.0
