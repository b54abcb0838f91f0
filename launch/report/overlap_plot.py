"""``overlap.png``: when each bucket's gradients were reduced and its parameters gathered, and what ran meanwhile.

The upper panel shows one step, from its first forward to the end of the next step's first forward. The lower panels
have a row for each bucket. The left one shows the bucket's reduction beside the final microbatch's backward, the right
one its all-gather beside the next forward. Parameters that are sharded at rest are all-gathered for the backward too:
these gathers are in the left panel, in the lower half of the row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..training.recording import OPTIMIZER_PHASE, WGRAD_PHASE
from .drawing import (
    BACKWARD,
    DRAIN,
    EXPOSED,
    FORWARD,
    HIDDEN,
    INK,
    OPTIMIZER,
    QUIET,
    READY,
    WAITING,
    dress,
    plt,
    save,
)
from .intervals import Interval, clip
from .overlap import computing, overlap_share

__all__ = ["draw_overlap"]

Span = dict[str, Any]


class _Window(NamedTuple):
    """What a panel of buckets shows. Times are drawn relative to ``origin``."""

    origin: float
    shades: list[tuple[Interval, str, str]]
    """Intervals of computation, each with its colour and label."""
    spans: Sequence[Span]
    busy: list[Interval]
    label: str
    apart: bool
    """Whether gathers are drawn in the lower half of a row and reductions in the upper half."""


def draw_overlap(timeline: dict[str, Any], path: Path) -> Path:
    """Draw one ``timeline`` record."""
    labels, rows = _rows(timeline)
    windows = [_reductions(timeline)]
    if _after_backwards(timeline, timeline.get("gathers", ())):
        windows.append(_gathers(timeline))
    lanes = 1.2 + len(labels)
    figure = plt.figure(figsize=(11 if len(windows) == 1 else 14, 2.6 + 0.4 * lanes), dpi=150, layout="constrained")
    grid = figure.add_gridspec(
        2, len(windows), height_ratios=[0.9, 0.4 * lanes], width_ratios=[1.35, 1][: len(windows)]
    )
    whole = figure.add_subplot(grid[0, :])
    _draw_whole_step(whole, timeline)
    dress(whole, _title(timeline))
    for column, window in enumerate(windows):
        axes = figure.add_subplot(grid[1, column])
        _draw_window(axes, window, rows, len(labels))
        if column == 0:
            axes.set_yticks(range(len(labels)), labels, fontsize=8, color=INK)
        else:
            axes.set_yticks([])
        axes.tick_params(axis="y", length=0)
    waits = [any(text == "waits" for _, _, text in window.shades) for window in windows]
    _draw_legend(figure, timeline, waits="computation waits" if waits[0] else "forward waits" if any(waits) else None)
    return save(figure, path)


def _rows(timeline: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """The rows' labels, and the row of each bucket by name.

    Gathers of sharded parameters name the bucket without its number, so each bucket is found under both names.
    """
    labels: list[str] = []
    rows: dict[str, int] = {}
    for span in (*timeline["buckets"], *timeline.get("gathers", ())):
        name = span["bucket"]
        if name not in rows:
            rows[name] = len(labels)
            rows.setdefault(name.partition(" (")[2].rstrip(")"), len(labels))
            labels.append(_bucket_label(span))
    return labels, rows


def _title(timeline: dict[str, Any]) -> str:
    buckets, gathers = timeline["buckets"], timeline.get("gathers", ())
    if buckets[0]["collective"] == "none":
        return "One rank: buckets become ready, and there is nothing to reduce"
    share, but_last = overlap_share(timeline), overlap_share(timeline, leave_out_last=True)
    reductions = "collective" if not gathers else "the reductions'"
    title = f"{share.fraction:.0%} of {reductions} time lies under computation"
    if len(buckets) > 1:
        title += f", {but_last.fraction:.0%} of all buckets' but the last"
    if gathers:
        title += f"; of the gathers' {overlap_share(timeline, 'gathers').fraction:.0%}"
    return title


# ---- What the panels of buckets show. ----


def _reductions(timeline: dict[str, Any]) -> _Window:
    """The final microbatch's backward and, with delayed weight gradients, their computation after the backward."""
    backward = next((span for span in timeline["backwards"] if span["synced"]), timeline["backwards"][-1])
    drain = next(
        (s for s in timeline["phases"] if s["name"] == WGRAD_PHASE and s["start"] >= backward["end"]),
        None,
    )
    what = "backward of the final microbatch" if drain is None else "backward: input gradients"
    shades = [((backward["start"], backward["end"]), BACKWARD, what)]
    if drain is not None:
        shades.append(((drain["start"], drain["end"]), DRAIN, WGRAD_PHASE))
    reductions = [span for span in timeline["buckets"] if span["launched"] >= backward["start"]]
    gathers = _of_backward(timeline, backward)
    if gathers:
        shades += _waits(timeline, backward)
    what = "reductions of gradients, and gathers below them" if gathers else "reductions of gradients"
    label = f"{what}: ms since that backward began"
    return _Window(backward["start"], shades, [*reductions, *gathers], computing(timeline), label, bool(gathers))


