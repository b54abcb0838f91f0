"""Curves: peaks and gaps of long runs stay, and long curves have a running mean."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from maingrad.launch.report.curves import RUN_COLOURS, draw_curves, draw_loss
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


def curve_of(values: list[float | None]) -> Axes:
    figure = draw_curves([list(enumerate(values, 1))], "unit")
    assert figure is not None
    return figure.axes[0]


@pytest.mark.parametrize(
    ("values", "scale", "from_zero"),
    [
        ([3.0, 100.0], "log", False),  # more than thirty times
        ([4.0, 100.0], "linear", True),
        ([0.0, 100.0], "linear", True),
        ([-1.0, 100.0], "linear", False),
        ([0.001, 0.9], "linear", True),  # all below 1
    ],
)
def test_an_axis_begins_at_zero_or_is_logarithmic(values: list[float | None], scale: str, from_zero: bool) -> None:
    axes = curve_of(values)
    assert axes.get_yscale() == scale
    assert bool(axes.get_ylim()[0] == 0.0) is from_zero
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "unit")
    assert all(float(place).is_integer() for place in axes.get_xticks()), "there is no half step"


def test_a_number_alone_is_a_dot() -> None:
    """A line between two gaps would have no length."""
    looks: list[tuple[list[float | None], str]] = [([2.0], "."), ([1.0, 2.0], "None"), ([1.0, None, 2.0], ".")]
    for values, marker in looks:
        (line,) = curve_of(values).get_lines()
        assert line.get_marker() == marker


def test_only_long_curves_have_a_mean_over_a_fiftieth() -> None:
    assert len(curve_of([1.0] * 59).get_lines()) == 1
    mean, faint = curve_of([0.0] * 30 + [3.0] + [0.0] * 29).get_lines()  # of sixty points one to each side
    assert [round(value, 6) for value in mean.get_ydata()[28:33]] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert mean.get_alpha() is None and faint.get_alpha() == 0.45
    mean, _ = curve_of([None] * 10 + [2.0] + [None] * 60).get_lines()
    assert [float(value) for value in mean.get_ydata()[9:12]] == [2.0, 2.0, 2.0], "one number is a mean"


def test_more_runs_than_colours_are_dashed() -> None:
    curves: list[list[tuple[int, float | None]]] = [[(1, float(run)), (2, float(run))] for run in range(8)]
    figure = draw_curves(curves, "unit")
    assert figure is not None
    lines = figure.axes[0].get_lines()
    assert [line.get_color() for line in lines] == [*RUN_COLOURS, *RUN_COLOURS[:2]]
    assert [line.get_linestyle() for line in lines] == ["-"] * 6 + ["--"] * 2


def written(
    folder: Path, *, unit: str = "byte", losses: int = 2, validations: tuple[float, ...] = (), **end: Any
) -> Path:
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.write("observed", unit=unit)
    for step in range(1, losses + 1):
        writer.write("step", step=step, loss=5.0 - step / losses)
    for step, loss in enumerate(validations, 1):
        writer.write("validation", step=step, loss=loss)
    writer.write("final", step=losses, **end)
    writer.close()
    return folder


def test_losses_of_one_run_and_of_two(tmp_path: Path) -> None:
    """Each curve is told apart by its name, and a run's two curves by their lines."""
    one = written(tmp_path / "one", validations=(4.5, 4.25), bigram_loss=2.5)
    two = written(tmp_path / "two", unit="token", validations=(4.0, math.nan))
    figure = draw_loss(read_runs([one]), "A title")
    assert figure is not None and figure.get_suptitle() == "A title"
    (axes,) = figure.axes
    assert axes.get_ylabel() == "nats per byte"
    train, validation, bigram = axes.get_lines()
    assert [line.get_label() for line in axes.get_lines()] == ["training", "validation", "byte-bigram counts: 2.5"]
    assert (train.get_color(), validation.get_color()) == RUN_COLOURS[:2]
    assert (validation.get_marker(), validation.get_linestyle()) == ("o", ":")
    assert list(bigram.get_ydata()) == [2.5, 2.5]
    assert [text.get_text() for text in axes.texts] == ["4.25"], "the last validation"
    figure = draw_loss(read_runs([one, two]))
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_ylabel() == "nats per byte or token"
    names = ["one, training", "one, validation", "two, training", "two, validation"]
    assert [line.get_label() for line in axes.get_lines()[:4]] == names
    assert [line.get_color() for line in axes.get_lines()[:4]] == [RUN_COLOURS[0]] * 2 + [RUN_COLOURS[1]] * 2
    assert [text.get_text() for text in axes.texts] == ["4.25"], "the last of the other run is no number"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*names, "byte or token-bigram counts: 2.5"]
    figure = draw_loss(read_runs([two, written(tmp_path / "three", unit="token")]))
    assert figure is not None and figure.axes[0].get_ylabel() == "nats per token"


def test_many_validations_have_no_mean(tmp_path: Path) -> None:
    (run,) = read_runs([written(tmp_path, losses=60, validations=(4.0,) * 70)])
    figure = draw_loss([run])
    assert figure is not None
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels == ["training, running mean", "training", "validation"]
