"""Curves: peaks and gaps of long runs stay, and long curves have a running mean."""

import re
from pathlib import Path

import pytest

from maingrad.launch.report.curves import draw_curves, draw_loss
from maingrad.launch.report.drawing import svg
from maingrad.launch.report.run_folder import read_runs
from maingrad.launch.training.metrics import MetricsWriter


def test_long_runs_keep_their_peaks_and_gaps() -> None:
    """On a page of bounded size, whatever the number of records."""
    curve: list[tuple[int, float | None]] = [(step, step % 7.0) for step in range(100_000)]
    curve[43210], curve[7777], curve[50050] = (43210, 100.0), (7777, -100.0), (50050, None)
    figure = draw_curves([curve], "unit")
    assert figure is not None
    text = svg(figure, "a curve")
    assert len(text) < 100_000
    faint = max(re.findall(r'<path d="([^"]*)"', text), key=len)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", faint)]
    axes, to_points = figure.axes[0], 72 / figure.dpi
    drawn = [figure.bbox.height * to_points - axes.transData.transform((0, y))[1] * to_points for y in (100, -100)]
    assert [min(heights), max(heights)] == pytest.approx(drawn, abs=0.5)
    assert faint.count("M") == 2


def test_a_long_curve_lies_behind_its_centred_mean() -> None:
    long = [(step, 50.0 if step == 100 else None if step == 150 else 0.0) for step in range(300)]
    figure = draw_curves([long], "unit")
    assert figure is not None
    mean, faint = figure.axes[0].get_lines()
    assert len(faint.get_xdata()) == 300
    values = dict(zip(mean.get_xdata(), mean.get_ydata(), strict=True))
    assert [values[step] for step in (96, 97, 103, 104)] == pytest.approx([0.0, 50 / 7, 50 / 7, 0.0])
    assert values[150] == 0.0, "the numbers around a gap"


@pytest.mark.parametrize("points", [[(5, 0.0)], [(1, -3e38), (2, 3e38)], [(1, 1e-38), (2, 3e38)], [(2**53 - 1, 1.0)]])
def test_extremes_have_an_axis_too(points: list[tuple[int, float]]) -> None:
    figure = draw_curves([points], "unit")
    assert figure is not None
    figure.draw_without_rendering()
    assert len(figure.axes[0].get_yticks()) >= 2


def test_without_a_number_nothing_is_drawn() -> None:
    assert draw_curves([[(1, None), (2, None)], []], "unit") is None


def test_names_of_runs_are_no_mathematics(tmp_path: Path) -> None:
    """Nor is one hidden that begins with an underscore."""
    for name in ("$x^$", "_a"):
        writer = MetricsWriter(tmp_path / name / "metrics.jsonl")
        writer.write("step", step=1, loss=5.0)
        writer.close()
    figure = draw_loss(read_runs([tmp_path / "$x^$", tmp_path / "_a"]))
    assert figure is not None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["$x^$, training", "_a, training"]
