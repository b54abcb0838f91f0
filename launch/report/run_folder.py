"""The folder of a run as reports read it: sound records, configuration and versions, and notes of what is unsound.

``metrics.jsonl`` is needed. What is missing or damaged elsewhere is left out, and ``RunFolder.notes`` names the file
and the line. A folder may be a stranger's: no value in it raises anything but ``ConfigError``.
"""

import json
import reprlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ddp.checkpoint.files.small_file import open_small_file
from ..config.file import flat, structure_of_run
from ..config.run import Config, ConfigError
from ..training.metrics import numbered_records

__all__ = ["DAMAGE", "Point", "Record", "RunFolder", "plain", "read_runs"]

Record = dict[str, Any]
Point = tuple[int, float | None]
"""Step and value; None: no number was recorded, and a curve has a gap."""

DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What impossible values of a configuration may raise. ``RecursionError`` and ``ConfigError`` are among them."""
_MOST_BYTES = 2**24
_COUNTS = {"step", "world_size", "num_parameters"}
_NUMBERS = {
    *("loss", "lr", "grad_norm", "tokens_per_second", "seconds_per_step", "elapsed", "load_balancing_loss"),
    *("router_z_loss", "max_expert_load", "seconds", "bigram_loss", "nats_below_bigram", "peak_memory_bytes"),
}
"""Fields of records, each a number or null: NaN and infinity are recorded as null."""
_SPANS = {
    "forwards": ("start", "end"),
    "backwards": ("start", "end"),
    "buckets": ("bucket", "collective", "nbytes", "ready", "launched", "finished"),
    "gathers": ("bucket", "collective", "nbytes", "launched", "finished"),
    "waits": ("bucket", "collective", "start", "end"),
    "phases": ("name", "start", "end"),
}
"""Kinds of spans in a ``timeline`` record, and the fields of each."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """One run."""

    path: Path
    label: str
    """Name of the folder, with as many of its parents as tell it from the other runs."""
    records: dict[str, list[Record]]
    """Sound records by kind, in their order."""
    resolved: Record
    """``resolved_config.json``; empty where it is missing or damaged."""
    settings: dict[str, str]
    """The configuration as flat keys and texts, also where this version cannot read it."""
    config: Config | None
    notes: list[str]

    def points(self, name: str, kind: str = "step") -> list[Point]:
        """A field over steps; records without the field give no point."""
        return [(record["step"], record[name]) for record in self.records[kind] if name in record]

    @property
    def observed(self) -> Record:
        """What the first step after the last start did: a resumed run has several such records."""
        return (self.records["observed"] or [{}])[-1]

    @property
    def timeline(self) -> Record | None:
        """The last recorded step that has reductions."""
        return next((t for t in reversed(self.records["timeline"]) if t["buckets"] and t["backwards"]), None)

    @property
    def end(self) -> Record:
        """``final`` or ``interrupted``; empty: the run goes on, or was killed."""
        return ([*self.records["final"], *self.records["interrupted"]] or [{}])[-1]

    @property
    def versions(self) -> Record:
        """Versions of software, by name."""
        found = self.resolved.get("versions") or self.observed.get("versions")
        return found if isinstance(found, dict) else {}

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the last start."""
        size = self.observed.get("world_size", self.resolved.get("world_size"))
        return size if _is_sound("world_size", size) else None

    @property
    def unit(self) -> str:
        """Name of a token: ``"token"`` or ``"byte"``."""
        return plain(str(self.observed.get("unit", "token")))

    @property
    def device(self) -> str | None:
        """Device of rank 0, such as ``"cpu"`` or ``"cuda:0"``; None where the first step was not completed."""
        return str(self.observed["device"]) if "device" in self.observed else None

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 without any."""
        return max([0, *(int(record["step"]) for kind in ("step", "validation") for record in self.records[kind])])

    def ranks_at(self, step: int) -> int | None:
        """Number of ranks that took ``step``, counted from 1: a resumed run may have another number of ranks."""
        starts = [record for record in self.records["observed"] if "world_size" in record]
        if len({record["world_size"] for record in starts}) <= 1:
            return self.world_size
        if any("step" not in record for record in starts):  # older versions do not say where a run was resumed
            return None
        return int(starts[max(0, bisect_left([record["step"] for record in starts], step) - 1)]["world_size"])


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Read the runs in ``folders``.

    Raises ``ConfigError`` for a folder that is given twice, and for a folder without any sound record.
    """
    found = [folder.resolve() for folder in folders]
    for folder in found:
        if found.count(folder) > 1:
            raise ConfigError(f"'{folder}' is given twice; a report shows each run once")
    for length in range(1, max(len(folder.parts) for folder in found) + 1):
        labels = [plain("/".join(folder.parts[-length:])) for folder in found]  # the shortest that differ
        if len(set(labels)) == len(labels):
            break
    return [_read_run(folder, label) for folder, label in zip(found, labels, strict=True)]


