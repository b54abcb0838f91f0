"""What the page says of runs in numbers: a row for each figure, a column for each run, and what differs.

Beyond the records these are model FLOPs, MFU and planned bytes; ``Facts.missing`` says why one of them is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ..config.run import Config, ConfigError
from ..plan.plan import plan_run, plan_units
from ..plan.rank_bytes import RankBytes
from ..plan.tables import format_bytes
from ..training.watching.progress import format_duration, format_rate
from .model_flops import flops_per_token, peak_tflops
from .overlap import BucketTimes, bucket_times, hidden_share
from .run_folder import DAMAGE, Point, RunFolder

__all__ = ["Cell", "Facts", "Row", "compared", "environment", "facts_of", "figures", "state"]

_NOTHING = "none"
_NOT_COMPARED = {"train.out_dir", "executable", "folder", "command"}
"""Settings that differ between any two runs."""
_MOST_RANKS = 65_536  # a plan of more is not made


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One run, and numbers derived from it."""

    run: RunFolder
    flops: int | None
    """Model FLOPs of a token."""
    gpu: str | None
    peak: float | None
    """TFLOP/s of one device."""
    planned: RankBytes | None
    planned_peaks: tuple[int, int] | None
    """Most bytes of gathered parameters and of unreduced gradients, of a fully sharded run."""
    missing: list[str]

    def points(self, name: str, kind: str = "step") -> list[Point]:
        """A recorded field over steps; or ``tflops``, model TFLOP/s of a rank, and ``mfu``, its part of the peak."""
        if name not in ("tflops", "mfu"):
            return self.run.points(name, kind)
        points: list[Point] = []
        for step, rate in self.run.points("tokens_per_second"):
            ranks, peak = self.run.ranks_at(step), self.peak if name == "mfu" else 1.0
            if self.flops is not None and ranks and peak:
                points.append((step, None if rate is None else rate * self.flops / ranks / 1e12 / peak))
        return points

    def times(self, kind: str) -> list[BucketTimes]:
        """Times of the recorded step's ``buckets`` or ``gathers``; none where nothing was sent."""
        spans = self.run.timeline[kind] if self.run.timeline else []
        is_sent = any(span["collective"] != "none" for span in spans)
        return bucket_times(self.run.timeline, kind) if is_sent and self.run.timeline else []


def facts_of(run: RunFolder, peak: float | None) -> Facts:
    """``peak``: TFLOP/s of a device, instead of the table's."""
    missing, flops, planned, planned_peaks = list(run.notes), None, None, None
    gpu = str(run.versions.get("gpu", "")) if run.device not in (None, "cpu") else None
    known = peak_tflops(gpu or "") if peak is None else peak
    why = _why_no_mfu(run, gpu, known)
    if run.config is None:
        why = "it needs the configuration"
    else:
        try:
            flops = flops_per_token(run.config)
        except DAMAGE as error:
            why = str(error)
        try:
            planned, planned_peaks = _planned(run.config, run.world_size)
        except DAMAGE as error:
            missing.append(f"The planned bytes are left out: {error}.")
    if why:
        missing.append(f"MFU is left out: {why}.")
    if run.end.get("peak_memory_bytes") is None:
        why_no_memory = "it is measured on GPUs only" if run.device == "cpu" else "it is recorded at the end of a run"
        missing.append(f"Peak memory is left out: {why_no_memory}.")
    if run.timeline is None:
        missing.append("No reduction of a step was timed: the run ended before its timed step was over.")
    return Facts(
        run=run,
        flops=flops,
        gpu=gpu,
        peak=None if why else known,
        planned=planned,
        planned_peaks=planned_peaks,
        missing=missing,
    )


def _why_no_mfu(run: RunFolder, gpu: str | None, peak: float | None) -> str:
    if run.device is None:
        return "the device is not known, since no step was completed"
    if run.device == "cpu":
        return "the run was on a CPU, and only GPUs have a stated peak of matrix products that MFU is measured against"
    if peak is None:
        return f"no peak of {gpu or 'this GPU'!r} is known; give it in TFLOP/s with --peak-tflops"
    if any(run.ranks_at(step) is None for step, _ in run.points("step")):
        return "the number of ranks changed, and these records do not say at which step"
    return ""


def _planned(config: Config, ranks: int | None) -> tuple[RankBytes, tuple[int, int] | None]:
    if not ranks or ranks > _MOST_RANKS:
        raise ConfigError(f"the number of ranks is {ranks or 'not known'}")
    if config.fully_sharded:
        units = plan_units(config, ranks)
        return units.rank_bytes, (units.peak_params, units.peak_grads)
    return plan_run(config, ranks).rank_bytes, None


def state(facts: Facts) -> str:
    """How the run ended, and where it was resumed."""
    end, run = facts.run.end, facts.run
    after = f"after step {end.get('step', run.last_step)}"
    if not end:
        text = f"no end recorded {after}: the run goes on, or was killed"
    elif end["kind"] == "interrupted":
        text = f"interrupted {after} by {end.get('signal', 'a signal')}"
    else:
        text = f"finished {after}"
    resumes = ", ".join(str(record["step"]) for record in run.records["observed"] if record.get("step"))
    return f"{text}; resumed after step {resumes}" if resumes else text


class Cell(NamedTuple):
    """What one run has in a row."""

    text: str
    value: float | str | None
    """The number as recorded or computed, without rounding; None: the run has none."""
    note: str
    differs: bool
    """Whether it is other than the first run's."""