def _gathers(timeline: dict[str, Any]) -> _Window:
    """The optimizer's step and the forward that follows it."""
    gathers = _after_backwards(timeline, timeline["gathers"])
    first = min(span["launched"] for span in gathers)
    shades = [
        ((span["start"], span["end"]), OPTIMIZER, "step")
        for span in timeline["phases"]
        if span["name"] == OPTIMIZER_PHASE and span["end"] >= first
    ]
    origin = shades[-1][0][1] if shades else first
    over = timeline["backwards"][-1]["end"]
    forward = next((span for span in timeline["forwards"] if span["start"] >= over), None)
    if forward is not None:
        origin = forward["start"]
        shades.append(((forward["start"], forward["end"]), FORWARD, "next forward"))
        shades += _waits(timeline, forward)
    label = "gathers of parameters: ms since that forward began"
    return _Window(origin, shades, gathers, computing(timeline), label, apart=False)


def _waits(timeline: dict[str, Any], within: Span) -> list[tuple[Interval, str, str]]:
    """Waits that begin within ``within`` and are long enough to be visible."""
    waits = [(w["start"], w["end"]) for w in timeline["waits"] if within["start"] <= w["start"] < within["end"]]
    return [(wait, WAITING, "waits") for wait in waits if wait[1] - wait[0] > 0.002 * _length(within)]


def _of_backward(timeline: dict[str, Any], backward: Span) -> list[Span]:
    """All-gathers for ``backward``, of parameters that are sharded at rest."""
    gathers = timeline.get("gathers", ())
    return [span for span in gathers if backward["start"] <= span["launched"] < backward["end"]]


def _after_backwards(timeline: dict[str, Any], gathers: Sequence[Span]) -> list[Span]:
    """All-gathers of the parameters that the optimizer step has updated."""
    return [span for span in gathers if span["launched"] >= timeline["backwards"][-1]["end"]]


# ---- Drawing. ----


def _draw_whole_step(axes: Axes, timeline: dict[str, Any]) -> None:
    forwards, backwards = timeline.get("forwards", []), timeline["backwards"]
    start = min(span["start"] for span in (*forwards, *backwards))
    whole = max(span["end"] for span in (*forwards, *backwards)) - start

    def bar(span: Span, colour: str, text: str = "", ink: str = INK) -> None:
        left, width = span["start"] - start, _length(span)
        axes.barh(1, _ms(width), left=_ms(left), height=0.72, color=colour)
        if width > 0.009 * whole * len(text):  # only where the text fits: a microbatch may be a small part of the step
            axes.text(_ms(left + width / 2), 1, text, ha="center", va="center", fontsize=8, color=ink)

    for span in forwards:
        is_next = span["start"] >= backwards[-1]["end"]
        bar(span, FORWARD, "next forward" if is_next else "forward")
    for number, span in enumerate(backwards, 1):
        kind = "reduced" if span["synced"] else "no_sync"
        wide = _length(span) > 0.1 * whole
        ink = "white" if span["synced"] else INK
        bar(span, QUIET if span["synced"] else BACKWARD, f"{number}, {kind}" if wide else str(number), ink)
    for span in timeline["phases"]:
        is_step = span["name"] == OPTIMIZER_PHASE
        bar(span, OPTIMIZER if is_step else DRAIN, "step" if is_step else "")
    busy = computing(timeline)
    apart = any(_of_backward(timeline, backward) for backward in backwards)
    for span in (*timeline["buckets"], *timeline.get("gathers", ())):
        lane = -0.6 if apart and "ready" not in span else 0
        _draw_flight(axes, lane, span, busy, origin=start, hairline=0.002 * whole, height=0.5)
    lanes = {1.0: "computation", 0.0: "reductions" if apart else "collectives"} | ({-0.6: "gathers"} if apart else {})
    axes.set_yticks(list(lanes), list(lanes.values()))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=QUIET)
    axes.set_xlabel(f"ms since step {timeline['step']} began", fontsize=8, color=QUIET)
    axes.margins(x=0.01)


