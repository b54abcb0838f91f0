"""How much of a step's communication ran under computation, from the times in a ``timeline`` record.

*Exposed* is the time that computation stood still: the sum of the recorded waits for a bucket's collectives. A wait
counts for the bucket that it names, so the sum over buckets is the whole time that the step waited.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..training.metrics import OPTIMIZER_PHASE
from .intervals import Interval, clip, length, union, without

__all__ = ["BucketTimes", "bucket_times", "chrome_trace", "computing", "hidden_share", "overlap_lines"]

Span = dict[str, Any]

_STRETCHES = (
    ("forward", "forwards", "start", "end"),
    ("backward", "backwards", "start", "end"),
    ("drain", "phases", "start", "end"),
    ("waited", "waits", "start", "end"),
    ("ready", "buckets", "ready", "launched"),
    ("buckets", "buckets", "launched", "finished"),
    ("gathers", "gathers", "launched", "finished"),
)
"""Category of an event in the trace, spans of the record, and the fields with which each begins and ends."""


@dataclass
class BucketTimes:
    """One bucket's reductions, or its gathers. Times are in milliseconds."""

    bucket: str
    nbytes: int = 0
    in_flight_ms: float = 0.0
    hidden_ms: float = 0.0
    """The part of ``in_flight_ms`` that lay under computation."""
    exposed_ms: float = 0.0
    """Time that computation waited."""


def computing(timeline: Span) -> list[Interval]:
    """When forwards, backwards, the optimizer or delayed weight gradients ran without waiting for a collective."""
    ran = [(span["start"], span["end"]) for kind in ("forwards", "backwards", "phases") for span in timeline[kind]]
    return without(union(ran), union((span["start"], span["end"]) for span in timeline["waits"]))


def bucket_times(timeline: Span, kind: str) -> list[BucketTimes]:
    """One entry for each bucket, in the order of launches; buckets that were only waited for come last.

    timeline  a ``timeline`` record of ``metrics.jsonl``
    kind      ``buckets``: reductions of gradients; ``gathers``: all-gathers of parameters

    Empty where nothing was sent.
    """
    busy = computing(timeline)
    found: dict[str, BucketTimes] = {}
    for span in timeline[kind]:
        if span["collective"] != "none":
            launched, finished = span["launched"], span["finished"]
            each = found.setdefault(span["bucket"], BucketTimes(span["bucket"]))
            each.nbytes += span["nbytes"]
            each.in_flight_ms += 1e3 * (finished - launched)
            each.hidden_ms += 1e3 * length(clip(busy, (launched, finished)))
    for wait in timeline["waits"] if found else ():
        if (wait["collective"] == "all_gather") == (kind == "gathers"):
            each = found.setdefault(wait["bucket"], BucketTimes(wait["bucket"]))
            each.exposed_ms += 1e3 * (wait["end"] - wait["start"])
    return list(found.values())


def hidden_share(times: Sequence[BucketTimes]) -> float:
    """Part of the time in flight that lay under computation, in [0, 1]; 0 without collectives."""
    total = sum(each.in_flight_ms for each in times)
    return sum(each.hidden_ms for each in times) / total if total > 0 else 0.0


def overlap_lines(timeline: Span) -> list[str]:
    """A readable line about the reductions and one about the gathers; no line for collectives that did not run."""
    lines = []
    for kind, what in (("buckets", "reductions of gradients"), ("gathers", "gathers of parameters")):
        times = bucket_times(timeline, kind)
        if times:
            nbytes, in_flight_ms = sum(each.nbytes for each in times), sum(each.in_flight_ms for each in times)
            lines.append(
                f"step {timeline['step']}: {len(timeline[kind])} {what}, {nbytes / 2**20:.1f} MiB, {in_flight_ms:.1f} "
                f"ms in flight, {hidden_share(times):.0%} of it under computation, which waited "
                f"{sum(each.exposed_ms for each in times):.1f} ms for them"
            )
    return lines


def chrome_trace(timeline: Span) -> Span:
    """The step as a Chrome trace, which Perfetto and ``chrome://tracing`` open: times in microseconds.

    A thread is the computation, its waits, or a bucket's collectives by the name of its parameters. The categories of
    events are forward, backward, synced, optimizer, drain, waited, ready (not yet launched), buckets and gathers.
    """
    lanes = {"computation": 0, "waits": 1}
    events: list[Span] = []
    for kind, spans, begin, end in _STRETCHES:
        for span in timeline[spans]:
            if begin == "launched" and span["collective"] == "none":
                continue
            # Gathers of sharded parameters name the parameters alone, and other collectives the bucket's number first.
            bucket, _, parameters = span.get("bucket", "computation").replace(".weight", "").partition(" (")
            lane = "waits" if kind == "waited" else parameters.rstrip(")") or bucket
            name = span.get("name") or span.get("collective") or kind
            category = "synced" if span.get("synced") else "optimizer" if name == OPTIMIZER_PHASE else kind
            times = {"ts": 1e6 * span[begin], "dur": 1e6 * max(0.0, span[end] - span[begin])}
            place = {"pid": 0, "tid": lanes.setdefault(lane, len(lanes))}
            events.append({"name": name, "cat": category, "ph": "X", **place, **times, "args": span})
    events += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
        for name, lane in lanes.items()
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
