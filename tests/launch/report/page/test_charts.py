"""Curves: peaks of long runs stay, means are means, and a point lies where the axes say."""

import math
import re

import pytest

from maingrad.launch.report.page.charts import Chart, Series, nice_ticks, thin_out, with_mean


def test_long_runs_keep_their_peaks() -> None:
    points = [(step, 100.0 if step == 4321 else -100.0 if step == 777 else float(step % 7)) for step in range(10_000)]
    kept = thin_out(points)
    assert len(kept) <= 602
    assert (4321, 100.0) in kept and (777, -100.0) in kept
    assert set(kept) <= set(points)
    assert kept == sorted(kept)


def test_long_gaps_stay_gaps() -> None:
    points = [(step, None if 1000 <= step < 2000 else 1.0) for step in range(3000)]
    kept = thin_out(points)
    assert [step for step, value in kept if value is None], "else a line would bridge the gap"
    assert {step for step, value in kept if value is None} <= set(range(1000, 2000))


def test_one_loss_that_is_no_number_stays_a_gap() -> None:
    points = [(step, None if step == 5005 else 1.0) for step in range(10_000)]
    assert (5005, None) in thin_out(points)


def test_a_short_curve_has_no_mean_and_a_long_one_a_centred_mean() -> None:
    short = [(step, float(step)) for step in range(10)]
    assert [series.points for series in with_mean(0, "run", short)] == [short]
    long = [(step, 50.0 if step == 100 else None if step == 150 else 0.0) for step in range(300)]
    faint, mean = with_mean(0, "run", long)
    assert (faint.points, faint.style) == (long, "faint")
    values = dict(mean.points)
    # 300 points: three to each side.
    assert [values[step] for step in (96, 97, 103, 104)] == [0.0, 50 / 7, 50 / 7, 0.0]
    assert values[150] == 0.0, "the numbers around a gap"


@pytest.mark.parametrize("log", [False, True])
def test_a_point_lies_where_the_axes_say(log: bool) -> None:
    points = [(step, 2.0 ** (step - 5)) for step in range(1, 11)]
    chart = Chart(key="x", title="", unit="", series=[Series(run=0, label="run", points=points)], log=log).draw()
    assert chart.log == log
    scale = math.log10 if log else float
    ticks = {scale(float(tick.text)): tick.percent for tick in chart.y_ticks}
    (low, at_low), (high, at_high) = sorted(ticks.items())[:: len(ticks) - 1]
    drawn = [float(y) for _, y in re.findall(r"[ML]([\d.]+),([\d.]+)", chart.paths[0][1])]
    assert len(drawn) == len(points)
    for (_, value), y in zip(points, drawn, strict=True):
        percent = at_low + (at_high - at_low) * (scale(value) - low) / (high - low)
        assert y == pytest.approx(1000 - 10 * percent, abs=0.06)


def test_what_lies_above_the_top_is_said() -> None:
    series = [Series(run=0, label="run", points=[(1, 9.0), (2, 2.0), (3, 1.0)])]
    assert Chart(key="x", title="", unit="", series=series, top=3.0).draw().is_cut
    assert not Chart(key="x", title="", unit="", series=series, top=10.0).draw().is_cut


def test_one_value_has_an_axis_too() -> None:
    chart = Chart(key="x", title="", unit="", series=[Series(run=0, label="run", points=[(5, 0.0)])]).draw()
    assert len(chart.y_ticks) >= 2
    assert "nan" not in chart.paths[0][1]


def test_ticks_are_short() -> None:
    assert [tick.text for tick in nice_ticks(0.0, 0.0006)][:3] == ["0", "1.5e-4", "3e-4"]
    assert [tick.text for tick in nice_ticks(0.0, 60_000.0)][:3] == ["0", "15k", "30k"]
    assert [tick.percent for tick in nice_ticks(0.0, 100.0)] == pytest.approx([0, 20, 40, 60, 80, 100])