def _draw_window(axes: Axes, window: _Window, rows: dict[str, int], num_rows: int) -> None:
    origin = window.origin
    begins = min([0.0, *(span["ready" if "ready" in span else "launched"] - origin for span in window.spans)])
    last = max([*(end - origin for (_, end), _, _ in window.shades), *(s["finished"] - origin for s in window.spans)])
    width = last - begins
    for (start, end), colour, text in window.shades:
        axes.axvspan(_ms(max(start - origin, begins)), _ms(end - origin), color=colour, alpha=0.6, linewidth=0)
        shown = end - origin - max(start - origin, begins)
        if text != "waits" and shown > 0.012 * width * len(text):
            axes.text(_ms(end - origin - shown / 2), -0.82, text, ha="center", va="center", color=INK)
    for span in window.spans:
        row, height = float(rows[span["bucket"]]), 0.56
        if window.apart:
            row, height = row + (-0.2 if "ready" in span else 0.2), 0.28
        launched, finished = span["launched"] - origin, span["finished"] - origin
        if "ready" in span:
            ready = span["ready"] - origin
            axes.plot(
                [_ms(ready), _ms(launched)], [row, row], color=READY, linewidth=1.5, solid_capstyle="butt", zorder=2
            )
            axes.plot(_ms(ready), row, marker="o", markersize=6, color=READY, markeredgecolor="white", zorder=4)
        _draw_flight(axes, row, span, window.busy, origin=origin, hairline=0.0015 * width, height=height)
        axes.annotate(
            f"{_ms(finished - launched):.1f} ms", (_ms(max(finished, launched)), row), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK, zorder=5,
        )  # fmt: skip
    axes.set_ylim(num_rows - 0.4, -1.2)
    axes.set_xlim(_ms(begins - 0.02 * width), _ms(last + 0.12 * width))
    axes.set_xlabel(window.label)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_flight(
    axes: Axes, row: float, span: Span, busy: Sequence[Interval], *, origin: float, hairline: float, height: float
) -> None:
    """One collective from its launch to its end; the parts under computation have a colour of their own."""
    launched, finished = span["launched"], max(span["finished"], span["launched"] + hairline)
    hidden = clip(busy, (launched, finished))
    axes.barh(
        row, _ms(finished - launched), left=_ms(launched - origin), height=height, color=EXPOSED, zorder=3, linewidth=0
    )
    for start, end in hidden:
        axes.barh(row, _ms(end - start), left=_ms(start - origin), height=height, color=HIDDEN, zorder=3, linewidth=0)


def _draw_legend(figure: Any, timeline: dict[str, Any], *, waits: str | None) -> None:
    names = [
        collective.replace("_", "-")
        for collective in dict.fromkeys(s["collective"] for s in (*timeline["buckets"], *timeline.get("gathers", ())))
    ]
    name = " or ".join(names) if names != ["none"] else "no collective"
    handles: list[Any] = [
        Line2D([], [], color=READY, marker="o", markersize=6, markeredgecolor="white", label="ready, until launched"),
        Patch(color=HIDDEN, label=f"{name}, under computation"),
        Patch(color=EXPOSED, label=f"{name}, exposed"),
    ]
    if waits is not None:
        handles.append(Patch(color=WAITING, label=waits))
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles))


def _bucket_label(span: Span) -> str:
    """``bucket 3 (blocks.1.a .. blocks.1.b)`` and the bucket's size, on two lines."""
    name, _, parameters = span["bucket"].partition(" (")
    if not parameters:
        name, parameters = "gathered", name
    first, _, last = parameters.rstrip(")").partition(" .. ")
    held = f"{first} .. {last}" if last else first
    return f"{name}, {span['nbytes'] / 2**20:.1f} MiB\n{held.replace('.weight', '')}"


def _length(span: Span) -> float:
    return float(span["end"] - span["start"])


def _ms(seconds: float) -> float:
    return seconds * 1e3
