"""The folder of a run as the page reads it: records, configuration and versions, checked, with what is missing named.

``metrics.jsonl`` is needed. Everything else may be missing, as it is where a run was killed: ``RunFolder.notes`` says
what the page lacks, and why.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.file import flat, structure_of_run
from ...config.run import Config, ConfigError
from ...training.metrics import read_metrics

__all__ = ["Record", "RunFolder", "read_runs"]

Record = dict[str, Any]

_SPANS = {
    "forwards": ("start", "end"),
    "backwards": ("start", "end", "synced"),
    "buckets": ("bucket", "collective", "nbytes", "ready", "launched", "finished"),
    "gathers": ("bucket", "collective", "nbytes", "launched", "finished"),
    "waits": ("bucket", "collective", "start", "end"),
    "phases": ("name", "start", "end"),
}
"""Kinds of spans in a ``timeline`` record, and the fields of each."""
_TEXTS = ("bucket", "collective", "name")
_NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "seconds_per_step",
    "elapsed",
    "load_balancing_loss",
    "router_z_loss",
    "max_expert_load",
    "seconds",
    "bigram_loss",
    "nats_below_bigram",
    "peak_memory_bytes",
)
"""Fields of records that the page shows, each a number or null: NaN and infinity are recorded as null."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """One run. Lists are in the order of the records."""

    path: Path
    label: str
    """Name of the folder, with as many of its parents as tell it from the other runs."""
    steps: list[Record]
    validations: list[Record]
    observed: list[Record]
    """One record for each start of the run: a resumed run has several."""
    timeline: Record | None
    """The last recorded step that has reductions."""
    end: Record | None
    """``final`` or ``interrupted``; None: the run goes on, or was killed."""
    config: Config | None
    settings: dict[str, Any]
    """The configuration as flat keys, also where this version cannot read it."""
    versions: dict[str, str]
    world_size: int | None
    """Number of ranks of the last start."""
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """Name of a token: ``"token"`` or ``"byte"``."""
        return str(self.observed[-1].get("unit", "token")) if self.observed else "token"

    @property
    def device(self) -> str | None:
        """Device of rank 0, such as ``"cpu"`` or ``"cuda:0"``; None where the first step was not completed."""
        return str(self.observed[-1]["device"]) if self.observed and "device" in self.observed[-1] else None

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 without any."""
        return max([0, *(int(record["step"]) for record in (*self.steps, *self.validations))])

    @property
    def resumed_after(self) -> list[int]:
        """Steps after which the run was resumed."""
        return [int(record["step"]) for record in self.observed if record.get("step")]

    def ranks_at(self, step: int) -> int | None:
        """Number of ranks that took ``step``, counted from 1: a resumed run may have another number of ranks."""
        sizes = [record.get("world_size") for record in self.observed]
        if len(set(sizes)) <= 1:
            return sizes[0] if sizes else self.world_size
        starts = [record["step"] for record in self.observed if "step" in record]
        if len(starts) < len(sizes):  # records of an older version do not say where a run was resumed
            return None
        return sizes[max(0, bisect_left(starts, step) - 1)]


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Read the runs in ``folders``.

    Raises ``ConfigError`` for a folder that is given twice, for a folder without ``metrics.jsonl``, and for damaged
    records; the message names the file.
    """
    found = [folder.resolve() for folder in folders]
    for folder in found:
        if found.count(folder) > 1:
            raise ConfigError(f"'{folder}' is given twice; a report shows each run once")
    labels = _labels(found)
    return [_read_run(folder, label) for folder, label in zip(found, labels, strict=True)]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that differ from each other."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(labels)) == len(labels):
            break
    return labels


def _read_run(folder: Path, label: str) -> RunFolder:
    path = folder / "metrics.jsonl"
    try:
        records = read_metrics(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"'{folder}' is not the folder of a run: it has no metrics.jsonl") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if not records:
        raise ConfigError(f"'{path}' has no records: the run ended before its first step")
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(str(record["kind"]), []).append(record)
    steps, validations = by_kind.get("step", []), by_kind.get("validation", [])
    ends = [*by_kind.get("final", []), *by_kind.get("interrupted", [])]
    observed = by_kind.get("observed", [])
    _check_numbers(path, (*steps, *validations, *ends))
    for record in observed:
        for name in ("step", "world_size", "num_parameters"):
            if name in record and not _is_count(record[name]):
                raise ConfigError(
                    f"'{path}', an observed record: {name} is {record[name]!r}, and must be a whole number"
                )
    timelines = by_kind.get("timeline", [])
    for timeline in timelines:
        _check_timeline(path, timeline)
    resolved, notes = _read_resolved(folder / "resolved_config.json")
    config = None
    if resolved:
        try:
            config = structure_of_run(resolved["config"])
        except ConfigError as error:
            notes.append(f"resolved_config.json is of another version of maingrad: {error}.")
    if not steps:
        notes.append("No step was recorded.")
    if not validations:
        notes.append("No validation was recorded.")
    if not observed:
        notes.append("The records say nothing about the device and the collectives: no step was completed.")
    return RunFolder(
        path=folder,
        label=label,
        steps=steps,
        validations=validations,
        observed=observed,
        timeline=next((each for each in reversed(timelines) if each["buckets"]), None),
        end=ends[-1] if ends else None,
        config=config,
        settings=flat(resolved.get("config", {})),
        versions=dict(resolved.get("versions") or (observed[-1].get("versions") if observed else None) or {}),
        world_size=observed[-1].get("world_size") if observed else resolved.get("world_size"),
        notes=notes,
    )


def _read_resolved(path: Path) -> tuple[Record, list[str]]:
    """``resolved_config.json``, or ``{}``; and a note where it is missing or damaged."""
    lacks = "the page shows no configuration, no MFU and no planned bytes"
    try:
        resolved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(resolved, dict) or not isinstance(resolved.get("config"), dict):
            raise ValueError("it has no configuration")
        if not isinstance(resolved.get("versions", {}), dict) or not _is_count(resolved.get("world_size", 1)):
            raise ValueError("its versions are no table, or its world_size is no number")
    except FileNotFoundError:
        return {}, [f"{path.name} is missing: {lacks}."]
    except (OSError, ValueError) as error:
        return {}, [f"{path.name} is damaged ({error}): {lacks}."]
    return resolved, []


def _check_numbers(path: Path, records: Iterable[Record]) -> None:
    for record in records:
        what = f"'{path}', a {record['kind']} record"
        if not _is_count(record.get("step")):
            raise ConfigError(f"{what}: step is {record.get('step')!r}, and must be a whole number")
        for name in _NUMBERS:
            value = record.get(name)
            if value is not None and not _is_number(value):
                raise ConfigError(f"{what} of step {record['step']}: {name} is {value!r}, and must be a number")


def _check_timeline(path: Path, timeline: Record) -> None:
    where = f"'{path}', the timeline of step {timeline.get('step')}"
    if not _is_count(timeline.get("step")):
        raise ConfigError(f"{where}: step must be a whole number")
    if not timeline.get("backwards"):
        raise ConfigError(f"{where}: it has no backwards")
    for kind, fields in _SPANS.items():
        spans = timeline.setdefault(kind, [])
        for span in spans if isinstance(spans, list) else [None]:
            for name in fields:
                value = span.get(name) if isinstance(span, dict) else None
                is_right = isinstance(value, str) if name in _TEXTS else _is_number(value) or name == "synced"
                if not is_right:
                    raise ConfigError(f"{where}: one of its {kind} has {name} = {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