class Row(NamedTuple):
    """One figure of all runs."""

    key: str
    label: str
    cells: Sequence[Cell]
    note: str = ""
    """Unit, or how the figure is made."""
    is_headline: bool = False

    @property
    def differs(self) -> bool:
        """Whether any run has another value than the first."""
        return any(cell.differs for cell in self.cells)


def environment(all_facts: Sequence[Facts]) -> list[Row]:
    """Model, ranks and device, versions, commit and command."""
    documents = []
    for run in (facts.run for facts in all_facts):
        model, resolved = run.config and run.config.model, run.resolved
        document = {
            "model": model and (model.hugging_face or f"GPT of {model.num_layers} blocks, width {model.dim}"),
            "ranks": run.world_size,
            "backend": run.observed.get("backend"),
            "device": run.device,
            **run.versions,
            **{key: resolved.get(key) for key in ("git_commit", "command")},
            "folder": run.path,
        }
        documents.append({key: _NOTHING if value is None else str(value) for key, value in document.items()})
    return compared(documents)


def compared(documents: Sequence[Mapping[str, str]]) -> list[Row]:
    """A row for each key of the runs' documents."""
    rows = []
    for key in {key: None for document in documents for key in document}:
        texts = [document.get(key, _NOTHING) for document in documents]
        cells = [Cell(text, text, "", key not in _NOT_COMPARED and text != texts[0]) for text in texts]
        rows.append(Row(key, key, cells))
    return rows


def figures(all_facts: Sequence[Facts]) -> list[Row]:
    """A row for each figure that at least one run has."""
    unit = "nats per " + " or ".join(dict.fromkeys(facts.run.unit for facts in all_facts))
    numbers = [_numbers(facts) for facts in all_facts]
    return [
        Row(key, label, [_cell(key, each[key], numbers[0][key], form) for each in numbers], note or unit, number < 8)
        for number, (key, (label, form, note)) in enumerate(_FIGURES.items())
        if any(each[key] is not None for each in numbers)
    ]


def _numbers(facts: Facts) -> dict[str, Any]:
    """The figures of a run; a text where a number was no number."""
    run, observed, end, times = facts.run, facts.run.observed, facts.run.end, facts.times("buckets")
    train = run.config and run.config.train

    def last(name: str, kind: str = "step") -> Any:
        points = facts.points(name, kind)
        return None if not points else "no number" if points[-1][1] is None else points[-1][1]

    def middle(name: str) -> float | None:
        values = [value for _, value in facts.points(name) if value is not None]
        return median(values) if values else None

    return {
        "validation_loss": last("loss", "validation"),
        "nats_below_bigram": end.get("nats_below_bigram"),
        "hidden_share": hidden_share(times) if times else None,
        "exposed_ms": sum(each.exposed_ms for each in times) if times else None,
        "peak_memory_bytes": end.get("peak_memory_bytes"),
        "planned_bytes": facts.planned and sum(facts.planned),
        "loss": last("loss"),
        "steps": run.last_step,
        "tokens": train and run.last_step * train.global_batch_size * train.sequence_length,
        "seconds": last("elapsed") if end.get("seconds") is None else end["seconds"],
        "num_parameters": observed.get("num_parameters"),
        "flops_per_token": facts.flops,
        "peak_tflops": facts.peak,
        "max_expert_load": last("max_expert_load"),
        **{name: middle(name) for name in ("tokens_per_second", "mfu", "seconds_per_step", "tflops")},
    }


def _cell(key: str, value: Any, first: Any, form: str | Callable[[Any], str]) -> Cell:
    if value is None or isinstance(value, str):
        return Cell(value or _NOTHING, value, "", value != first)
    text = form(value) if callable(form) else f"{value:{form}}" if abs(value) < 1e12 else f"{value:.4g}"
    delta = ""
    if value != first and isinstance(first, int | float):
        is_relative = first and "loss" not in key and key != "nats_below_bigram"
        delta = f"{(value - first) / abs(first):+.1%}" if is_relative else f"{value - first:+.4g}"
    return Cell(text, value, delta, value != first)


_OVER_STEPS, _TIMED = "median over steps", "in the timed step"
_FIGURES: dict[str, tuple[str, str | Callable[[Any], str], str]] = {
    "validation_loss": ("validation loss, last", ".4f", ""),
    "nats_below_bigram": ("below the bigram model", "+.4f", ""),
    "tokens_per_second": ("tokens per second", format_rate, _OVER_STEPS),
    "mfu": ("MFU", ".1%", _OVER_STEPS),
    "hidden_share": ("reductions under computation", ".0%", _TIMED),
    "exposed_ms": ("waited for reductions, ms", ".2f", _TIMED),
    "peak_memory_bytes": ("peak memory", format_bytes, "of rank 0"),
    "planned_bytes": ("planned bytes on a rank", format_bytes, "at rest"),
    "loss": ("training loss, last", ".4f", ""),
    "steps": ("steps", ",", "recorded"),
    "tokens": ("tokens", format_rate, "read by all ranks"),
    "seconds": ("time", format_duration, "of training"),
    "seconds_per_step": ("seconds a step", ".4g", _OVER_STEPS),
    "num_parameters": ("parameters", ",", "of the whole model"),
    "flops_per_token": ("model FLOPs", ".3g", "of a token"),
    "tflops": ("model TFLOP/s of a rank", ".3g", _OVER_STEPS),
    "peak_tflops": ("peak TFLOP/s of a device", "g", "dense bf16"),
    "max_expert_load": ("fullest expert, last", ".2f", "of an even share"),
}
"""Label, format and note, by key; without a note the unit of losses. The first eight are headlines."""
