"""The folder of a run as reports read it: sound records, configuration and versions, and notes of what is unsound.

``metrics.jsonl`` is needed. What is missing or damaged elsewhere is left out, and ``RunFolder.notes`` names the file
and the line. A folder may be a stranger's: no value in it raises anything but ``ConfigError``.
"""

import json
import reprlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_type_hints

from ...ddp.checkpoint.files.whole_file import open_small_file
from ..config.file import flat, structure_of_run
from ..config.run import Config, ConfigError
from ..training.metrics import SPANS, numbered_records
from .overlap import BucketTimes, bucket_times, hidden_share

if TYPE_CHECKING:
    from ..plan.plan import RunPlan

__all__ = ["Point", "Record", "RunFolder", "plain", "read_runs"]

Record = dict[str, Any]
Point = tuple[int, float | None]
"""Step and value; None: no number was recorded, and a curve has a gap."""

_MOST_BYTES = 2**24
_LARGEST = {int: 2**53, float: 3.5e38}
"""Sums and axes of numbers that are much larger than the largest one of fp32 overflow."""
_ALL_NUMBERS = ("step", "validation")
"""Kinds of records whose fields are numbers or null: NaN and infinity are recorded as null."""
_NUMBERS = {"step", "world_size", "num_parameters", "seconds", "bigram_loss", "nats_below_bigram", "peak_memory_bytes"}
"""Those of other kinds."""


