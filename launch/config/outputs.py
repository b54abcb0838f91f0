"""``[checkpoint]``, ``[logging]`` and ``[profile]``: what a run writes beside ``metrics.jsonl``."""

from dataclasses import dataclass
from typing import Literal

from .error import require

__all__ = ["CheckpointConfig", "LoggingConfig", "ProfileConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How the checkpoints of ``train.save_every`` are written, and which ones stay."""

    background: bool = True
    """Copy to host memory what a rank writes, and write it in a thread while training goes on. False: training waits
    for the file system."""
    keep_last: int | None = None
    """Keep this many of the newest checkpoints, and delete older ones. None: keep all."""
    keep_every: int | None = None
    """With ``keep_last``: also keep the checkpoints after each multiple of so many steps."""

    def __post_init__(self) -> None:
        require(
            self.keep_last is None or self.keep_last >= 1,
            "checkpoint.keep_last",
            self.keep_last,
            "must be at least 1",
        )
        require(
            self.keep_every is None or self.keep_every >= 1,
            "checkpoint.keep_every",
            self.keep_every,
            "must be at least 1",
        )
        require(
            self.keep_every is None or self.keep_last is not None,
            "checkpoint.keep_every",
            self.keep_every,
            "says which older checkpoints stay, and all do without checkpoint.keep_last: set it, or leave this out",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Where the losses of ``metrics.jsonl`` go besides."""

    tensorboard: bool = False
    """Write events for TensorBoard to ``out_dir/tensorboard`` (``pip install maingrad[tensorboard]``)."""
    wandb_project: str | None = None
    """Send records to this project of Weights & Biases (``pip install maingrad[wandb]``). None: do not."""
    wandb_name: str | None = None
    """Name of the run there. None: the name of ``out_dir``."""
    wandb_mode: Literal["online", "offline"] = "online"
    """``offline``: write to ``out_dir/wandb`` only; ``wandb sync`` sends it later."""

    def __post_init__(self) -> None:
        require(self.wandb_project != "", "logging.wandb_project", self.wandb_project, "must name a project")
        for key in ("wandb_name", "wandb_mode"):
            value = getattr(self, key)
            require(
                self.wandb_project is not None or value in (None, "online"),
                f"logging.{key}",
                value,
                "has no effect without logging.wandb_project",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Steps that torch's profiler records. Profiled steps are slower."""

    first_step: int | None = None
    """Number of the first recorded step, counted from 0 over the whole run. None: nothing is recorded."""
    num_steps: int = 3
    """Number of recorded steps."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that record; each writes files of its own to ``out_dir/profile``."""
    trace: bool = True
    """Write a trace of ``torch.profiler``, for chrome://tracing or https://ui.perfetto.dev."""
    memory: bool = False
    """Record CUDA's allocations from the first recorded step on. Write a snapshot for https://pytorch.org/memory_viz at
    the end of the recorded steps, or earlier where the run fails, out of memory or otherwise. Not on a CPU."""

    def __post_init__(self) -> None:
        if self.first_step is None:
            for key, neutral in (("num_steps", 3), ("ranks", (0,)), ("trace", True), ("memory", False)):
                value = getattr(self, key)
                require(value == neutral, f"profile.{key}", value, "has no effect without profile.first_step")
            return
        require(self.first_step >= 0, "profile.first_step", self.first_step, "must not be negative")
        require(self.num_steps >= 1, "profile.num_steps", self.num_steps, "must be at least 1")
        require(
            bool(self.ranks) and all(rank >= 0 for rank in self.ranks) and len(set(self.ranks)) == len(self.ranks),
            "profile.ranks",
            self.ranks,
            "must name different ranks, from 0 on",
        )
        require(self.trace or self.memory, "profile.trace", self.trace, "records nothing without profile.memory")
