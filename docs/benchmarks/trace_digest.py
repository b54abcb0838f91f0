"""A profiler's trace of training steps, and a digest of it: one page of text that says where a GPU's time went.

All kernels but NCCL's count as computing, and so do copies and memsets. Communication is *exposed* while no computing
runs. The GPU is *idle* while nothing runs. A *gap* is an interval without computing. The activity that ends a gap
either was launched before the gap began and waited (``waited``), or was launched during the gap (``host late``).

Exchanges of experts' rows by maingrad's kernels have a table of their own: one is in forward or in backward as the
activation of experts is that is nearest to it, and exposed while nothing else computes.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tables import grouped
from torch.profiler import ProfilerActivity, profile, schedule

from maingrad.launch.report.intervals import Interval, clip, length, union, without

__all__ = ["Activity", "Tracer", "activities_of", "digest", "digest_trace", "load_trace", "record_trace"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_NAME_LENGTH = 90
_EXCHANGE = ("_meet_kernel", "_copy_kernel")
_ACTIVATIONS = {"_scaled_glu_kernel": "forward", "_scaled_glu_backward_kernel": "backward"}


class Activity(NamedTuple):
    """One kernel, copy or memset; times in microseconds."""

    name: str
    stream: int
    start: float
    end: float
    launched: float | None
    """When the host launched the activity; None where the trace does not say."""

    @property
    def is_nccl(self) -> bool:
        """Whether the activity belongs to a collective."""
        return "nccl" in self.name.lower()


def record_trace(step: Callable[[], Any], num_steps: int, path: Path | None) -> None:
    """Run one step and then ``num_steps`` more, and write the trace of the latter to ``path`` if ``path`` is given.

    The trace has the GPU's activities and their launches alone. Recording every operation would slow the host down and
    so make gaps that a run without the profiler does not have. Without a GPU the trace is empty.
    """
    if not torch.cuda.is_available():
        # Without a profiler: torch 2.13 crashes if a gloo collective outlives the profiler session that it began in.
        for _ in range(1 + num_steps):
            step()
        if path is not None:
            path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
        return
    # The first step is the profiler's warm-up: the session is ready when the recorded steps begin.
    plan = schedule(wait=0, warmup=1, active=num_steps, repeat=1)
    export = None if path is None else lambda trace: trace.export_chrome_trace(str(path))
    with profile(activities=[ProfilerActivity.CUDA], schedule=plan, on_trace_ready=export) as trace:
        for index in range(1 + num_steps):
            step()
            if index in (0, num_steps):
                torch.cuda.synchronize()
            trace.step()


def activities_of(step: Callable[[], Any]) -> list[Activity]:
    """The device's activities in one step, by a profiler. Their streams and launches are not known."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return [Activity(each.name, -1, each.time_range.start, each.time_range.end, None) for each in on_device]


def load_trace(path: Path) -> list[Activity]:
    """The device's activities in a Chrome trace (``.json`` or ``.json.gz``), sorted by start."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    asked = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _ON_HOST and "correlation" in event.get("args", {})
    }
    activities = []
    for event in events:
        if event.get("cat") in _ON_DEVICE and event.get("ph") == "X":
            arguments, start = event.get("args", {}), float(event["ts"])
            activities.append(
                Activity(
                    name=event["name"],
                    stream=int(arguments.get("stream", -1)),
                    start=start,
                    end=start + float(event["dur"]),
                    launched=asked.get(arguments.get("correlation")),
                )
            )
    return sorted(activities, key=lambda activity: activity.start)


def digest_trace(path: Path, num_steps: int) -> str:
    """The digest of a trace of ``num_steps`` steps."""
    return digest(load_trace(path), num_steps)


class Tracer:
    """Called after a row's last round: two further steps under the profiler, and a digest of rank 0's trace.

    names   rows that are traced, once for each case
    folder  gets ``trace_CASE_ROW.txt``, and the trace as .json.gz with ``keep``
    """

    def __init__(self, names: Sequence[str], folder: Path, *, keep: bool = False) -> None:
        self._names, self._folder, self._keep = names, folder, keep
        self._traced: set[tuple[str, str]] = set()

    def __call__(self, case: Any, name: str, step: Callable[[], Any]) -> None:
        """Trace the row's step, on all ranks alike. A floor that is measured twice is traced once."""
        if name not in self._names or (case.name, name) in self._traced:
            return
        self._traced.add((case.name, name))
        stem = f"trace_{case.name}_{name}".replace(" ", "_").replace(",", "")
        path, num_steps = self._folder / f"{stem}.json.gz", 2
        self._folder.mkdir(parents=True, exist_ok=True)
        record_trace(step, num_steps, path if case.rank == 0 else None)
        if case.rank == 0:
            path.with_suffix("").with_suffix(".txt").write_text(digest_trace(path, num_steps))
            if not self._keep:
                path.unlink()


