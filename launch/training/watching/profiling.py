"""``[profile]``: traces of torch's profiler, and snapshots of CUDA's memory, of chosen steps on chosen ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ...config.run import Config, ProfileConfig
from ..runtime import Runtime

__all__ = ["StepProfiler", "check_profile"]

_MOST_EVENTS = 1_000_000
"""The newest allocations and frees that a snapshot holds."""


def check_profile(settings: ProfileConfig, world_size: int, device: str) -> None:
    """Raise ``ConfigError`` for a memory snapshot on a CPU, and for a rank that the run does not have.

    device  its type; "auto": not known yet
    """
    remedy = f"records CUDA's allocator, and this run is on {device}; leave it out"
    settings.require(not settings.memory or device != "cpu", "memory", remedy)
    missing = [rank for rank in settings.ranks if rank >= world_size]
    settings.require(not missing, "ranks", f"names rank(s) {missing} of {world_size}")


class StepProfiler:
    """Profiles steps [``first_step``, ``first_step + num_steps``) on this rank. Raises like ``check_profile``."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        settings = config.profile
        check_profile(settings, runtime.world_size, runtime.device.type)
        self._settings, self._runtime = settings, runtime
        self._folder = Path(config.train.out_dir) / "profile"
        self._steps = range(0)
        """Steps that are left to record."""
        if settings.first_step is not None and runtime.rank in settings.ranks:
            self._steps = range(settings.first_step, settings.first_step + settings.num_steps)
        self._profiler: profile | None = None
        self._first_taken: int | None = None
        """The first recorded step; later than ``first_step`` where a run is resumed among the profiled steps. None:
        nothing is being recorded."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A step of the run, counted from 0. The files are written after the last profiled step, or by ``stop``."""
        if step in self._steps and self._first_taken is None:
            self._start(step)
        yield
        if step + 1 == self._steps.stop:
            self.stop()

    def _start(self, step: int) -> None:
        self._first_taken = step
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        if self._settings.trace:
            activities = [ProfilerActivity.CPU]
            if self._runtime.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def stop(self, ending: str = "") -> None:
        """Write what was recorded, unless it was written before: at the end of the run, or where it fails."""
        if self._first_taken is None:
            return
        stem = f"step-{self._first_taken}-rank-{self._runtime.rank}{ending}"
        self._first_taken, self._steps = None, range(0)
        if self._settings.memory:  # first: what the profiler allocates is not the run's
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{stem}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profiler is not None:
            if self._runtime.device.type == "cuda" and not ending:
                torch.cuda.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / f"trace-{stem}.json.gz"))
