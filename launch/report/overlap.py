"""How much of a step's communication ran under computation, from the times in a ``timeline`` record."""

from typing import Any, NamedTuple

from .intervals import Interval, clip, length, union, without

__all__ = ["OverlapShare", "computing", "overlap_lines", "overlap_share"]


class OverlapShare(NamedTuple):
    """Seconds of one step's collectives, and the part of these seconds that lay under computation."""

    collective_seconds: float
    hidden_seconds: float

    @property
    def fraction(self) -> float:
        """Part of the collective time that lay under computation, in [0, 1]; 0 without collectives."""
        return self.hidden_seconds / self.collective_seconds if self.collective_seconds else 0.0


def overlap_share(timeline: dict[str, Any], kind: str = "buckets", *, leave_out_last: bool = False) -> OverlapShare:
    """How much collective time (launched to finished, summed over buckets) lies under computation.

    timeline        a ``timeline`` record of ``metrics.jsonl``
    kind            ``buckets``: reductions of gradients; ``gathers``: all-gathers of parameters
    leave_out_last  leave out the last bucket: it becomes ready as the backward ends, so no computation can hide it
    """
    spans = timeline[kind][:-1] if leave_out_last else timeline[kind]
    busy = computing(timeline)
    total = sum(span["finished"] - span["launched"] for span in spans)
    hidden = sum(length(clip(busy, (span["launched"], span["finished"]))) for span in spans)
    return OverlapShare(total, hidden)


def computing(timeline: dict[str, Any]) -> list[Interval]:
    """When forwards, backwards, the optimizer or delayed weight gradients ran without waiting for a collective."""
    ran = [
        (span["start"], span["end"]) for kind in ("forwards", "backwards", "phases") for span in timeline.get(kind, ())
    ]
    waited = [(span["start"], span["end"]) for span in timeline.get("waits", ())]
    return without(union(ran), union(waited))


def overlap_lines(timeline: dict[str, Any] | None) -> list[str]:
    """A readable line about the reductions and one about the gathers; no line for collectives that did not run."""
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
