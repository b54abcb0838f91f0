"""Curves over steps, one run or several: pictures of the page, ``loss.png``, and the picture of a comparison."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from .drawing import INK, QUIET, dress
from .run_folder import Point, RunFolder

__all__ = ["RUN_COLOURS", "draw_curves", "draw_loss", "thin_out"]

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a1478a", "#8a6d00", "#7f7f7f")
"""After Okabe and Ito: told apart with any colour vision, in light and in dark."""
_MOST_POINTS = 600
_ENOUGH_FOR_A_MEAN = 60  # points, from which on a curve gets a running mean


def draw_curves(curves: Sequence[Sequence[Point]], unit: str) -> Figure | None:
    """A curve for each run; None where no run has a number."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.subplots()
    for index, points in enumerate(curves):
        _line(axes, index, points)
    return figure if _finish(axes, unit, from_zero=True) else None


def draw_loss(runs: Sequence[RunFolder], title: str = "", size: tuple[float, float] = (9.0, 4.2)) -> Figure | None:
    """Training and validation losses, and the bigram model's as the line to beat; None where no loss is a number."""
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        name = f"{run.label}, " if len(runs) > 1 else ""
        _line(axes, index, run.points("loss"), label=f"{name}training")
        validations = run.points("loss", "validation")
        look = {"marker": "o", "markersize": 4.5, "linestyle": (0, (1, 1.5)), "label": f"{name}validation"}
        _line(axes, index if name else 1, validations, **look)
        if validations and validations[-1][1] is not None:
            axes.annotate(
                f"{validations[-1][1]:.4g}", validations[-1], (7, 0), textcoords="offset points", va="center", color=INK
            )
    units = " or ".join(dict.fromkeys(run.unit for run in runs))
    if not _finish(axes, f"nats per {units}"):
        return None
    for bigram in dict.fromkeys(run.end.get("bigram_loss") for run in runs):
        if bigram is not None:
            axes.axhline(bigram, color=QUIET, linestyle=(0, (5, 4)), label=f"{units}-bigram counts: {bigram:.4g}")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold", wrap=True)
    handles = axes.get_lines()
    labels = [str(line.get_label()) for line in handles]
    columns = max(1, int(size[0] / (0.7 + 0.075 * max(map(len, labels)))))
    figure.legend(handles, labels, frameon=False, labelcolor=INK, loc="outside lower center", ncols=columns)
    return figure


def _line(axes: Axes, index: int, points: Sequence[Point], **look: Any) -> None:
    """The curve of a run; a long one faint, behind its mean over the fiftieth of the points around each."""
    steps, values = np.array([x for x, _ in points], float), np.array([y for _, y in points], float)
    if not np.isfinite(values).any():
        return
    dashes = {} if index < len(RUN_COLOURS) else {"linestyle": "--"}
    look = {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "linewidth": 1.7, **dashes, **look}
    if len(values) >= _ENOUGH_FOR_A_MEAN and "marker" not in look:
        reach = max(1, len(values) // 100)
        centres = np.unique(np.linspace(0, len(values) - 1, _MOST_POINTS // 2).astype(int))
        around = [values[max(0, centre - reach) : centre + reach + 1] for centre in centres]
        means = [np.nanmean(each) if np.isfinite(each).any() else np.nan for each in around]
        axes.plot(steps[centres], means, **{**look, "label": f"{look.get('label', '')}, running mean"})
        look |= {"linewidth": 0.8, "alpha": 0.45}
    elif np.isnan(values).any() or len(values) == 1:
        look.setdefault("marker", ".")  # a number between two gaps would be no line
    kept = thin_out(values)
    axes.plot(steps[kept], values[kept], **look)


def _finish(axes: Axes, unit: str, *, from_zero: bool = False) -> bool:
    """Axes and grid; False where nothing is drawn."""
    shown: list[Any] = [y for line in axes.get_lines() for y in np.asarray(line.get_ydata()) if np.isfinite(y)]
    if not shown:
        return False
    low, high = min(shown), max(shown)
    if low > 0 and high > 30 * low and high > 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif from_zero and low >= 0:
        axes.set_ylim(bottom=0, top=1.08 * high or 1.0)
    if axes.get_yscale() == "linear" and 1e4 <= high < 1e15:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.margins(x=0.06)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.grid(axis="y", color=QUIET, alpha=0.3)
    axes.tick_params(colors=INK, labelsize=9)
    dress(axes, "")
    return True


def thin_out(values: Any) -> Any:
    """Indices of about ``_MOST_POINTS`` values: of each stretch the lowest, the highest, and the first gap."""
    kept: list[int] = []
    for part in np.array_split(np.arange(len(values)), min(len(values), _MOST_POINTS // 2)):
        stretch = values[part]
        lowest, highest = np.nan_to_num(stretch, nan=np.inf).argmin(), np.nan_to_num(stretch, nan=-np.inf).argmax()
        kept += part[[lowest, highest, stretch.argmax()]].tolist()  # argmax of NaN is the first NaN
    return np.unique(kept) if len(values) > _MOST_POINTS else np.arange(len(values))
