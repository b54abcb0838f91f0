"""docs/benchmarks/host.py: four tables of the host's time."""

import csv
from pathlib import Path

import host
import pytest
from tables import Measurement


def test_the_report_of_host_times_has_all_four_tables(tmp_path: Path) -> None:
    gathers = {"modules_per_bucket": 3, "bare_us": 1.0, "idle_us": 2.0, "guard_us": 3.0, "in_flight_us": 4.0}
    tables = {
        "host": [Measurement(name="nn.Linear", microseconds=9.0, over_plain=1.0)],
        "host_hooks": [Measurement(name="us", parameters="fused", problem="not measured")],
        "host_gathers": [Measurement(name="chain", **gathers)],
        "host_units": [Measurement(name="maingrad ZeRO-3", problem="not measured")],
    }
    text = host.write_report(tables, tmp_path)
    for file, (row,) in tables.items():
        with (tmp_path / f"{file}.csv").open() as table:
            assert [each["name"] for each in csv.DictReader(table)] == [row.name]
        assert f"| {row.name} |" in text


@pytest.mark.slow  # differences of microseconds: for a machine with nothing else to do
def test_there_is_a_row_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--out-dir", str(tmp_path)]) == 0
    with (tmp_path / "host.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows][:2] == ["nn.Linear", "nn.Linear, hook"]
    assert float(rows[0]["over_plain"]) == 1.0
    assert all(float(row["microseconds"]) > 0 for row in rows)
    with (tmp_path / "host_hooks.csv").open() as file:
        hooks = {(row["name"], row["parameters"]): row for row in csv.DictReader(file)}
    for parameters in ("plain", "fused"):
        ours = hooks["maingrad", parameters]
        # A hook is some lines of Python: it takes time, but less than a fifth of a millisecond.
        assert 0.1 < float(ours["intermediate_us"]) < 200
        assert 0.1 < float(ours["final_us"]) < 200
        assert float(ours["backward_us"]) > 0
        assert ("Megatron-core", parameters) in hooks
    with (tmp_path / "host_gathers.csv").open() as file:
        gathers = list(csv.DictReader(file))
    assert [row["name"] for row in gathers] == ["nn.Linear", "nn.Linear", "a user's module", "a user's module"]
    for row in gathers:
        # Between steps a module costs the same as one that was never guarded, up to noise.
        assert float(row["idle_us"]) < 3 * float(row["bare_us"])
        # Some lines of Python, in the step and in the first forward after it.
        assert 0.1 < float(row["guard_us"]) < 200
        assert 0 < float(row["in_flight_us"]) < 2000
    with (tmp_path / "host_units.csv").open() as file:
        units = {row["name"]: row for row in csv.DictReader(file)}
    assert len(units) == 4
    for row in units.values():
        assert not row.get("problem")
        # Some dozens of lines of Python, and a few small copies.
        assert 1 < sum(float(row[f"final_{part}_us"]) for part in ("forward", "backward")) < 5000
        assert float(row["bare_forward_us"]) > 0 and float(row["bare_backward_us"]) > 0
    out = capsys.readouterr().out
    assert "| maingrad ZeRO-3 |" in out
    assert "| Linear, fused |" in out
    assert "| maingrad | fused |" in out
