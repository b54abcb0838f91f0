"""docs/benchmarks/host_counts.py: counts are exact, so that commits can be compared by them."""

import csv
from pathlib import Path

import host_counts
import pytest
from tables import Measurement


@pytest.mark.parametrize("name", ["`Linear`, DDP", "`nn.Linear` as a unit, ZeRO-3"])
def test_counts_are_the_same_each_time_and_grow_with_layers(name: str) -> None:
    case = host_counts.CASES[name]
    first, again, more = (host_counts.count_parts(*case, depth) for depth in (1, 1, 2))
    assert first == again
    assert all(most > least for part in first for most, least in zip(more[part], first[part], strict=True))


def test_a_call_is_counted_with_its_instructions() -> None:
    counter = host_counts._Counter()
    assert counter.of(lambda: min(range(5), key=lambda each: -each)) == 4
    assert counter.calls == 6 and counter.instructions > 10
    assert counter.of(int) == 0 and counter.calls == 6, "C++ does not count"


def test_the_report_has_a_row_for_each_case(tmp_path: Path) -> None:
    rows = [
        Measurement(name=name, of="a layer", **dict.fromkeys(host_counts._PARTS, "1 / 20"))
        for name in host_counts.CASES
    ]
    text = host_counts.write_report(rows, tmp_path)
    with (tmp_path / "host_counts.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == list(host_counts.CASES)
    assert all(f"| {name} | a layer | 1 / 20 |" in text for name in host_counts.CASES)
