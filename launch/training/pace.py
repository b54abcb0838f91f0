"""Progress of a run, by steps or by time, and the learning rate, which depends on it."""

import dataclasses
import math

from ..config.run import OptimizerConfig

__all__ = ["Pace", "cosine_with_warmup"]


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


def cosine_with_warmup(config: OptimizerConfig, step: int, fraction: float) -> float:
    """Factor of the learning rate: linear during warmup, then a cosine from 1 to ``min_lr_ratio``.

    step      optimizer steps taken so far
    fraction  part of the whole run that is over, in [0, 1]
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(fraction, 1.0)))
    return warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
