"""What the page says of a run beyond its records: model FLOPs, MFU and planned bytes, or why one of them is missing."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ...config.run import Config, ConfigError
from ...plan.plan import plan_run, plan_units
from ...plan.rank_bytes import RankBytes
from .charts import Point
from .model_flops import flops_per_token, peak_tflops
from .run_folder import RunFolder

__all__ = ["Facts", "facts_of", "median_of"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Derived numbers of one run. What is None has its reason in ``missing``."""

    index: int
    run: RunFolder
    flops: int | None
    """Model FLOPs of a token."""
    gpu: str | None
    peak: float | None
    """TFLOP/s of one device."""
    tflops: list[Point]
    """Model TFLOP/s of one rank, at each recorded step."""
    mfu: list[Point]
    """Part of ``peak``, at each recorded step."""
    planned: RankBytes | None
    planned_peaks: tuple[int, int] | None
    """Most bytes of gathered parameters and of unreduced gradients, of a fully sharded run."""
    missing: list[str]

    def points(self, name: str, kind: str = "steps") -> list[Point]:
        """A field of the run's ``steps`` or ``validations``; records without the field give no point."""
        return [(record["step"], record[name]) for record in getattr(self.run, kind) if name in record]


def facts_of(index: int, run: RunFolder, peak: float | None) -> Facts:
    """``peak``: TFLOP/s of a device, instead of the table's."""
    missing: list[str] = []
    flops, why_no_flops = None, "it needs the configuration"
    if run.config is not None:
        try:
            flops = flops_per_token(run.config)
        except ConfigError as error:
            why_no_flops = str(error)
    gpu = run.versions.get("gpu") if run.device not in (None, "cpu") else None
    known = peak if peak is not None else peak_tflops(gpu or "")
    why = why_no_flops if flops is None else _why_no_mfu(run, gpu, known)
    if why is not None:
        known = None
        missing.append(f"MFU is left out: {why}.")
    tflops = _tflops(run, flops)
    planned, planned_peaks = None, None
    if run.config is not None and run.world_size:
        try:
            planned, planned_peaks = _planned(run.config, run.world_size)
        except ConfigError as error:
            missing.append(f"The planned bytes are left out: {error}.")
    if _peak_memory(run) is None:
        missing.append(f"Peak memory is left out: {_why_no_peak_memory(run)}.")
    return Facts(
        index=index,
        run=run,
        flops=flops,
        gpu=gpu,
        peak=known,
        tflops=tflops,
        mfu=[(x, None if y is None else y / known) for x, y in tflops] if known else [],
        planned=planned,
        planned_peaks=planned_peaks,
        missing=[*run.notes, *missing],
    )


def median_of(points: Iterable[Point]) -> float | None:
    """Median of the values that are numbers."""
    values = [value for _, value in points if value is not None]
    return median(values) if values else None


def _why_no_mfu(run: RunFolder, gpu: str | None, peak: float | None) -> str | None:
    if run.device is None:
        return "the device is not known, since no step was completed"
    if run.device == "cpu":
        return "the run was on a CPU, and only GPUs have a stated peak of matrix products that MFU is measured against"
    if peak is None:
        return f"no peak of {gpu or 'this GPU'!r} is known; give it in TFLOP/s with --peak-tflops"
    if any(run.ranks_at(record["step"]) is None for record in run.steps):
        return "the number of ranks changed, and these records do not say at which step"
    return None


def _tflops(run: RunFolder, flops: int | None) -> list[Point]:
    points: list[Point] = []
    for record in run.steps:
        rate, ranks = record.get("tokens_per_second"), run.ranks_at(record["step"])
        if flops is not None and ranks:
            points.append((record["step"], None if rate is None else rate * flops / ranks / 1e12))
    return points


def _planned(config: Config, ranks: int) -> tuple[RankBytes, tuple[int, int] | None]:
    if config.fully_sharded:
        units = plan_units(config, ranks)
        return units.rank_bytes, (units.peak_params, units.peak_grads)
    return plan_run(config, ranks).rank_bytes, None


def _peak_memory(run: RunFolder) -> int | None:
    return (run.end or {}).get("peak_memory_bytes")


def _why_no_peak_memory(run: RunFolder) -> str:
    if run.device == "cpu":
        return "it is measured on GPUs only"
    return "the run recorded none" if run.end else "it is recorded at the end of a run"
