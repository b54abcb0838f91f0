"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere; rank 0 only."""

import time
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

__all__ = ["Display", "Status", "make_display"]

_SECONDS_BETWEEN_LINES = 10.0


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
            f"loss {self.loss:.4f}  lr {self.lr:.2e}  {format_rate(self.tokens_per_second)} tokens/s  "
            f"ETA {format_duration(self.eta)}"
        )


class Display(Protocol):
    """What the training loop reports to."""

    def update(self, status: Status) -> None:
        """Called after each step."""

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def close(self) -> None:
        """Called at the end of the run."""


def make_display(console: Console | None = None, *, is_main: bool = True) -> Display:
    """A live bar on a terminal, plain lines elsewhere; a silent display on ranks other than 0."""
    if not is_main:
        return _Silent()
    console = console or Console()
    return _Live(console) if console.is_terminal else _Lines(console)


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


class _Silent:
    def update(self, status: Status) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """Prints a line at the first step and then one every few seconds, so that logs stay short."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = float("-inf")

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES or status.fraction >= 1.0:
            self._last = now
            self.message(f"step {status.step:>5}/{status.steps}  {status}")

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
        self._console.file.flush()

    def close(self) -> None:
        pass


class _Live:
    """A bar that follows the run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
        )
        self._task = self._progress.add_task("train", total=1.0, step=0, status="")
        self._progress.start()

    def update(self, status: Status) -> None:
        self._progress.update(self._task, completed=status.fraction, step=status.step, status=str(status))

    def message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        self._progress.stop()
