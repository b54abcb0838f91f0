"""The published tables are what the scripts make of the published CSV files."""

from itertools import groupby
from pathlib import Path
from typing import Any

import accumulation
import data_parallel
import delayed
import host
import moe
import pytest
import rooflines
from scripts_of_benchmarks import FOLDER
from tables import Measurement, grouped, read_csv, table, write_csv


@pytest.mark.parametrize("stem", ["data_parallel", "data_parallel_compiled", "data_parallel_forms", "fsdp"])
def test_redraw_writes_the_published_files(stem: str, tmp_path: Path) -> None:
    rows = read_csv(FOLDER / f"{stem}.csv")
    assert data_parallel.write_report(rows, tmp_path, stem) == (FOLDER / f"{stem}.md").read_text()
    written, published = ((folder / f"{stem}.csv").read_text() for folder in (tmp_path, FOLDER))
    assert written.splitlines() == published.splitlines()


def tables_of(page: str) -> list[str]:
    lines = (FOLDER / page).read_text().replace("| | ", "|  | ").splitlines()
    return ["\n".join(group) for is_table, group in groupby(lines, lambda line: line.startswith("|")) if is_table]


@pytest.mark.parametrize(
    ("csv", "page", "columns"),
    [
        ("accumulation.csv", "accumulation.md", accumulation.COLUMNS),
        ("delayed.csv", "delayed.md", delayed.COLUMNS),
        ("moe.csv", "moe.md", moe.COLUMNS),
        ("host.csv", "host.md", host.TABLES["host"].columns),
        ("host_hooks.csv", "host.md", host.TABLES["host_hooks"].columns),
    ],
)
def test_a_page_has_the_table_of_its_measurements(csv: str, page: str, columns: Any) -> None:
    assert table(read_csv(FOLDER / csv), columns) in tables_of(page)


@pytest.mark.parametrize("stem", ["host_gathers", "host_units"])
def test_headings_of_other_tables_are_published(stem: str) -> None:
    heading = table([], host.TABLES[stem].columns).splitlines()[0]
    assert any(each.startswith(heading) for each in tables_of("host.md"))


def test_the_page_of_kernels_has_a_table_of_each_operation() -> None:
    rows = grouped(read_csv(FOLDER / "kernels.csv"), lambda row: row.op)
    assert rows.keys() == set(rooflines.OPS)
    published = tables_of("kernels.md")
    for mine in rows.values():
        assert rooflines.table_of(mine) in published


def test_rows_come_back_from_a_csv(tmp_path: Path) -> None:
    rows = [
        Measurement(row="a", step_ms=1.5, num_ranks=2, trains=True, problem=""),
        Measurement(row="b", num_ranks=2, trains=False, problem="it broke"),
    ]
    write_csv(tmp_path / "new/table.csv", rows)
    first, second = read_csv(tmp_path / "new/table.csv")
    assert first == rows[0]
    assert second.step_ms != second.step_ms, "NaN, as in the row itself"
    assert rows[1].step_ms != rows[1].step_ms
    with pytest.raises(AttributeError, match="is none of row, step_ms"):
        first.step_seconds  # noqa: B018
    assert read_csv(tmp_path / "none.csv") == []
