"""What the page says of runs in numbers, and in which settings they differ.

Beyond the records the numbers are model FLOPs, MFU and planned bytes; ``Facts.missing`` says why one is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from ..config.run import Config, ConfigError
from ..plan.plan import plan_run, plan_units
from .model_flops import flops_per_token, peak_tflops
from .overlap import BucketTimes, bucket_times, hidden_share
from .run_folder import DAMAGE, Point, RunFolder

__all__ = ["Facts", "differing", "environment", "side_by_side"]

_NOTHING = "none"
_NOT_COMPARED = {"train.out_dir", "executable", "folder", "command"}
"""Settings that differ between any two runs."""
_MOST_RANKS = 65_536  # a plan of more is not made


class Facts(RunFolder):
    """One run, and numbers derived from it; None where they are not known.

    gpu      name of the GPU
    flops    model FLOPs of a token
    peak     TFLOP/s of one device
    plan     with the bytes of a rank
    missing  sentences about what the page lacks
    """

    def __init__(self, path: Path, label: str, peak: float | None) -> None:
        """``peak``: TFLOP/s of a device, instead of the table's."""
        super().__init__(path, label)
        self.missing = list(self.notes)
        self.gpu = str(self.versions.get("gpu", "")) if self.device not in (None, "cpu") else None
        self.peak = peak_tflops(self.gpu or "") if peak is None else peak
        self.flops, why_no_flops = self._try(flops_per_token)
        why = self._why_no_peak() or why_no_flops
        if why:
            self.peak = None
            self.missing.append(f"MFU is left out: {why}.")
        self.plan, why = self._try(self._plan)
        if why:
            self.missing.append(f"The planned bytes are left out: {why}.")
        if self.end.get("peak_memory_bytes") is None:
            why = "measured on GPUs only" if self.device == "cpu" else "recorded at the end of a run"
            self.missing.append(f"Peak memory is left out: it is {why}.")
        if self.timeline is None:
            self.missing.append("No reduction of a step was timed: the run ended before its timed step was over.")

    def _try(self, function: Callable[[Config], Any]) -> tuple[Any, str]:
        """What ``function`` makes of the configuration, or None and why there is nothing."""
        try:
            return (function(self.config), "") if self.config else (None, "it needs the configuration")
        except DAMAGE as error:
            return None, str(error)

    def _plan(self, config: Config) -> Any:
        ranks = self.world_size
        if not ranks or ranks > _MOST_RANKS:
            raise ConfigError(f"the number of ranks is {ranks or 'not known'}")
        return (plan_units if config.fully_sharded else plan_run)(config, ranks)

    def _why_no_peak(self) -> str:
        if self.device is None:
            return "the device is not known, since no step was completed"
        if self.device == "cpu":
            return "the run was on a CPU, and only GPUs have a stated peak of products that MFU is measured against"
        if self.peak is None:
            return f"no peak of {self.gpu or 'this GPU'!r} is known; give it in TFLOP/s with --peak-tflops"
        return ""

    def points(self, name: str, kind: str = "step") -> list[Point]:
        """A recorded field over steps; or ``tflops``, model TFLOP/s of a rank, and ``mfu``, its part of the peak."""
        if name not in ("tflops", "mfu"):
            return super().points(name, kind)
        points: list[Point] = []
        for step, rate in super().points("tokens_per_second"):
            ranks, peak = self.ranks_at(step), self.peak if name == "mfu" else 1.0
            if self.flops is not None and ranks and peak:
                points.append((step, None if rate is None else rate * self.flops / ranks / 1e12 / peak))
        return points

    def times(self, kind: str) -> list[BucketTimes]:
        """Times of the recorded step's ``buckets`` or ``gathers``; none where nothing was sent."""
        return bucket_times(self.timeline, kind) if self.timeline else []

    @property
    def numbers(self) -> dict[str, Any]:
        """The figures of the run: None where there is none, and a text where a number was no number."""
        end, times, train = self.end, self.times("buckets"), self.config and self.config.train

        def last(name: str, kind: str = "step") -> Any:
            points = self.points(name, kind)
            return None if not points else "no number" if points[-1][1] is None else points[-1][1]

        def middle(name: str) -> float | None:
            values = [value for _, value in self.points(name) if value is not None]
            return median(values) if values else None

        return {
            **{name: end.get(name) for name in ("nats_below_bigram", "peak_memory_bytes")},
            **{name: last(name) for name in ("loss", "max_expert_load")},
            **{name: middle(name) for name in ("tokens_per_second", "mfu", "seconds_per_step", "tflops")},
            "validation_loss": last("loss", "validation"),
            "hidden_share": hidden_share(times) if times else None,
            "exposed_ms": sum(each.exposed_ms for each in times) if times else None,
            "planned_bytes": self.plan and self.plan.rank_bytes.total,
            "steps": self.last_step,
            "tokens": train and self.last_step * train.global_batch_size * train.sequence_length,
            "seconds": last("elapsed") if end.get("seconds") is None else end["seconds"],
            "num_parameters": self.observed.get("num_parameters"),
            "flops_per_token": self.flops,
            "peak_tflops": self.peak,
        }

    @property
    def state(self) -> str:
        """How the run ended, and where it was resumed."""
        after = f"after step {self.end.get('step') or self.last_step}"
        text = {
            None: f"no end recorded {after}: the run goes on, or was killed",
            "interrupted": f"interrupted {after} by {self.end.get('signal', 'a signal')}",
            "final": f"finished {after}",
        }[self.end.get("kind")]
        resumes = ", ".join(str(record["step"]) for record in self.records["observed"] if record.get("step"))
        return f"{text}; resumed after step {resumes}" if resumes else text


def environment(run: RunFolder) -> dict[str, str]:
    """Model, ranks and device, versions, commit and command."""
    model = run.config and run.config.model
    document = {
        "model": model and (model.hugging_face or f"GPT of {model.num_layers} blocks, width {model.dim}"),
        "ranks": run.world_size,
        "backend": run.observed.get("backend"),
        "device": run.device,
        **run.versions,
        **{key: run.resolved.get(key) for key in ("git_commit", "command")},
        "folder": run.path,
    }
    return {key: _NOTHING if value is None else str(value) for key, value in document.items()}


def side_by_side(documents: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The texts of each key, one for each document."""
    return {key: [document.get(key, _NOTHING) for document in documents] for key in dict.fromkeys(chain(*documents))}


def differing(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The rows of ``side_by_side`` that tell the runs apart."""
    return {key: texts for key, texts in rows.items() if key not in _NOT_COMPARED and len(set(texts)) > 1}
