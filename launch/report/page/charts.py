"""Curves over steps as data for ``page.html.j2``: ticks, SVG paths, and the values that a pointer reads.

A chart's area is 1000 x 1000 and stretches to the width of its place on the page. Text lies outside of it, so that text
has the same size at each width.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from matplotlib.ticker import LogLocator, MaxNLocator

__all__ = ["Chart", "Series", "Tick", "nice_ticks", "thin_out", "with_mean"]

_SIZE = 1000.0
_MOST_POINTS = 600
_ENOUGH_FOR_A_MEAN = 60  # points, from which on a curve gets a running mean

Point = tuple[float, float | None]
"""Step and value; None: no number was recorded, and the line has a gap."""
Style = Literal["line", "faint", "marked", "level"]


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    percent: float
    """Place along the axis, from the left or from the bottom."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    run    index of the run, which decides the colour
    style  line; faint: behind another curve of the run; marked: with a dot at each point; level: dashed, one value
    """

    run: int
    label: str
    points: Sequence[Point]
    style: Style = "line"


@dataclass(kw_only=True)
class Chart:
    """Curves with a common axis of steps. ``draw`` first; the template reads the rest.

    top        values above it lie outside: an untrained model's loss would squeeze all that follows
    is_cut     whether there are such values
    from_zero  the axis begins at 0
    log        logarithmic, where the values span more than a factor of 30
    """

    key: str
    title: str
    unit: str
    series: list[Series]
    top: float | None = None
    from_zero: bool = False
    log: bool = False
    is_cut: bool = False
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    paths: list[tuple[Series, str]] = field(default_factory=list)
    hover: dict[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no curve has a value."""
        return not any(value is not None for series in self.series for _, value in series.points)

    def draw(self) -> "Chart":
        """Compute ticks and paths."""
        shown = [(x, y) for series in self.series for x, y in series.points if y is not None]
        values = [y for _, y in shown]
        low, high = min(values), max(values)
        self.log = self.log and low > 0 and high > 30 * low
        if self.top is not None:
            self.is_cut = high > self.top > low
            high = self.top if self.is_cut else high
        if self.from_zero:
            low = min(low, 0.0)
        scale = math.log10 if self.log else float
        bottom, top = _margins(scale(low), scale(high), floor=0.0 if self.from_zero and low == 0.0 else None)
        left, right = min(x for x, _ in shown), max(x for x, _ in shown)
        right += 0.015 * (right - left) or 1.0  # room for a dot at the last step

        self.x_ticks = nice_ticks(left, right, whole=True)
        ticks = LogLocator(numticks=6).tick_values(10**bottom, 10**top) if self.log else None
        self.y_ticks = nice_ticks(bottom, top) if ticks is None else _placed(ticks, map(scale, ticks), bottom, top)

        def place(point: tuple[float, float]) -> str:
            x, y = (point[0] - left) / (right - left), (scale(point[1]) - bottom) / (top - bottom)
            return f"{x * _SIZE:.1f},{(1 - y) * _SIZE:.1f}"

        self.paths = []
        curves: list[dict[str, Any]] = []
        for series in self.series:
            points = thin_out(series.points)
            if series.style == "level":
                points = [(left, points[0][1]), (right, points[0][1])]
            self.paths.append((series, _path(points, place)))
            curves.append({"run": series.run, "label": series.label, "points": points, "style": series.style})
        axis = {"left": left, "right": right, "bottom": bottom, "top": top, "log": self.log}
        self.hover = {**axis, "unit": self.unit, "series": curves}
        return self


def with_mean(run: int, label: str, points: Sequence[Point]) -> list[Series]:
    """The curve; a long one faint, behind its running mean over the fiftieth of the points around each."""
    if len(points) < _ENOUGH_FOR_A_MEAN:
        return [Series(run=run, label=label, points=points)]
    reach, mean = max(1, len(points) // 100), []
    for index, (x, _) in enumerate(points):
        around = [y for _, y in points[max(0, index - reach) : index + reach + 1] if y is not None]
        mean.append((x, sum(around) / len(around) if around else None))
    faint = Series(run=run, label=label, points=points, style="faint")
    return [faint, Series(run=run, label=f"{label}, running mean", points=mean)]


def thin_out(points: Sequence[Point]) -> list[Point]:
    """About ``_MOST_POINTS`` of the points: of each stretch the lowest, the highest, and a gap, so that these stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    kept: set[int] = {0, len(points) - 1}
    length = len(points) / (_MOST_POINTS // 2)
    for part in range(_MOST_POINTS // 2):
        stretch = range(int(part * length), int((part + 1) * length))
        finite = [index for index in stretch if points[index][1] is not None]
        kept.update([index for index in stretch if points[index][1] is None][:1])
        if finite:
            kept.add(min(finite, key=lambda index: points[index][1] or 0.0))
            kept.add(max(finite, key=lambda index: points[index][1] or 0.0))
    return [points[index] for index in sorted(kept)]


def nice_ticks(low: float, high: float, *, whole: bool = False) -> list[Tick]:
    """About five round numbers from ``low`` to ``high``, with their places between the two."""
    ticks = [float(tick) for tick in MaxNLocator(nbins=5, integer=whole).tick_values(low, high)]
    return _placed(ticks, ticks, low, high)


def _placed(values: Iterable[float], places: Iterable[float], low: float, high: float) -> list[Tick]:
    slack = 1e-9 * (high - low)
    return [
        Tick(100 * (place - low) / (high - low), _number(float(value)))
        for value, place in zip(values, places, strict=True)
        if low - slack <= place <= high + slack
    ]


def _margins(low: float, high: float, *, floor: float | None) -> tuple[float, float]:
    """The ends of an axis that shows ``low`` to ``high`` with a little room around them."""
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low - room if floor is None else floor), high + room


def _number(value: float) -> str:
    """``0.30000000000000004`` -> ``0.3``, ``12000.0`` -> ``12k``, ``0.00015`` -> ``1.5e-4``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.4e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}"


def _path(points: Sequence[Point], place: Any) -> str:
    """SVG: a line through the points, with gaps; a point between two gaps is a line of no length."""
    parts: list[str] = []
    pen_is_down = False
    for x, y in points:
        if y is not None:
            parts.append(f"{'L' if pen_is_down else 'M'}{place((x, y))}")
            if not pen_is_down:
                parts.append("h0")
        pen_is_down = y is not None
    return "".join(parts)
