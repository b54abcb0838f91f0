"""The page's figures and tables: a row for each figure, a column for each run, and what differs from the first run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...plan.tables import format_bytes
from ...training.watching.progress import format_duration, format_rate
from ..overlap import overlap_share
from .bucket_times import bucket_times
from .facts import Facts, median_of

__all__ = ["Cell", "Row", "differing", "environment", "figures", "settings", "state"]

_NOTHING = "none"
_NO_NUMBER = "no number"  # NaN or infinity, which are recorded as null
_NOT_COMPARED = {"train.out_dir", "executable"}
"""Settings that differ between any two runs."""


class Cell(NamedTuple):
    """What one run has in a row."""

    text: str
    value: float | str | None = None
    """The number as recorded or computed, without rounding; None: the run has none."""
    note: str = ""
    differs: bool = False
    """Whether it is other than the first run's."""


@dataclass(frozen=True)
class Row:
    """One figure of all runs."""

    key: str
    label: str
    cells: Sequence[Cell]
    is_headline: bool = False
    note: str = ""
    """Unit, or how the figure is made, where it is the same for all runs."""

    @property
    def differs(self) -> bool:
        """Whether any run has another value than the first."""
        return any(cell.differs for cell in self.cells)


_Value = float | str | None


class _Figure(NamedTuple):
    key: str
    label: str
    value: Callable[[Facts], _Value]
    text: Callable[[Any], str]
    note: Callable[[Facts], str] = lambda facts: ""
    is_headline: bool = False
    delta: str = "relative"
    """How a run's value is compared with the first run's: relative, absolute or not at all ("")."""


def state(facts: Facts) -> str:
    """How the run ended, and where it was resumed."""
    end, run = facts.run.end, facts.run
    if end is None:
        text = f"no end recorded after step {run.last_step}: the run goes on, or was killed"
    elif end["kind"] == "interrupted":
        text = f"interrupted after step {end.get('step', run.last_step)} by {end.get('signal', 'a signal')}"
    else:
        text = f"finished after step {end.get('step', run.last_step)}"
    resumes = ", ".join(str(step) for step in run.resumed_after)
    return f"{text}; resumed after step {resumes}" if resumes else text


def figures(all_facts: Sequence[Facts]) -> list[Row]:
    """A row for each figure that at least one run has."""
    rows = []
    for figure in _FIGURES:
        values = [figure.value(facts) for facts in all_facts]
        if all(value is None for value in values):
            continue
        notes = [figure.note(facts) for facts in all_facts]
        is_common = len(set(notes)) == 1
        cells = [
            Cell(
                _NOTHING if value is None else value if isinstance(value, str) else figure.text(value),
                value,
                "; ".join(filter(None, ["" if is_common else note, _delta(figure.delta, value, values[0])])),
                value != values[0],
            )
            for note, value in zip(notes, values, strict=True)
        ]
        rows.append(Row(figure.key, figure.label, cells, figure.is_headline, notes[0] if is_common else ""))
    return rows


def settings(all_facts: Sequence[Facts]) -> list[Row]:
    """Every key of the configurations."""
    return _table([facts.run.settings for facts in all_facts])


def environment(all_facts: Sequence[Facts]) -> list[Row]:
    """Versions, ranks and device."""
    documents = []
    for facts in all_facts:
        last = facts.run.observed[-1] if facts.run.observed else {}
        ranks = {"ranks": facts.run.world_size, "backend": last.get("backend"), "device": facts.run.device}
        documents.append({**ranks, **facts.run.versions, "folder": str(facts.run.path)})
    return _table(documents)


def differing(rows: Sequence[Row]) -> list[Row]:
    """The rows in which runs differ."""
    return [row for row in rows if row.differs]


def _table(documents: Sequence[Mapping[str, Any]]) -> list[Row]:
    keys = dict.fromkeys(key for document in documents for key in document)
    rows = []
    for key in keys:
        texts = [_plain(document.get(key)) for document in documents]
        compared = key not in _NOT_COMPARED and key != "folder"
        rows.append(Row(key, key, [Cell(text, text, "", compared and text != texts[0]) for text in texts]))
    return rows


def _plain(value: Any) -> str:
    return _NOTHING if value is None else value if isinstance(value, str) else json.dumps(value)


def _delta(kind: str, value: _Value, first: _Value) -> str:
    if not isinstance(value, int | float) or not isinstance(first, int | float) or value == first or not kind:
        return ""
    if kind == "absolute" or not first:
        return f"{value - first:+.4g}"
    return f"{(value - first) / abs(first):+.1%}"


