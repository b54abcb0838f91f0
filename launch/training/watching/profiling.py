"""``[profile]``: traces of torch's profiler, and snapshots of CUDA's memory, of chosen steps on chosen ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from ...config.error import require
from ...config.run import Config
from ..runtime import Runtime

__all__ = ["StepProfiler"]

_MOST_EVENTS = 1_000_000
"""Of a snapshot: allocations and frees, the newest."""


class StepProfiler:
    """Profiles steps [``first_step``, ``first_step + num_steps``) on this rank; a context manager around the run.

    Raises ``ConfigError`` for a memory snapshot without CUDA, and for a rank that the run does not have.
    """

    def __init__(self, config: Config, runtime: Runtime) -> None:
        settings = self._settings = config.profile
        require(
            not settings.memory or runtime.device.type == "cuda",
            "profile.memory",
            settings.memory,
            f"records CUDA's allocator, and this run is on {runtime.device.type}; leave it out",
        )
        missing = [rank for rank in settings.ranks if rank >= runtime.world_size]
        require(
            settings.first_step is None or not missing,
            "profile.ranks",
            settings.ranks,
            f"names rank(s) {missing} of {runtime.world_size}",
        )
        self._runtime = runtime
        self._folder = Path(config.train.out_dir) / "profile"
        self._is_on = settings.first_step is not None and runtime.rank in settings.ranks
        self._profiler: profile | None = None
        self._records_memory = False
        self._first_taken = 0
        """Later than ``first_step`` where a run is resumed among the profiled steps."""

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop("failed" if error is not None else None)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A step of the run, counted from 0. The files are written after the last profiled step, or where a step
        fails."""
        first, count = self._settings.first_step, self._settings.num_steps
        if not self._is_on or first is None or not first <= step < first + count:
            yield
            return
        if self._profiler is None and not self._records_memory:
            self._first_taken = step
            self._start()
        yield
        if step + 1 == first + count:
            self._stop(None)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
            self._records_memory = True
        if self._settings.trace:
            activities = [ProfilerActivity.CPU]
            if self._runtime.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def _stop(self, ending: str | None) -> None:
        """Write what was recorded."""
        stem = f"step-{self._first_taken}-rank-{self._runtime.rank}{'' if ending is None else f'-{ending}'}"
        memory, self._records_memory = self._records_memory, False
        profiler, self._profiler = self._profiler, None
        if memory or profiler is not None:
            self._is_on = False
        if memory:  # first: what the profiler allocates is not the run's
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{stem}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if profiler is not None:
            if self._runtime.device.type == "cuda" and ending is None:
                torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(str(self._folder / f"trace-{stem}.json.gz"))
