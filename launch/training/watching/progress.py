"""What a person sees while a run trains: a line for each record; rank 0 only."""

from typing import NamedTuple

__all__ = ["Display", "Status", "format_duration", "format_rate"]


class Status(NamedTuple):
    """State of a run after a step."""

    step: int
    steps: int
    fraction: float
    """Part of the run that is done, in [0, 1]: the larger of the part of its steps and the part of its time."""
    elapsed: float
    """Seconds since the first step began."""
    loss: float
    lr: float
    tokens_per_second: float

    @property
    def eta(self) -> float:
        """Estimated seconds left."""
        return self.elapsed * (1.0 - self.fraction) / self.fraction if self.fraction > 0 else float("inf")

    def __str__(self) -> str:
        return (
            f"step {self.step:>5}/{self.steps}  loss {self.loss:.4f}  lr {self.lr:.2e}  "
            f"{format_rate(self.tokens_per_second)} tokens/s  ETA {format_duration(self.eta)}"
        )


class Display:
    """What the training loop reports to. This one prints lines; silent unless ``is_main``."""

    def __init__(self, *, is_main: bool = True) -> None:
        self._is_main = is_main

    def update(self, status: Status) -> None:
        """Called with each record of a step."""
        self.message(str(status))

    def message(self, text: str) -> None:
        """Called with each other line."""
        if self._is_main:
            print(text, flush=True)


def format_duration(seconds: float) -> str:
    """``75.2`` -> ``1:15``, ``4000`` -> ``1:06:40``."""
    if seconds == float("inf"):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_rate(per_second: float) -> str:
    """``31234.5`` -> ``31.2k``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{suffix}"
    return f"{per_second:.0f}"
