"""The picture of one step: computation, waits and each bucket's collectives, on one axis of time."""

from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure

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
    "exposed": ("#e07b39", "collective, exposed"),
    "hidden": ("#1f77a4", "collective under computation"),
}
"""Colour and name of what bars show. The last ones lie on top."""
_MOST_LANES = 80
_LONGEST = 46  # letters of a lane's label


@styled
def draw_step(timeline: dict[str, Any]) -> Figure:
    """From the step's first forward to the end of the next step's first forward, as recorded on rank 0."""
    events = [event for event in chrome_trace(timeline)["traceEvents"] if event["tid"] < _MOST_LANES]
    lanes = [plain(event["args"]["name"])[:_LONGEST] for event in events if event["ph"] == "M"]
    busy = [(1e3 * start, 1e3 * end) for start, end in computing(timeline)]
    bars: dict[str, list[tuple[float, ...]]] = defaultdict(list)  # start, width, bottom and height of each
    for event in events[: -len(lanes)]:
        kind, start, width = event["cat"], event["ts"] / 1e3, event["dur"] / 1e3
        if kind in ("buckets", "gathers"):  # reductions above, gathers below
            bottom = event["tid"] - 0.4 * (kind == "buckets")
            bars["exposed"].append((start, width, bottom, 0.4))
            hidden = clip(busy, (start, start + width))
            bars["hidden"] += [(left, right - left, bottom, 0.4) for left, right in hidden]
        else:
            bars[kind].append((start, width, event["tid"] - 0.4, 0.12 if kind == "ready" else 0.8))

    figure = Figure(figsize=(11, 1.5 + 0.24 * len(lanes)))
    axes = figure.subplots()
    for kind, (colour, name) in _KINDS.items():
        if bars[kind]:
            starts, widths, bottoms, heights = zip(*bars[kind], strict=True)
            axes.barh(bottoms, widths, heights, starts, align="edge", color=colour, label=name)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlabel(f"ms since step {timeline['step']} began, rank 0")
    title = "\n".join(overlap_lines(timeline)) or "One rank: buckets become ready, and there is nothing to reduce"
    figure.suptitle(title, x=0.01, ha="left", wrap=True)
    figure.legend(loc="outside lower center", ncols=5)
    return figure