class RunFolder:
    """One run. What ``derive`` (``derived.py``) finds is None before, and where it is not known.

    label     name of the folder, with the parents that tell it from other runs
    records   sound records by kind, in their order
    observed  what the first step after the last start did: a resumed run has several such records
    timeline  the last recorded step that has reductions, or None
    end       ``final`` or ``interrupted``; empty: the run goes on, or was killed
    resolved  ``resolved_config.json``; empty where it is missing or damaged
    settings  the configuration as flat keys and texts, also where this version cannot read it
    config    None where this version cannot read it
    notes     what is missing or damaged
    flops     model FLOPs of a token
    peak      TFLOP/s of one device
    plan      with the bytes of a rank
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
        self.flops: int | None = None
        self.peak: float | None = None
        self.plan: RunPlan | None = None
        self._read_records(path / "metrics.jsonl")
        steps = [each for each in self.records["timeline"] if each["buckets"] and each["backwards"]]
        self.observed: Record = [{}, *self.records["observed"]][-1]
        self.timeline: Record | None = [None, *steps][-1]
        self.end: Record = [{}, *self.records["interrupted"], *self.records["final"]][-1]
        try:
            self._read_config(path / "resolved_config.json")
        except Exception as error:  # impossible values may raise anything
            what = "damaged, or of another version of maingrad" if self.resolved else "missing or damaged"
            lacks = "the page shows no MFU and no planned bytes"
            self.notes.append(f"'{path / 'resolved_config.json'}' is {what} ({error}): {lacks}.")
        self.notes += [f"No {kind} was recorded." for kind in _ALL_NUMBERS if not self.records[kind]]

    def _read_records(self, path: Path) -> None:
        try:
            numbered, no_records = numbered_records(path)
        except (OSError, ValueError) as error:
            what = f"'{path}' cannot be read: {error}"
            if not path.exists():
                what = f"'{self.path}' is not the folder of a run: it has no metrics.jsonl"
            raise ConfigError(what) from None
        faults: dict[str, dict[int, str]] = defaultdict(dict)
        faults["no record"].update(no_records)
        for number, record in numbered.items():
            for what, value in _mend(record):
                faults[what].setdefault(number, "null, for NaN or infinity" if value is None else reprlib.repr(value))
            if record.get("step") is not None or record["kind"] not in (*_ALL_NUMBERS, "timeline"):
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
        self.settings = {key: str(value) for key, value in flat(document["config"]).items()}
        self.resolved = document
        config = structure_of_run(document["config"])
        if config.model.num_layers > 1000 or config.model.num_experts > 10_000:
            raise ConfigError("a model of so many modules is not counted")
        self.config = config

    # ---- What the records and the configuration say. ----

    @property
    def versions(self) -> Record:
        """Versions of software, by name."""
        found = self.resolved.get("versions") or self.observed.get("versions")
        return found if isinstance(found, dict) else {}

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the last start."""
        size = self.observed.get("world_size") or self.resolved.get("world_size")
        return size if _is_sound(size) else None

    @property
    def unit(self) -> str:
        """Name of a token: ``"token"`` or ``"byte"``."""
        return plain(str(self.observed.get("unit", "token")))

    @property
    def device(self) -> str | None:
        """Device of rank 0, such as ``"cpu"`` or ``"cuda:0"``; None where the first step was not completed."""
        return str(self.observed["device"]) if "device" in self.observed else None

    @property
    def gpu(self) -> str:
        """Name of the GPU; empty on a CPU, and where it is not known."""
        return "" if self.device in (None, "cpu") else str(self.versions.get("gpu", ""))

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 without any."""
        return max([0, *dict(self.points("step")), *dict(self.points("step", "validation"))])

    def points(self, name: str, kind: str = "step") -> list[Point]:
        """A field over steps, or ``mfu``: model FLOPs of a rank as a part of the peak.

        Records without the field give no point.
        """
        if name != "mfu":
            return [(record["step"], record[name]) for record in self.records[kind] if name in record]
        scale = self.flops / self.peak / 1e12 if self.flops and self.peak else 0.0
        rates = [(step, rate, self._ranks_at(step)) for step, rate in self.points("tokens_per_second") if scale]
        return [(step, rate and rate * scale / ranks) for step, rate, ranks in rates if ranks]

    def _ranks_at(self, step: int) -> int | None:
        """Number of ranks that took ``step``, counted from 1: a resumed run may have another number of ranks."""
        starts = {record.get("step") or 0: record.get("world_size") for record in self.records["observed"]}
        return starts[max(start for start in starts if start < step)] if 0 in starts else self.world_size

    def times(self, kind: str) -> list[BucketTimes]:
        """Times of the recorded step's ``buckets`` or ``gathers``; none where nothing was sent."""
        return bucket_times(self.timeline, kind) if self.timeline else []

    @property
    def numbers(self) -> dict[str, Any]:
        """The figures of the run: None where there is none, and a text where a number was no number."""
        times, train = self.times("buckets"), self.config and self.config.train

        def last(name: str, kind: str = "step") -> Any:
            values = [value for _, value in self.points(name, kind)]
            return "no number" if values[-1:] == [None] else (values or [None])[-1]

        def middle(name: str) -> float | None:
            values = [value for _, value in self.points(name) if value is not None]
            return median(values) if values else None

        return {
            "validation_loss": last("loss", "validation"),
            "nats_below_bigram": self.end.get("nats_below_bigram"),
            "tokens_per_second": middle("tokens_per_second"),
            "mfu": middle("mfu"),
            "hidden_share": hidden_share(times) if times else None,
            "exposed_ms": sum(each.exposed_ms for each in times) if times else None,
            "peak_memory_bytes": self.end.get("peak_memory_bytes"),
            "planned_bytes": self.plan and self.plan.rank_bytes.total,
            "loss": last("loss"),
            "steps": self.last_step,
            "tokens": train and self.last_step * train.global_batch_size * train.sequence_length,
            "seconds": self.end.get("seconds", last("elapsed")),
            "seconds_per_step": middle("seconds_per_step"),
            "num_parameters": self.observed.get("num_parameters"),
            "flops_per_token": self.flops,
            "peak_tflops": self.peak,
            "max_expert_load": last("max_expert_load"),
        }


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
    return [RunFolder(folder, label) for folder, label in zip(found, labels, strict=True)]


def _mend(record: Record) -> Iterator[tuple[str, Any]]:
    """Make null in ``record`` what is unsound, take unsound spans out, and yield what it was, and its value."""
    kind = record["kind"]
    for name in record.keys() - {"kind"} if kind in _ALL_NUMBERS else record.keys() & _NUMBERS:
        value = record[name]
        if not _is_sound(value):
            record[name] = None
            if value is not None or name == "loss":
                yield f"{name} of a {kind} record is no number", value
    for spans, span_type in SPANS.items() if kind == "timeline" else ():
        found, record[spans] = record.get(spans) or [], []
        fields = get_type_hints(span_type)
        for span in found if isinstance(found, list) else [found]:
            for name, of_type in fields.items():
                value = span.get(name) if isinstance(span, dict) else [span]
                if not (_is_sound(value) if of_type in _LARGEST else isinstance(value, of_type)):
                    yield f"{name} of one of the timeline's {spans} is damaged", value
                    break
            else:
                record[spans].append(span)


def _is_sound(number: Any) -> bool:
    return type(number) in _LARGEST and abs(number) <= _LARGEST[type(number)]


def plain(text: str) -> str:
    """``text`` in one line, without halves of characters, which no file and no picture takes."""
    return " ".join(text.encode(errors="replace").decode().split())
