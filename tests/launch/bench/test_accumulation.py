"""`maingrad bench accumulation` measures four ways to accumulate, all of which train the same model."""

import csv
import math
from pathlib import Path

import pytest
import torch

from maingrad.launch.bench.delayed import covered
from maingrad.launch.bench.host.gathers import GatherRow
from maingrad.launch.bench.host.hooks import HookRow
from maingrad.launch.bench.host.layers import HostRow, write_host_report
from maingrad.launch.bench.host.units import UnitRow
from maingrad.launch.cli import main

TINY = ["--dim", "32", "--num-layers", "1", "--vocab-size", "64", "--num-tokens", "16", "--num-microbatches", "2"]
BRIEF = ["--num-steps", "2", "--num-rounds", "1", "--num-warmup-steps", "1"]


def test_bench_writes_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accumulation", "--out-dir", str(tmp_path), *TINY, *BRIEF]) == 0
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
        main(["bench", "accumulation", "--dims", "32"])
    assert ended.value.code == 2
    assert "--dim" in capsys.readouterr().err


def test_the_report_of_host_times_has_all_four_tables(tmp_path: Path) -> None:
    rows, hooks = (
        [HostRow(name="nn.Linear", microseconds=9.0, over_plain=1.0)],
        [HookRow(name="us", parameters="fused")],
    )
    gathers = [GatherRow(name="chain", modules_per_bucket=3, bare_us=1.0, idle_us=2.0, guard_us=3.0, in_flight_us=4.0)]
    text = write_host_report(rows, hooks, gathers, [UnitRow(name="maingrad ZeRO-3")], tmp_path)
    named = {"host": "nn.Linear", "host_hooks": "us", "host_gathers": "chain", "host_units": "maingrad ZeRO-3"}
    for file, name in named.items():
        with (tmp_path / f"{file}.csv").open() as table:
            assert [row["name"] for row in csv.DictReader(table)] == [name]
        assert f"| {name} |" in text


@pytest.mark.slow  # differences of microseconds: for a machine with nothing else to do
def test_bench_host_has_a_row_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--out-dir", str(tmp_path)]) == 0
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
        assert not row["problem"]
        # Some dozens of lines of Python, and a few small copies.
        assert 1 < sum(float(row[f"final_{part}_us"]) for part in ("forward", "backward")) < 5000
        assert float(row["bare_forward_us"]) > 0 and float(row["bare_backward_us"]) > 0
    out = capsys.readouterr().out
    assert "| maingrad ZeRO-3 |" in out
    assert "| Linear, fused |" in out
    assert "| maingrad | fused |" in out


def test_bench_delayed_needs_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs here: measured by hand, not in tests")
    with pytest.raises(ValueError, match="run it under torchrun with two or more"):
        main(["bench", "delayed", "--out-dir", str(tmp_path), *TINY, *BRIEF])


def test_covered_merges_overlapping_intervals() -> None:
    assert covered([(0.0, 4.0), (6.0, 8.0)], [(1.0, 3.0), (2.0, 5.0), (7.5, 9.0)]) == 3.5 / 6
    assert covered([], [(0.0, 1.0)]) == 0.0