def _last(name: str, kind: str = "steps") -> Callable[[Facts], _Value]:
    def value(facts: Facts) -> _Value:
        points = facts.points(name, kind)
        if not points:
            return None
        return _NO_NUMBER if points[-1][1] is None else points[-1][1]

    return value


def _of_end(name: str) -> Callable[[Facts], _Value]:
    return lambda facts: (facts.run.end or {}).get(name)


def _tokens(facts: Facts) -> _Value:
    if facts.run.config is None:
        return None
    train = facts.run.config.train
    return facts.run.last_step * train.global_batch_size * train.sequence_length


def _seconds(facts: Facts) -> _Value:
    ended = _of_end("seconds")(facts)
    return _last("elapsed")(facts) if ended is None else ended


def _hidden(facts: Facts) -> _Value:
    timeline = facts.run.timeline
    if timeline is None or all(span["collective"] == "none" for span in timeline["buckets"]):
        return None
    return overlap_share(timeline).fraction


def _exposed(facts: Facts) -> _Value:
    if _hidden(facts) is None or facts.run.timeline is None:
        return None
    return sum(each.exposed_ms for each in bucket_times(facts.run.timeline, "buckets"))


def _recorded_step(facts: Facts) -> str:
    return "" if facts.run.timeline is None else f"in step {facts.run.timeline['step']}"


def _parameters(facts: Facts) -> _Value:
    return facts.run.observed[-1].get("num_parameters") if facts.run.observed else None


_FIGURES = (
    _Figure(
        "validation_loss",
        "validation loss, last",
        _last("loss", "validations"),
        "{:.4f}".format,
        lambda facts: f"nats per {facts.run.unit}",
        True,
        "absolute",
    ),
    _Figure(
        "nats_below_bigram",
        "against the bigram model",
        _of_end("nats_below_bigram"),
        lambda nats: f"{abs(nats):.4f} {'below' if nats >= 0 else 'above'}",
        lambda facts: f"nats per {facts.run.unit}",
        delta="",
    ),
    _Figure(
        "tokens_per_second",
        "tokens per second",
        lambda facts: median_of(facts.points("tokens_per_second")),
        format_rate,
        lambda facts: "median over steps",
        True,
    ),
    _Figure("mfu", "MFU", lambda f: median_of(f.mfu), "{:.1%}".format, lambda f: "median over steps", True, ""),
    _Figure(
        "hidden_share",
        "reductions under computation",
        _hidden,
        "{:.0%}".format,
        _recorded_step,
        True,
        "",
    ),
    _Figure("exposed_ms", "waited for reductions", _exposed, "{:.2f} ms".format, _recorded_step, True),
    _Figure("peak_memory_bytes", "peak memory of rank 0", _of_end("peak_memory_bytes"), format_bytes, is_headline=True),
    _Figure(
        "planned_bytes",
        "planned bytes on a rank, at rest",
        lambda facts: None if facts.planned is None else facts.planned.total,
        format_bytes,
        is_headline=True,
    ),
    _Figure("loss", "training loss, last", _last("loss"), "{:.4f}".format, delta="absolute"),
    _Figure("steps", "steps", lambda facts: facts.run.last_step, "{:,}".format, delta=""),
    _Figure("tokens", "tokens read", _tokens, format_rate, delta=""),
    _Figure("seconds", "time", _seconds, format_duration, delta=""),
    _Figure(
        "seconds_per_step",
        "milliseconds a step",
        lambda facts: median_of(facts.points("seconds_per_step")),
        lambda seconds: f"{1e3 * seconds:.1f}",
        lambda facts: "median over steps",
    ),
    _Figure("num_parameters", "parameters", _parameters, "{:,}".format),
    _Figure("flops_per_token", "model FLOPs of a token", lambda facts: facts.flops, "{:.3g}".format),
    _Figure(
        "tflops",
        "model TFLOP/s of a rank",
        lambda facts: median_of(facts.tflops),
        "{:.3g}".format,
        lambda facts: "median over steps",
    ),
    _Figure("peak_tflops", "peak TFLOP/s of a device, dense bf16", lambda facts: facts.peak, "{:g}".format),
    _Figure(
        "max_expert_load",
        "fullest expert, last",
        _last("max_expert_load"),
        "{:.2f}".format,
        lambda facts: "of an even share",
    ),
)
