"""The overlap picture as data for ``page.html.j2``: bars along a common axis of milliseconds.

The strip of the whole step shows computation, and collectives under it. Below it each bucket has a row, with its
reduction beside the backward that it overlaps, or with its gathers beside the forward that reads the parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...training.recording import OPTIMIZER_PHASE
from ..intervals import Interval, clip, length, without
from ..overlap import computing, overlap_share
from .bucket_times import BucketTimes, Kind, bucket_times
from .charts import Tick, nice_ticks

__all__ = ["Bar", "Lanes", "draw_buckets", "draw_step"]


@dataclass(frozen=True)
class Bar:
    """A stretch of time in a row. ``left`` and ``width`` are parts of a thousand of the window."""

    kind: str
    """Class in ``page.css``: forward, backward, synced, optimizer, drain, ready, hidden, exposed or waited."""
    left: float
    width: float
    text: str
    """What a pointer reads."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Rows along one axis of time."""

    title: str
    rows: list[tuple[str, BucketTimes | None, list[Bar]]]
    """Label, the bucket's times, and bars; the strip of the whole step has no bucket."""
    ticks: list[Tick]
    hidden_share: float
    in_flight_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class _Window:
    start: float
    end: float

    def bar(self, kind: str, start: float, end: float, text: str, *, hairline: float = 0.0) -> list[Bar]:
        """One bar, or none where the stretch lies outside of the window. ``hairline``: least width."""
        inside = clip([(start, max(end, start + hairline * self.length))], (self.start, self.end))
        return [
            Bar(kind, 1e3 * (left - self.start) / self.length, 1e3 * (right - left) / self.length, text)
            for left, right in inside
        ]

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def ticks(self) -> list[Tick]:
        return nice_ticks(0.0, 1e3 * self.length)


def draw_step(timeline: dict[str, Any]) -> Lanes:
    """Computation and collectives from the step's first forward to the end of the next step's first forward."""
    spans = [span for kind in ("forwards", "backwards", "phases") for span in timeline[kind]]
    collectives = [*timeline["buckets"], *timeline["gathers"]]
    start = min(span["start"] for span in spans)
    end = max([*(span["end"] for span in spans), *(span["finished"] for span in collectives)])
    window = _Window(start, end)
    busy = computing(timeline)
    rows = [("computation", None, _computation(timeline, window))]
    for label, kind in (("reductions", "buckets"), ("gathers", "gathers")):
        if timeline[kind]:
            rows.append((label, None, [bar for span in timeline[kind] for bar in _flight(span, busy, window)]))
    waited = [w for w in timeline["waits"] if w["end"] > w["start"]]
    rows.append(("waits", None, [bar for wait in waited for bar in _wait(wait, window)]))
    return _lanes(f"Step {timeline['step']} as a whole", timeline, "buckets", rows, window)


def draw_buckets(timeline: dict[str, Any], kind: Kind) -> Lanes | None:
    """A row for each bucket; None where no collective of this kind ran."""
    times = bucket_times(timeline, kind)
    spans = timeline[kind]
    if not spans:
        return None
    window = _reductions_window(timeline) if kind == "buckets" else _gathers_window(timeline)
    busy = computing(timeline)
    rows = []
    for each in times:
        bars = _computation(timeline, window)
        for span in each.spans:
            if "ready" in span and span["ready"] < span["launched"]:
                text = f"ready, launched {_ms(span['launched'] - span['ready'])} later"
                bars += window.bar("ready", span["ready"], span["launched"], text)
            bars += _flight(span, busy, window)
        for wait in each.waits:
            bars += _wait(wait, window)
        rows.append((_short(each.bucket), each, bars))
    title = (
        "Reductions of gradients, bucket by bucket" if kind == "buckets" else "Gathers of parameters, bucket by bucket"
    )
    return _lanes(title, timeline, kind, rows, window)


def _lanes(title: str, timeline: dict[str, Any], kind: Kind, rows: list[Any], window: _Window) -> Lanes:
    share, times = overlap_share(timeline, kind), bucket_times(timeline, kind)
    return Lanes(
        title=title,
        rows=rows,
        ticks=window.ticks,
        hidden_share=share.fraction,
        in_flight_ms=1e3 * share.collective_seconds,
        exposed_ms=sum(each.exposed_ms for each in times),
    )


def _reductions_window(timeline: dict[str, Any]) -> _Window:
    """The final microbatch's backward and all reductions, with the waits for them."""
    backward = next((span for span in timeline["backwards"] if span["synced"]), timeline["backwards"][-1])
    spans = timeline["buckets"]
    last = max(span["finished"] for span in spans)
    start = min(backward["start"], *(span["ready"] for span in spans))
    return _Window(start, start + 1.02 * (max(backward["end"], last) - start))


def _gathers_window(timeline: dict[str, Any]) -> _Window:
    """All gathers, and the beginning of the forward that goes on after the last one."""
    spans = timeline["gathers"]
    start, last = min(span["launched"] for span in spans), max(span["finished"] for span in spans)
    return _Window(start, start + 1.4 * max(last - start, 1e-6))


def _computation(timeline: dict[str, Any], window: _Window) -> list[Bar]:
    bars = []
    for span in timeline["forwards"]:
        bars += window.bar("forward", span["start"], span["end"], f"forward, {_ms(_length(span))}")
    for number, span in enumerate(timeline["backwards"], 1):
        kind, what = ("synced", "gradients are reduced") if span["synced"] else ("backward", "no_sync")
        bars += window.bar(kind, span["start"], span["end"], f"backward {number}, {what}, {_ms(_length(span))}")
    for span in timeline["phases"]:
        kind = "optimizer" if span["name"] == OPTIMIZER_PHASE else "drain"
        bars += window.bar(kind, span["start"], span["end"], f"{span['name']}, {_ms(_length(span))}")
    return bars


def _flight(span: dict[str, Any], busy: Sequence[Interval], window: _Window) -> list[Bar]:
    """One collective from its launch to its end, in parts under computation and parts that are not."""
    flight = (span["launched"], span["finished"])
    hidden = clip(busy, flight)
    size = f"{span['bucket']}: {span['collective']}, {span['nbytes'] / 2**20:.2f} MiB, {_ms(flight[1] - flight[0])}"
    text = f"{size}, {_ms(length(hidden))} of it under computation"
    if flight[1] <= flight[0]:
        return window.bar("hidden", *flight, text, hairline=0.0015)
    bars = [bar for start, end in hidden for bar in window.bar("hidden", start, end, text)]
    return bars + [bar for start, end in without([flight], hidden) for bar in window.bar("exposed", start, end, text)]


def _wait(wait: dict[str, Any], window: _Window) -> list[Bar]:
    text = f"computation waits {_ms(_length(wait))} for {wait['collective']} of {wait['bucket']}"
    return window.bar("waited", wait["start"], wait["end"], text)


def _short(bucket: str) -> str:
    """``bucket 3 (blocks.1.a.weight .. blocks.1.b.weight)`` -> ``3: blocks.1.a .. blocks.1.b``."""
    name, _, parameters = bucket.partition(" (")
    label = f"{name.removeprefix('bucket ')}: {parameters.rstrip(')')}" if parameters else name
    return label.replace(".weight", "")


def _length(span: dict[str, Any]) -> float:
    return float(span["end"] - span["start"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
