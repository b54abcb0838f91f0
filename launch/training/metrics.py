"""``metrics.jsonl``: one JSON object per line. Each line is flushed, so that only the last line of a killed run can be
incomplete.

kind            when                    what
``observed``    after the first step    what the run did: dtypes, fused weights, microbatches, buckets, collectives; the
                                        steps before it, which are those of an earlier run where it was resumed
``timeline``    once                    times of one step's forwards, backwards and collectives, and of the forward
                                        after it, under which parameters arrive: overlap.png is drawn from them
``step``        every log_every steps   loss (nats per token), lr, grad_norm, tokens per second, seconds per step; of a
                                        model with experts also its routers' load_balancing_loss and router_z_loss (not
                                        in loss) and max_expert_load, the fullest expert's over an even share
``validation``  every eval_every steps  loss on the fixed validation set
``checkpoint``  every save_every steps  step, and seconds for which training stood still
``final``       at the end              validation loss, steps, seconds; of the demonstration also the bigram's loss
``interrupted`` instead of ``final``    after Ctrl-C or SIGTERM
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ...ddp.checkpoint.files.whole_file import open_small_file
from ...ddp.collectives.timeline import (
    BackwardSpan,
    BucketSpan,
    ForwardSpan,
    GatherSpan,
    PhaseSpan,
    Timeline,
    WaitSpan,
)
from ..data.replacing import replacing
from .watching.trackers import Tracker

__all__ = [
    "OPTIMIZER_PHASE",
    "SPANS",
    "MetricsWriter",
    "numbered_records",
    "read_metrics",
    "timeline_record",
]

SPANS = {
    "forwards": ForwardSpan,
    "backwards": BackwardSpan,
    "buckets": BucketSpan,
    "gathers": GatherSpan,
    "waits": WaitSpan,
    "phases": PhaseSpan,
}
"""Kinds of spans in a ``timeline`` record."""
OPTIMIZER_PHASE = "optimizer"
"""Name of the optimizer's step among the phases."""
_MOST_BYTES = 2**30
_CUT_OFF = "the file ends within this line"


class MetricsWriter:
    """Writes records to a file, which the first record overwrites. Does nothing on ranks without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.trackers: Sequence[Tracker] = ()
        """Who gets each record too."""
        self._file: TextIO | None = None
        self.resumed_at: int | None = None
        """Keep the records of an earlier run in this folder up to this step. None: keep none."""

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record. NaN and infinity become null, since JSON has neither."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._records_to_keep(self._path)
            # In the place of the old file at once: a killed process leaves either the old records or the new ones.
            with replacing(self._path) as file:
                file.writelines(json.dumps(record) + "\n" for record in kept)
            self._file = self._path.open("a", encoding="utf-8")
        finite = json.loads(json.dumps({"kind": kind, **fields}), parse_constant=lambda name: None)
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for tracker in self.trackers:
            tracker.add(kind, fields)

    def _records_to_keep(self, path: Path) -> list[dict[str, Any]]:
        if self.resumed_at is None or not path.exists():
            return []
        ends = ("final", "interrupted")
        return [r for r in read_metrics(path) if r["kind"] not in ends and r.get("step", 0) <= self.resumed_at]

    def close(self) -> None:
        """Close the file, and what the trackers write."""
        if self._file is not None:
            self._file.close()
        for tracker in self.trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a file, except an incomplete last line.

    Raises ``ValueError`` for any other line that is not a record.
    """
    records, faults = numbered_records(path)
    for number, fault in faults.items():
        if fault != _CUT_OFF:
            raise ValueError(f"'{path}', line {number}: no record ({fault}); mend the line or remove it")
    return list(records.values())


def numbered_records(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The records of a file by the number of their line; and why each other line is no record.

    Raises ``OSError``, and ``ValueError`` for what is no regular file or has more than a GiB.
    """
    with open_small_file(path, _MOST_BYTES) as file:
        lines = file.read().split(b"\n")
    records, faults = {}, {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                raise ValueError("it has no kind")
            records[number] = record
        except (RecursionError, ValueError) as error:
            faults[number] = _CUT_OFF if number == len(lines) else str(error)
    if not lines[-1]:  # the file ends with a whole line
        del faults[len(lines)]
    return records, faults


def timeline_record(timeline: Timeline, step: int) -> dict[str, Any]:
    """Spans of one step and of the forward after it, in seconds, as ``report/overlap.py`` reads them."""
    return {"step": step, **{kind: [span._asdict() for span in getattr(timeline, kind)] for kind in SPANS}}
