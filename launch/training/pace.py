"""How far a run is, by steps or by the clock, and the learning rate that follows from it."""

import dataclasses
import math

from ..config.run import OptimizerConfig

__all__ = ["Pace", "cosine_with_warmup"]


@dataclasses.dataclass
class Pace:
    """How far the run is. Ranks agree on it, so that they end together and use one learning rate."""

    steps: int
    """Steps of the whole run."""
    max_seconds: float | None
    """It ends after so many seconds at the latest; None: the steps alone count."""
    step: int = 0
    """Steps taken."""
    seconds: float = 0.0
    """Time trained, as of the last record."""

    @property
    def fraction(self) -> float:
        """Part of the run that is over: of its steps or of its time, whichever is further."""
        by_time = 0.0 if self.max_seconds is None else self.seconds / self.max_seconds
        return min(1.0, max(self.step / self.steps, by_time))


def cosine_with_warmup(config: OptimizerConfig, step: int, fraction: float) -> float:
    """Factor on the learning rate: linear over the warmup steps, and along a cosine from 1 to ``min_lr_ratio``.

    step      optimizer steps taken so far
    fraction  part of the whole run that is over, in [0, 1]
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(fraction, 1.0)))
    return warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
