"""docs/benchmarks/cold_starts.py: what a shape without a row of its own costs, from the files of `maingrad tune`."""

from pathlib import Path
from typing import Any

import cold_starts
import pytest
import torch
from tables import read_csv

pytest.importorskip("triton", reason="tuning chooses between Triton kernels")

from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES, default_wgrad_config
from maingrad.kernels.tuning import CUBLAS, Problem
from maingrad.launch.tuning.tune import Timing, describe, write_tuning

CPU = torch.device("cpu")
OP = "grouped_wgrad_accumulate"
SMALL, LARGE = Problem(OP, "bfloat16", 64, 32768, 2048, 2048), Problem(OP, "bfloat16", 64, 65536, 2048, 2048)
DENSE = Problem("wgrad_accumulate", "bfloat16", 1, 2048, 4096, 4096)
ONE, OTHER = describe(WGRAD_CANDIDATES[0]), describe(WGRAD_CANDIDATES[1])


def cold_ratios(timings: list[Timing], folder: Path) -> dict[Problem, float]:
    write_tuning(timings, CPU, folder)
    rows: Any = cold_starts.cold_rows(folder)
    return {Problem(*(row[name] for name in Problem._fields)): row.cold_over_tuned for row in rows}


def test_a_cold_start_costs_what_the_other_rows_would_choose(tmp_path: Path) -> None:
    timings = [Timing(SMALL, ONE, 1.0), Timing(SMALL, OTHER, 1.25), Timing(LARGE, ONE, 3.0), Timing(LARGE, OTHER, 2.0)]
    assert cold_ratios(timings, tmp_path) == pytest.approx({SMALL: 1.25, LARGE: 1.5})


def test_a_shape_with_nothing_near_starts_with_the_default(tmp_path: Path) -> None:
    default = describe(default_wgrad_config(torch.bfloat16, (9, 0), SMALL.rows / SMALL.experts))
    far = SMALL._replace(n=128, k=128)
    timings = [Timing(SMALL, ONE, 1.0), Timing(SMALL, default, 1.75), Timing(far, ONE, 1.0), Timing(far, default, 1.0)]
    assert default != ONE
    assert cold_ratios(timings, tmp_path)[SMALL] == pytest.approx(1.75)


def test_a_dense_shape_with_nothing_near_starts_with_the_library(tmp_path: Path) -> None:
    timings = [Timing(DENSE, CUBLAS, 1.5), Timing(DENSE, ONE, 1.0)]
    assert cold_ratios(timings, tmp_path) == {DENSE: 1.5}


def test_what_was_not_timed_has_no_ratio(tmp_path: Path) -> None:
    assert cold_ratios([Timing(SMALL, ONE, 1.0), Timing(LARGE, OTHER, 1.0)], tmp_path) == {}


def timings_of(rows: int, **milliseconds: float) -> list[Timing]:
    """Timings of configurations that differ in block_m; ``a=1.5``: the one with ``block_m=97`` takes 1.5 ms."""
    problem = Problem("grouped_linear", "bfloat16", 8, rows, 512, 512)
    return [Timing(problem, f"block_m={ord(name)}", ms) for name, ms in milliseconds.items()]


def test_cold_starts_are_listed_with_the_worst_first(tmp_path: Path) -> None:
    timings = [
        *timings_of(1024, a=1.0, b=1.05, c=3.0),
        *timings_of(2048, a=2.2, b=2.0, c=5.0),  # nearest to both others
        *timings_of(4096, a=9.0, b=6.0, c=4.0),
    ]
    write_tuning(timings, CPU, tmp_path)
    assert cold_starts.main(["--folder", str(tmp_path), "--out-dir", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "cold_starts.csv")
    found = {row.rows: (row.config, row.ms, row.cold_over_tuned) for row in rows}
    assert found[4096] == ("block_m=99", 4.0, 1.5)
    assert found[1024] == ("block_m=97", 1.0, 1.05)
    assert found[2048][:2] == ("block_m=98", 2.0)
    assert [row.cold_over_tuned for row in rows] == sorted((row.cold_over_tuned for row in rows), reverse=True)

    text = (tmp_path / "cold_starts.md").read_text()
    assert f"at worst {rows[0].cold_over_tuned:.2f} times" in text
    assert "| grouped_linear | 8, 4096, 512, 512 | 4.0000 | 1.500 | `block_m=99` |" in text


def test_a_folder_of_nothing_is_answered_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cold_starts.main(["--folder", str(tmp_path), "--out-dir", str(tmp_path)]) == 2
    assert "has no tuned.csv: maingrad tune writes it" in capsys.readouterr().err
