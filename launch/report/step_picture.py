"""The picture of one step: computation, waits and each bucket's collectives, on one axis of time."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .drawing import styled
from .intervals import clip
from .overlap import chrome_trace, computing, overlap_lines
from .run_folder import plain

__all__ = ["draw_step"]

_KINDS = {
    "forward": ("#dcebdc", "forward"),
    "backward": ("#dfe6ec", "backward under no_sync"),
    "synced": ("#8a97a3", "backward with reductions"),
    "optimizer": ("#e2dbee", "optimizer"),
    "drain": ("#efe3c8", "delayed weight gradients"),
    "waited": ("#f6cdb4", "computation waits"),
    "ready": ("#2a9d5c", "ready, until launched"),
    "hidden": ("#1f77a4", "collective under computation"),
    "exposed": ("#e07b39", "collective, exposed"),
}
"""Colour and name of what bars show."""
_MOST_LANES = 80
_LONGEST = 46  # letters of a lane's label


@styled
def draw_step(timeline: dict[str, Any]) -> Figure:
    """From the step's first forward to the end of the next step's first forward, as recorded on rank 0."""
    events = [event for event in chrome_trace(timeline)["traceEvents"] if event["tid"] < _MOST_LANES]
    lanes = [plain(event["args"]["name"])[:_LONGEST] for event in events if event["ph"] == "M"]
    busy = [(1e3 * start, 1e3 * end) for start, end in computing(timeline)]
    bars: list[tuple[str, float, float, float, float]] = []  # kind, bottom, height, start and end
    for event in events:
        if event["ph"] == "M":
            continue
        kind, lane, start = event["cat"], event["tid"], event["ts"] / 1e3
        end = start + event["dur"] / 1e3
        if kind in ("buckets", "gathers"):  # reductions above, gathers below
            bottom = lane - 0.4 * (kind == "buckets")
            bars.append(("exposed", bottom, 0.4, start, end))
            bars += [("hidden", bottom, 0.4, *part) for part in clip(busy, (start, end))]
        else:
            bars.append((kind, lane - 0.4, 0.12 if kind == "ready" else 0.8, start, end))
    kinds, bottoms, heights, starts, ends = zip(*bars, strict=True)
    whole = max(ends) - min(starts)
    widths = [max(end - start, 0.0015 * whole) for start, end in zip(starts, ends, strict=True)]  # all can be seen
    lefts = [start - min(starts) for start in starts]

    figure = Figure(figsize=(11, 1.5 + 0.24 * len(lanes)))
    axes = figure.subplots()
    for start, end in busy:
        axes.axvspan(start - min(starts), end - min(starts), color=_KINDS["backward"][0], alpha=0.5, linewidth=0)
    axes.barh(bottoms, widths, heights, lefts, align="edge", color=[_KINDS[kind][0] for kind in kinds], zorder=3)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(-0.005 * whole, 1.01 * whole or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"ms since step {timeline['step']} began, rank 0")
    title = "\n".join(overlap_lines(timeline)) or "One rank: buckets become ready, and there is nothing to reduce"
    figure.suptitle(title, x=0.01, ha="left", wrap=True)
    handles = [Patch(color=colour, label=text) for kind, (colour, text) in _KINDS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure
