"""The folder of a run as reports read it: sound records, configuration and versions, and notes of what is unsound.

``metrics.jsonl`` is needed. What is missing or damaged elsewhere is left out, and ``RunFolder.notes`` names the file
and the line. A folder may be a stranger's: no value in it raises anything but ``ConfigError``.
"""

import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...ddp.checkpoint.files.small_file import open_small_file
from ..config.file import flat, structure_of_run
from ..config.run import Config, ConfigError
from ..training.metrics import numbered_records

__all__ = ["DAMAGE", "Point", "Record", "RunFolder", "plain", "read_runs"]

Record = dict[str, Any]
Point = tuple[int, float | None]
"""Step and value; None: no number was recorded, and a curve has a gap."""
Run = TypeVar("Run", bound="RunFolder")

DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What impossible values of a configuration may raise. ``RecursionError`` and ``ConfigError`` are among them."""
_MOST_BYTES = 2**24
_LARGEST = {int: 2**53, float: 3.5e38}
"""Sums and axes of numbers that are much larger than the largest one of fp32 overflow."""
_ALL_NUMBERS = ("step", "validation")
"""Kinds of records whose fields are numbers or null: NaN and infinity are recorded as null."""
_NUMBERS = {"step", "world_size", "num_parameters", "seconds", "bigram_loss", "nats_below_bigram", "peak_memory_bytes"}
"""Those of other kinds."""
_SPANS = {
    "forwards": ("start", "end"),
    "backwards": ("start", "end"),
    "buckets": ("bucket", "collective", "nbytes", "ready", "launched", "finished"),
    "gathers": ("bucket", "collective", "nbytes", "launched", "finished"),
    "waits": ("bucket", "collective", "start", "end"),
    "phases": ("name", "start", "end"),
}
"""Kinds of spans in a ``timeline`` record, and the fields of each."""


class RunFolder:
    """One run.

    label     name of the folder, with the parents that tell it from other runs
    records   sound records by kind, in their order
    resolved  ``resolved_config.json``; empty where it is missing or damaged
    settings  the configuration as flat keys and texts, also where this version cannot read it
    config    None where this version cannot read it
    notes     what is missing or damaged
    """

    def __init__(self, path: Path, label: str) -> None:
        """Raises ``ConfigError`` for a folder without any sound record."""
        self.path = path
        self.label = label
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.resolved: Record = {}
        self.settings: dict[str, str] = {}
        self.config: Config | None = None
        self.notes: list[str] = []
        self._read_records(path / "metrics.jsonl")
        try:
            self._read_config(path / "resolved_config.json")
        except DAMAGE as error:
            what = "damaged, or of another version of maingrad" if self.resolved else "missing or damaged"
            lacks = "the page shows no MFU and no planned bytes"
            self.notes.append(f"'{path / 'resolved_config.json'}' is {what} ({error}): {lacks}.")
        self.notes += [f"No {kind} was recorded." for kind in ("step", "validation") if not self.records[kind]]

    def _read_records(self, path: Path) -> None:
        try:
            numbered, no_records = numbered_records(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"'{self.path}' is not the folder of a run: it has no metrics.jsonl") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{path}' cannot be read: {error}") from None
        faults: dict[str, dict[int, str]] = defaultdict(dict)
        faults["no record"].update(no_records)
        for number, record in numbered.items():
            for what, value in _mend(record):
                faults[what].setdefault(number, "null, for NaN or infinity" if value is None else reprlib.repr(value))
            if record.get("step") is not None or record["kind"] not in ("step", "validation", "timeline"):
                self.records[record["kind"]].append(record)
        for what, lines in faults.items():
            if lines:
                where = reprlib.repr(list(lines)).strip("[]")
                self.notes.append(f"'{path}', line {where}: {what} ({next(iter(lines.values()))})")
        if not self.records:
            raise ConfigError([*self.notes, f"'{path}' has no records: the run ended before its first step"][0])

    def _read_config(self, path: Path) -> None:
        with open_small_file(path, _MOST_BYTES) as file:
            document = json.load(file)
        if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
            raise ValueError("it has no configuration")
        settings = flat(document["config"])
        self.settings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
        self.resolved = document
        config = structure_of_run(document["config"])
        if config.model.num_layers > 1000 or config.model.num_experts > 10_000:
            raise ConfigError("a model of so many modules is not counted")
        self.config = config

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
        size = self.observed.get("world_size") or self.resolved.get("world_size")
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
        return max([0, *(step for kind in ("step", "validation") for step, _ in self.points("step", kind))])

    def ranks_at(self, step: int) -> int | None:
        """Number of ranks that took ``step``, counted from 1: a resumed run may have another number of ranks."""
        starts = {record.get("step") or 0: record.get("world_size") for record in self.records["observed"]}
        return starts[max(start for start in starts if start < step)] if 0 in starts else self.world_size


def read_runs(folders: Sequence[Path], kind: Callable[[Path, str], Run]) -> list[Run]:
    """Read the runs in ``folders``, each by ``kind(folder, label)``.

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
    return [kind(folder, label) for folder, label in zip(found, labels, strict=True)]


def _mend(record: Record) -> Iterator[tuple[str, Any]]:
    """Make null in ``record`` what is unsound, take unsound spans out, and yield what it was, and its value."""
    kind = record["kind"]
    for name in record.keys() - {"kind"} if kind in _ALL_NUMBERS else record.keys() & _NUMBERS:
        value = record[name]
        if not _is_sound(name, value):
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


def _is_sound(name: str, value: Any) -> bool:
    if name in ("bucket", "collective", "name"):
        return isinstance(value, str)
    return type(value) in _LARGEST and abs(value) <= _LARGEST[type(value)]


def plain(text: str) -> str:
    """``text`` in one line, without halves of characters, which no file and no picture takes."""
    return " ".join(text.encode(errors="replace").decode().split())
