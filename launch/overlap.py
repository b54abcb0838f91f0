"""How much of a step's communication lay under computation, from the recorded times of a ``timeline`` record."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Interval", "OverlapShare", "computing", "hidden_parts", "overlap_lines", "overlap_share"]

Interval = tuple[float, float]
"""[start, end) in seconds."""


class OverlapShare(NamedTuple):
    """Seconds of one step's collectives, and how many of them lay under computation."""

    collective_seconds: float
    hidden_seconds: float

    @property
    def fraction(self) -> float:
        """Hidden part, in [0, 1]; 0 where there was no collective time."""
        return self.hidden_seconds / self.collective_seconds if self.collective_seconds else 0.0


def overlap_share(timeline: dict[str, Any], kind: str = "buckets", *, leave_out_last: bool = False) -> OverlapShare:
    """How much collective time (launched to finished, summed over buckets) lies under computation.

    timeline        a ``timeline`` record of ``metrics.jsonl``
    kind            ``buckets``: reductions of gradients; ``gathers``: of parameters
    leave_out_last  without the last bucket, which becomes ready as the backward ends and has nothing left to hide under
    """
    spans = timeline[kind][:-1] if leave_out_last else timeline[kind]
    busy = computing(timeline)
    total = sum(span["finished"] - span["launched"] for span in spans)
    hidden = sum(
        end - start for span in spans for start, end in hidden_parts((span["launched"], span["finished"]), busy)
    )
    return OverlapShare(total, hidden)


def computing(timeline: dict[str, Any]) -> list[Interval]:
    """When forwards, backwards, the optimizer and delayed weight gradients ran and did not wait for a collective."""
    ran = [
        (span["start"], span["end"]) for kind in ("forwards", "backwards", "phases") for span in timeline.get(kind, ())
    ]
    waited = [(span["start"], span["end"]) for span in timeline.get("waits", ())]
    return _without(_union(ran), _union(waited))


def hidden_parts(span: Interval, busy: Sequence[Interval]) -> list[Interval]:
    """The parts of ``span`` that lie in ``busy``, disjoint and in order."""
    clipped = ((max(span[0], start), min(span[1], end)) for start, end in busy)
    return [(start, end) for start, end in clipped if start < end]


def overlap_lines(timeline: dict[str, Any] | None) -> list[str]:
    """A line for the reductions and one for the gathers, for people; none where nothing was sent or recorded."""
    lines: list[str] = []
    if timeline is None:
        return lines
    for kind, what in (("buckets", "reductions of gradients"), ("gathers", "gathers of parameters")):
        sent = [span for span in timeline.get(kind, ()) if span["collective"] != "none"]
        if sent:
            share = overlap_share(timeline, kind)
            nbytes = sum(span["nbytes"] for span in sent) / 2**20
            names = {span["collective"] for span in sent}
            waits = [w for w in timeline.get("waits", ()) if w["collective"] in names]
            waited = sum(wait["end"] - wait["start"] for wait in waits)
            lines.append(
                f"step {timeline['step']}: {len(sent)} {what}, {nbytes:.1f} MiB, "
                f"{share.collective_seconds * 1e3:.1f} ms in flight, {share.fraction:.0%} of it under computation, "
                f"which waited {waited * 1e3:.1f} ms for them"
            )
    return lines


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """``intervals`` less ``holes``, both disjoint and in order."""
    left: list[Interval] = []
    for start, end in intervals:
        for hole_start, hole_end in holes:
            if hole_end <= start or end <= hole_start:
                continue
            if start < hole_start:
                left.append((start, hole_start))
            start = hole_end
        if start < end:
            left.append((start, end))
    return left
