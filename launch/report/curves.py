"""Curves over steps, one run or several: pictures of the page, ``loss.png``, and the picture of a comparison."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .drawing import QUIET, styled
from .run_folder import Point, RunFolder

__all__ = ["RUN_COLOURS", "apart", "draw_curves", "draw_loss"]

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a1478a", "#8a6d00", "#7f7f7f")
"""After Okabe and Ito: told apart with any colour vision, in light and in dark."""
_ENOUGH_FOR_A_MEAN = 60  # points, from which on a curve gets a running mean


def apart(difference: float, unit: str, other: str) -> str:
    """Where a loss lies: ``"0.12 nats per byte below ..."``."""
    return f"{abs(difference):.4f} nats per {unit} {'below' if difference < 0 else 'above'} {other}"


@styled
def draw_curves(curves: Sequence[Sequence[Point]], unit: str) -> Figure | None:
    """A curve for each run; None where no run has a number."""
    figure = Figure(figsize=(4.6, 2.7))
    axes = figure.subplots()
    for index, points in enumerate(curves):
        _line(axes, index, points)
    return figure if _finish(axes, unit, from_zero=True) else None


@styled
def draw_loss(runs: Sequence[RunFolder], title: str = "") -> Figure | None:
    """Training and validation losses, and the bigram model's as the line to beat; None where no loss is a number."""
    figure = Figure(figsize=(9.0, 4.2))
    axes = figure.subplots()
    for index, run in enumerate(runs):
        name = f"{run.label}, " if len(runs) > 1 else ""
        _line(axes, index, run.points("loss"), label=f"{name}training")
        validations = run.points("loss", "validation")
        _line(axes, index if name else 1, validations, marker="o", linestyle=":", label=f"{name}validation")
        if validations and validations[-1][1] is not None:
            axes.annotate(f"{validations[-1][1]:.4g}", validations[-1], (7, 0), textcoords="offset points", va="center")
    units = " or ".join(dict.fromkeys(run.unit for run in runs))
    if not _finish(axes, f"nats per {units}"):
        return None
    for bigram in {float(run.end["bigram_loss"]) for run in runs if run.end.get("bigram_loss") is not None}:
        axes.axhline(bigram, color=QUIET, linestyle="--", label=f"{units}-bigram counts: {bigram:.4g}")
    figure.suptitle(title, x=0.01, ha="left", wrap=True)
    lines = axes.get_lines()
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=3)
    return figure


def _line(axes: Axes, index: int, points: Sequence[Point], **look: Any) -> None:
    """The curve of a run; a long one faint, behind its mean over the fiftieth of the points around each."""
    steps, values = np.array(points, float).reshape(-1, 2).T
    known = np.isfinite(values)
    if not known.any():
        return
    dashes = "-" if index < len(RUN_COLOURS) else "--"
    look = {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "linestyle": dashes, **look}
    if len(values) >= _ENOUGH_FOR_A_MEAN and "marker" not in look:
        around = np.ones(2 * max(1, len(values) // 100) + 1)
        sums = np.convolve(np.where(known, values, 0.0), around, "same")
        counts = np.convolve(known, around, "same")
        means = np.divide(sums, counts, np.full_like(sums, np.nan), where=counts > 0)
        axes.plot(steps, means, **{**look, "label": f"{look.get('label', '')}, running mean"})
        look |= {"linewidth": 0.8, "alpha": 0.45}
    elif not known.all() or len(values) == 1:
        look.setdefault("marker", ".")  # a number between two gaps would be no line
    axes.plot(steps, values, **look)


def _finish(axes: Axes, unit: str, *, from_zero: bool = False) -> bool:
    """Axes and grid; False where nothing is drawn."""
    if not axes.get_lines():
        return False
    low, high = axes.dataLim.intervaly
    if low > 0 and high > 30 * low and high > 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    elif from_zero and low >= 0:
        axes.set_ylim(bottom=0)
    axes.locator_params("x", nbins=5, integer=True)
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(axis="y", alpha=0.5)
    return True