def digest(activities: Sequence[Activity], num_steps: int, *, num_gaps: int = 15, num_kernels: int = 30) -> str:
    """One page of text: totals, streams, the longest gaps, the kernels with the most time. Times in milliseconds."""
    if not activities:
        return "No activity of a GPU in this trace.\n"
    whole = max(each.end for each in activities) - activities[0].start
    computing, nccl = (_spans(each for each in activities if each.is_nccl == of_nccl) for of_nccl in (False, True))
    busy = length(_spans(activities))
    hidden = length(computing) + length(nccl) - busy
    lines = [
        f"{num_steps} steps, {whole / 1e3:.2f} ms from the first to the last activity of the GPU",
        "",
        f"{'':28s}{'ms':>10s}{'ms a step':>12s}{'share':>9s}",
    ]
    for label, us in (
        ("computing", length(computing)),
        ("NCCL", length(nccl)),
        ("NCCL under computing", hidden),
        ("exposed communication", length(nccl) - hidden),
        ("idle", whole - busy),
    ):
        lines.append(f"{label:28s}{us / 1e3:10.2f}{us / 1e3 / num_steps:12.2f}{us / whole:9.1%}")
    lines += ["", "Streams", f"{'stream':>8s}{'busy ms a step':>16s}{'of it NCCL':>12s}{'activities':>12s}"]
    for stream, mine in sorted(grouped(activities, lambda each: each.stream).items()):
        of_all, of_nccl = (length(_spans(some)) for some in (mine, (each for each in mine if each.is_nccl)))
        lines.append(f"{stream:8d}{of_all / 1e3 / num_steps:16.2f}{of_nccl / 1e3 / num_steps:12.2f}{len(mine):12d}")
    lines += _exchanges(activities, num_steps)
    lines += ["", "Longest gaps in computing", *_gaps(activities, computing, nccl, num_gaps)]
    lines += ["", "Kernels", f"{'ms a step':>10s}{'count a step':>14s}{'mean us':>10s}  name"]
    names = grouped(activities, lambda each: each.name)
    totals = [(sum(each.end - each.start for each in mine), name) for name, mine in names.items()]
    totals.sort(key=lambda total: -total[0])
    for us, name in totals[:num_kernels]:
        count = len(names[name])
        lines.append(f"{us / 1e3 / num_steps:10.2f}{count / num_steps:14.1f}{us / count:10.1f}  {name[:_NAME_LENGTH]}")
    if rest := totals[num_kernels:]:
        lines.append(f"{sum(us for us, _ in rest) / 1e3 / num_steps:10.2f}  in {len(rest)} others")
    return "\n".join(lines) + "\n"


def _spans(activities: Iterable[Activity]) -> list[Interval]:
    return union((each.start, each.end) for each in activities)


def _exchanges(activities: Sequence[Activity], num_steps: int) -> list[str]:
    """A line for exchanges of experts' rows in forward, and one for backward; none without any."""
    passes: dict[str, list[Activity]] = {"forward": [], "backward": []}
    marks = [each for each in activities if each.name in _ACTIVATIONS]
    for each in activities if marks else ():
        if each.name in _EXCHANGE:
            nearest = min(marks, key=lambda mark: abs(mark.start - each.start))
            passes[_ACTIVATIONS[nearest.name]].append(each)
    others = _spans(each for each in activities if not each.is_nccl and each.name not in _EXCHANGE)
    lines = ["", f"{'Exchanges of rows':28s}{'ms a step':>12s}{'exposed':>12s}{'share':>9s}"]
    for label, mine in passes.items():
        spans = _spans(mine)
        whole, exposed = length(spans), length(without(spans, others))
        if whole:
            lines.append(
                f"in {label:25s}{whole / 1e3 / num_steps:12.2f}{exposed / 1e3 / num_steps:12.2f}{exposed / whole:9.1%}"
            )
    return lines if len(lines) > 2 else []


def _gaps(
    activities: Sequence[Activity], computing: Sequence[Interval], nccl: Sequence[Interval], count: int
) -> list[str]:
    """A line for each of the longest gaps: its time from the start, its part under NCCL, its neighbours, its cause."""
    begins = {each.start: each for each in reversed(activities) if not each.is_nccl}
    ends = {each.end: each for each in activities if not each.is_nccl}
    origin = activities[0].start
    # Communication alone may run before the first computing and after the last.
    gaps = without([(origin, max(each.end for each in activities))], computing)
    lines = [
        f"{len(gaps)} gaps, {length(gaps) / 1e3:.2f} ms together",
        f"{'at ms':>10s}{'ms':>9s}{'NCCL ms':>9s}  ended by",
    ]
    for start, end in sorted(gaps, key=lambda span: span[0] - span[1])[:count]:
        under = length(clip(nccl, (start, end)))
        after, before = begins.get(end), ends.get(start)
        if after is None or after.launched is None:
            why = "(end)" if after is None else "(?)"
        else:
            late = after.launched - start
            why = f"(host late by {late / 1e3:.3f})" if late > 0 else "(waited)"
        names = "  after ".join("the start" if each is None else each.name[:48] for each in (after, before))
        times = f"{(start - origin) / 1e3:10.2f}{(end - start) / 1e3:9.3f}{under / 1e3:9.3f}"
        lines.append(f"{times}  {why} {names}")
    return lines