def _read_run(folder: Path, label: str) -> RunFolder:
    path = folder / "metrics.jsonl"
    try:
        numbered, no_records = numbered_records(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"'{folder}' is not the folder of a run: it has no metrics.jsonl") from None
    except OSError as error:
        raise ConfigError(str(error)) from None
    except ValueError as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from None
    faults: dict[str, dict[int, str]] = defaultdict(dict)
    faults["no record"] = no_records
    records: dict[str, list[Record]] = defaultdict(list)
    for number, record in numbered.items():
        for what, value in _mend(record):
            faults[what].setdefault(number, "null, for NaN or infinity" if value is None else reprlib.repr(value))
        if "step" in record or record["kind"] not in ("step", "validation", "timeline"):
            records[record["kind"]].append(record)
    notes = [
        f"'{path}', line{'s' * (len(lines) > 1)} {', '.join(map(str, list(lines)[:5]))}"
        f"{f' and {len(lines) - 5} more' * (len(lines) > 5)}: {what} ({next(iter(lines.values()))})"
        for what, lines in faults.items()
        if lines
    ]
    if not records:
        raise ConfigError(notes[0] if notes else f"'{path}' has no records: the run ended before its first step")
    resolved, settings, config = _read_resolved(folder / "resolved_config.json", notes)
    notes += [f"No {kind} was recorded." for kind in ("step", "validation") if not records[kind]]
    return RunFolder(
        path=folder, label=label, records=records, resolved=resolved, settings=settings, config=config, notes=notes
    )


def _read_resolved(path: Path, notes: list[str]) -> tuple[Record, dict[str, str], Config | None]:
    """The document, its settings as texts, and the configuration; adds to ``notes`` what is missing or damaged."""
    resolved: Record = {}
    settings: dict[str, str] = {}
    try:
        with open_small_file(path, _MOST_BYTES) as file:
            document = json.load(file)
        if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
            raise ValueError("it has no configuration")
        settings = {key: v if isinstance(v, str) else json.dumps(v) for key, v in flat(document["config"]).items()}
        resolved = document
        config = structure_of_run(document["config"])
        if config.model.num_layers > 1000 or config.model.num_experts > 10_000:
            raise ConfigError("a model of so many modules is not counted")
        return resolved, settings, config
    except DAMAGE as error:
        what = "damaged, or of another version of maingrad" if resolved else "missing or damaged"
        lacks = "the page shows no MFU and no planned bytes"
        notes.append(f"'{path}' is {what} ({error}): {lacks}.")
        return resolved, settings, None


def _mend(record: Record) -> Iterator[tuple[str, Any]]:
    """Take out of ``record`` what is unsound, and yield what it was, and its value."""
    kind = record["kind"]
    for name in (_COUNTS | _NUMBERS) & record.keys():
        value = record[name]
        if name in _COUNTS and not _is_sound(name, value):
            yield f"{name} of a {kind} record is no whole number", record.pop(name)
        elif name in _NUMBERS and not _is_sound(name, value):
            record[name] = None
            if value is not None or name == "loss":
                yield f"{name} of a {kind} record is no number", value
    for spans, fields in _SPANS.items() if kind == "timeline" else ():
        found, record[spans] = record.get(spans) or [], []
        for span in found if isinstance(found, list) else [found]:
            values = {name: span.get(name) if isinstance(span, dict) else [span] for name in fields}
            wrong = [name for name, value in values.items() if not _is_sound(name, value)]
            if wrong:
                yield f"{wrong[0]} of one of the timeline's {spans} is damaged", values[wrong[0]]
            else:
                record[spans].append(span)


def _is_sound(name: str, value: object) -> bool:
    if name in ("bucket", "collective", "name"):
        return isinstance(value, str)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if name in _COUNTS or name == "nbytes":
        return isinstance(value, int) and 0 <= value < 2**53
    # The largest number of fp32: sums and axes of much larger ones overflow. Other times are seconds of a recording.
    return abs(value) <= (3.5e38 if name in _NUMBERS else 1e6)


def plain(text: str) -> str:
    """``text`` in one line, without halves of characters, which no file and no picture takes."""
    return " ".join(text.encode(errors="replace").decode().split())
