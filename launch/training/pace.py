"""Progress of a run, by steps or by time, and the learning rate, which depends on it."""

import dataclasses
import math

from ..config.run import OptimizerConfig

__all__ = ["Pace", "lr_factor"]


@dataclasses.dataclass
class Pace:
    """Progress of a run. It is equal on all ranks, so that they end together and use one learning rate."""

    steps: int
    """Steps of the whole run."""
    max_seconds: float | None
    """Limit of the run in seconds; None: only ``steps`` ends the run."""
    step: int = 0
    """Steps taken."""
    seconds: float = 0.0
    """Seconds of training until the last record."""

    @property
    def fraction(self) -> float:
        """Fraction of the run that is done: the larger of the fractions of steps and of time."""
        by_time = 0.0 if self.max_seconds is None else self.seconds / self.max_seconds
        return min(1.0, max(self.step / self.steps, by_time))


def lr_factor(config: OptimizerConfig, step: int, fraction: float) -> float:
    """Factor of the learning rate: linear during warmup, then as ``config.schedule`` says.

    step      optimizer steps taken so far
    fraction  part of the whole run that is over, in [0, 1]: of its steps or of its time
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = 1.0 - fraction  # 1 at ``lr``, 0 at ``min_lr_ratio * lr``
    match config.schedule:
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * fraction))
        case "warmup_stable_decay":
            left = min(1.0, left / config.decay_fraction)
        case "constant":
            left = 1.0
    return warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
