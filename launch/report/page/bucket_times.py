"""What became of each bucket's collectives in a recorded step: how long they ran, hidden or not, and were waited for.

*Exposed* is the time that computation stood still: the sum of the recorded waits for the bucket's collectives. A wait
counts for the bucket that it names, so that the sum over buckets is the whole time that the step waited.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..intervals import clip, length
from ..overlap import computing

__all__ = ["BucketTimes", "bucket_times", "is_wait_for"]

Kind = Literal["buckets", "gathers"]


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """One bucket's reductions, or its gathers. Times are in milliseconds."""

    bucket: str
    collective: str
    nbytes: int
    """Sum over ``spans``."""
    in_flight_ms: float
    hidden_ms: float
    """The part of ``in_flight_ms`` that lay under computation."""
    exposed_ms: float
    """Time that computation waited."""
    spans: Sequence[dict[str, Any]]
    waits: Sequence[dict[str, Any]]


def bucket_times(timeline: dict[str, Any], kind: Kind) -> list[BucketTimes]:
    """One entry for each bucket, in the order of launches; buckets that were only waited for come last.

    timeline  a ``timeline`` record of ``metrics.jsonl``
    kind      ``buckets``: reductions of gradients; ``gathers``: all-gathers of parameters
    """
    busy = computing(timeline)
    all_waits = [wait for wait in timeline["waits"] if is_wait_for(wait, kind)]
    times = []
    for bucket in dict.fromkeys(each["bucket"] for each in (*timeline[kind], *all_waits)):
        spans = [span for span in timeline[kind] if span["bucket"] == bucket]
        waits = [wait for wait in all_waits if wait["bucket"] == bucket]
        hidden = sum(length(clip(busy, (span["launched"], span["finished"]))) for span in spans)
        times.append(
            BucketTimes(
                bucket=bucket,
                collective=(spans or waits)[0]["collective"],
                nbytes=sum(span["nbytes"] for span in spans),
                in_flight_ms=1e3 * sum(span["finished"] - span["launched"] for span in spans),
                hidden_ms=1e3 * hidden,
                exposed_ms=1e3 * sum(wait["end"] - wait["start"] for wait in waits),
                spans=spans,
                waits=waits,
            )
        )
    return times


def is_wait_for(wait: dict[str, Any], kind: Kind) -> bool:
    """Whether ``wait`` waited for a collective of ``kind``."""
    return bool((wait["collective"] == "all_gather") == (kind == "gathers"))
