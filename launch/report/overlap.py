"""How much of a step's communication ran under computation, from the times in a ``timeline`` record.

*Exposed* is the time that computation stood still: the sum of the recorded waits for a bucket's collectives. A wait
counts for the bucket that it names, so the sum over buckets is the whole time that the step waited.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..training.recording import OPTIMIZER_PHASE
from .intervals import Interval, clip, length, union, without
from .table import grouped

__all__ = ["Bar", "BucketTimes", "bucket_times", "chrome_trace", "computing", "hidden_share", "lanes", "overlap_lines"]

Span = dict[str, Any]


class BucketTimes(NamedTuple):
    """One bucket's reductions, or its gathers. Times are in milliseconds."""

    bucket: str
    collective: str
    nbytes: int
    in_flight_ms: float
    hidden_ms: float
    """The part of ``in_flight_ms`` that lay under computation."""
    exposed_ms: float
    """Time that computation waited."""


class Bar(NamedTuple):
    """What happened from ``start`` to ``end``, in seconds.

    ``kind``: forward, backward, synced, optimizer, drain, waited, ready (not yet launched), buckets or gathers.
    """

    kind: str
    start: float
    end: float
    text: str


def computing(timeline: Span) -> list[Interval]:
    """When forwards, backwards, the optimizer or delayed weight gradients ran without waiting for a collective."""
    ran = [(span["start"], span["end"]) for kind in ("forwards", "backwards", "phases") for span in timeline[kind]]
    return without(union(ran), union((span["start"], span["end"]) for span in timeline["waits"]))


def bucket_times(timeline: Span, kind: str) -> list[BucketTimes]:
    """One entry for each bucket, in the order of launches; buckets that were only waited for come last.

    timeline  a ``timeline`` record of ``metrics.jsonl``
    kind      ``buckets``: reductions of gradients; ``gathers``: all-gathers of parameters
    """
    busy = computing(timeline)
    spans = grouped(timeline[kind], lambda span: span["bucket"])
    waited = (wait for wait in timeline["waits"] if (wait["collective"] == "all_gather") == (kind == "gathers"))
    waits = grouped(waited, lambda wait: wait["bucket"])
    times = []
    for bucket in {**spans, **waits}:
        mine, awaited = spans.get(bucket, []), waits.get(bucket, [])
        times.append(
            BucketTimes(
                bucket,
                (mine or awaited)[0]["collective"],
                sum(span["nbytes"] for span in mine),
                1e3 * sum(span["finished"] - span["launched"] for span in mine),
                1e3 * sum(length(clip(busy, (span["launched"], span["finished"]))) for span in mine),
                1e3 * sum(wait["end"] - wait["start"] for wait in awaited),
            )
        )
    return times


def hidden_share(times: Sequence[BucketTimes]) -> float:
    """Part of the time in flight that lay under computation, in [0, 1]; 0 without collectives."""
    total = sum(each.in_flight_ms for each in times)
    return sum(each.hidden_ms for each in times) / total if total > 0 else 0.0


def overlap_lines(timeline: Span | None) -> list[str]:
    """A readable line about the reductions and one about the gathers; no line for collectives that did not run."""
    lines = []
    for kind, what in (("buckets", "reductions of gradients"), ("gathers", "gathers of parameters")):
        if timeline is None or all(span["collective"] == "none" for span in timeline[kind]):
            continue
        times = bucket_times(timeline, kind)
        lines.append(
            f"step {timeline['step']}: {len(timeline[kind])} {what}, {sum(t.nbytes for t in times) / 2**20:.1f} MiB, "
            f"{sum(t.in_flight_ms for t in times):.1f} ms in flight, {hidden_share(times):.0%} of it under "
            f"computation, which waited {sum(t.exposed_ms for t in times):.1f} ms for them"
        )
    return lines


def lanes(timeline: Span) -> dict[str, list[Bar]]:
    """Bars by the label of their lane: the computation, its waits, and each bucket.

    Gathers of sharded parameters name the bucket without its number; they are in the lane of its reductions.
    """
    computation = [Bar("forward", span["start"], span["end"], "forward") for span in timeline["forwards"]]
    for number, span in enumerate(timeline["backwards"], 1):
        kind, what = ("synced", "reduced") if span.get("synced") else ("backward", "no_sync")
        computation.append(Bar(kind, span["start"], span["end"], f"backward {number}, {what}"))
    for span in timeline["phases"]:
        kind = "optimizer" if span["name"] == OPTIMIZER_PHASE else "drain"
        computation.append(Bar(kind, span["start"], span["end"], span["name"]))
    waits = [Bar("waited", w["start"], w["end"], f"{w['collective']} of {w['bucket']}") for w in timeline["waits"]]
    found = {"computation": computation, "waits": waits}
    labels: dict[str, str] = {}
    for kind in ("buckets", "gathers"):
        for span in timeline[kind]:
            name, _, parameters = span["bucket"].replace(".weight", "").partition(" (")
            held = parameters.rstrip(")") or name
            label = f"{name.removeprefix('bucket ')}: {held}" if parameters else f"gathered: {held}"
            bars = found.setdefault(labels.setdefault(held, label), [])
            if kind == "buckets":
                bars.append(Bar("ready", span["ready"], span["launched"], "ready, not launched"))
            text = f"{span['collective']}, {span['nbytes'] / 2**20:.2f} MiB"
            bars.append(Bar(kind, span["launched"], span["finished"], text))
    return found


def chrome_trace(timeline: Span) -> Span:
    """The step as a Chrome trace, which Perfetto and ``chrome://tracing`` open: a thread for each lane."""
    events: list[Span] = []
    for lane, (label, bars) in enumerate(lanes(timeline).items()):
        place = {"pid": 0, "tid": lane}
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": label}})
        for bar in bars:
            times = {"ts": 1e6 * bar.start, "dur": 1e6 * max(0.0, bar.end - bar.start)}
            events.append({"name": bar.text, "cat": bar.kind, "ph": "X", **place, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
