"""docs/benchmarks/dispatch.py: exchanges of rows between ranks, by each transport."""

from pathlib import Path

import pytest
from dispatch import COLUMNS
from scripts_of_benchmarks import under_torchrun
from tables import Measurement, read_csv

SMALL = ("--megabytes", "1", "--dims", "64", "--num-experts", "8", "--top-k", "2", "--num-steps", "2")


def test_rates_are_of_graphs_or_else_of_exchanges_one_by_one() -> None:
    nan = float("nan")
    row = Measurement(
        nbytes=32_000_000, dispatch_graph_us=80.0, dispatch_eager_us=160.0, combine_graph_us=nan, combine_eager_us=64.0
    )
    rate = {heading: cell for heading, cell in COLUMNS if "GB/s" in heading}
    assert callable(rate["dispatch, GB/s"]) and callable(rate["combine, GB/s"])
    assert rate["dispatch, GB/s"](row) == "400"
    assert rate["combine, GB/s"](row) == "500"


@pytest.mark.slow
def test_two_ranks_measure_all_to_all_on_the_cpu(tmp_path: Path) -> None:
    brief = ("--num-rounds", "1", "--num-warmup-steps", "1", "--rows", "all_to_all")
    done = under_torchrun("dispatch.py", "--out-dir", str(tmp_path), *SMALL, *brief, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = read_csv(tmp_path / "dispatch.csv")
    assert [row.routing for row in rows] == ["uniform", "skewed"]
    assert all(row.dispatch_eager_us > 0 and row.combine_eager_us > 0 for row in rows)
    assert "| 1 | uniform | all_to_all |" in (tmp_path / "dispatch.md").read_text()
