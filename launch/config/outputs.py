"""``[checkpoint]``, ``[logging]`` and ``[profile]``: what a run writes beside ``metrics.jsonl``."""

from dataclasses import dataclass
from typing import Literal

from .table import Count, Natural, Table, require_defaults

__all__ = ["CheckpointConfig", "LoggingConfig", "ProfileConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Table):
    """How the checkpoints of ``train.save_every`` are written, and which ones stay."""

    background: bool = True
    """Copy to host memory what a rank writes, and write it in a thread while training goes on. False: training waits
    for the file system."""
    keep_last: Count | None = None
    """Keep this many of the newest checkpoints, and delete older ones. None: keep all."""
    keep_every: Count | None = None
    """With ``keep_last``: also keep the checkpoints after each multiple of so many steps."""

    def check(self) -> None:
        remedy = "says which older checkpoints stay, and all do without checkpoint.keep_last: set it, or leave this out"
        self.require(self.keep_every is None or self.keep_last is not None, "keep_every", remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig(Table):
    """Where the losses of ``metrics.jsonl`` go besides."""

    tensorboard: bool = False
    """Write events for TensorBoard to ``out_dir/tensorboard`` (``pip install maingrad[tensorboard]``)."""
    wandb_project: str | None = None
    """Send records to this project of Weights & Biases (``pip install maingrad[wandb]``). None: do not."""
    wandb_name: str | None = None
    """Name of the run there. None: the name of ``out_dir``."""
    wandb_mode: Literal["online", "offline"] = "online"
    """``offline``: write to ``out_dir/wandb`` only; ``wandb sync`` sends it later."""

    def check(self) -> None:
        self.require(self.wandb_project != "", "wandb_project", "must name a project")
        if self.wandb_project is None:
            remedy = "has no effect without logging.wandb_project"
            require_defaults(self, "logging", ("wandb_name", "wandb_mode"), remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Table):
    """Steps that torch's profiler records. Profiled steps are slower."""

    first_step: Natural | None = None
    """Number of the first recorded step, counted from 0 over the whole run. None: nothing is recorded."""
    num_steps: Count = 3
    """Number of recorded steps."""
    ranks: tuple[Natural, ...] = (0,)
    """Ranks that record; each writes files of its own to ``out_dir/profile``."""
    trace: bool = True
    """Write a trace of ``torch.profiler``, for chrome://tracing or https://ui.perfetto.dev."""
    memory: bool = False
    """Record CUDA's allocations from the first recorded step on. Write a snapshot for https://pytorch.org/memory_viz at
    the end of the recorded steps, or earlier where the run fails, out of memory or otherwise. Not on a CPU."""

    def check(self) -> None:
        if self.first_step is None:
            remedy = "has no effect without profile.first_step"
            require_defaults(self, "profile", ("num_steps", "ranks", "trace", "memory"), remedy)
        differ = bool(self.ranks) and len(set(self.ranks)) == len(self.ranks)
        self.require(differ, "ranks", "must name different ranks, from 0 on")
        self.require(self.trace or self.memory, "trace", "records nothing without profile.memory")
