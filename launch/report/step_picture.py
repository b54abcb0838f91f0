"""The picture of one step: computation, waits and each bucket's collectives, on one axis of time."""

from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .drawing import BACKWARD, DRAIN, EXPOSED, FORWARD, HIDDEN, INK, OPTIMIZER, QUIET, READY, WAITING, dress
from .intervals import clip, without
from .overlap import bucket_times, computing, hidden_share, lanes
from .run_folder import plain

__all__ = ["draw_step"]

_KINDS = {
    "forward": (FORWARD, "forward"),
    "backward": (BACKWARD, "backward under no_sync"),
    "synced": (QUIET, "backward with reductions"),
    "optimizer": (OPTIMIZER, "optimizer"),
    "drain": (DRAIN, "delayed weight gradients"),
    "waited": (WAITING, "computation waits"),
    "ready": (READY, "ready, until launched"),
    "hidden": (HIDDEN, "collective under computation"),
    "exposed": (EXPOSED, "collective, exposed"),
}
"""Colour and name of what bars show."""
_MOST_LANES = 80
_LONGEST = 46  # letters of a lane's label


def draw_step(timeline: dict[str, Any]) -> Figure:
    """From the step's first forward to the end of the next step's first forward, as recorded on rank 0."""
    rows = list(lanes(timeline).items())[:_MOST_LANES]
    start = min(bar.start for _, row in rows for bar in row)
    whole = max(1e-9, max(bar.end for _, row in rows for bar in row) - start)
    busy = computing(timeline)
    places: dict[tuple[str, float, float], list[tuple[float, float]]] = defaultdict(list)
    for number, (_, row) in enumerate(rows):
        apart = {"buckets", "gathers"} <= {bar.kind for bar in row}  # reductions above, gathers below
        for kind, begin, end, _ in row:
            bottom, height, parts = number - 0.4, 0.12 if kind == "ready" else 0.8, [(kind, begin, end)]
            if kind in ("buckets", "gathers"):
                height = 0.4 if apart else 0.8
                bottom += height * (apart and kind == "gathers")
                hidden = clip(busy, (begin, end)) if end > begin else [(begin, end)]
                parts = [("hidden", *each) for each in hidden]
                parts += [("exposed", *each) for each in without([(begin, end)], hidden)]
            for part, left, right in parts:
                width = max(right - left, 0.0015 * whole)  # else a short one would be invisible
                places[part, bottom, height].append((1e3 * (left - start), 1e3 * width))

    figure = Figure(figsize=(11, 1.5 + 0.24 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (kind, bottom, height), spans in places.items():
        axes.broken_barh(spans, (bottom, height), facecolor=_KINDS[kind][0], zorder=3)
        if bottom == -0.4:  # the computation is also a pale background of the buckets' lanes
            axes.broken_barh(spans, (0.5, len(rows) - 1), facecolor=_KINDS[kind][0], alpha=0.3)
    labels = [plain(label) for label, _ in rows]
    shown = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…" for label in labels]
    axes.set_yticks(range(len(rows)), shown, fontsize=8.5, color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(-5 * whole, 1010 * whole)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=INK)
    axes.set_xlabel(f"ms since step {timeline['step']} began, rank 0", color=INK, fontsize=9)
    dress(axes, "")
    figure.suptitle(_title(timeline), x=0.01, ha="left", color=INK, fontsize=10.5, fontweight="bold", wrap=True)
    drawn = {kind for kind, _, _ in places}
    handles = [Patch(color=colour, label=text) for kind, (colour, text) in _KINDS.items() if kind in drawn]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=5, labelcolor=INK, fontsize=9)
    return figure


def _title(timeline: dict[str, Any]) -> str:
    if all(span["collective"] == "none" for span in timeline["buckets"]):
        return "One rank: buckets become ready, and there is nothing to reduce"
    times = bucket_times(timeline, "buckets")
    title = f"{hidden_share(times):.0%} of the reductions' time lies under computation"
    if len(times) > 1:  # the last bucket becomes ready as the backward ends, so no computation can hide it
        title += f", {hidden_share(times[:-1]):.0%} of all buckets' but the last"
    if timeline["gathers"]:
        title += f"; of the gathers' {hidden_share(bucket_times(timeline, 'gathers')):.0%}"
    return title
