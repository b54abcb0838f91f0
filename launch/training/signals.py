"""Turns Ctrl-C and SIGTERM into a request that the training loop checks between steps.

If one rank stopped alone, the others would wait for it in a collective. A signal therefore only sets a flag. Ranks
exchange the flag together with the loss, and all stop after the same step.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["EXIT_INTERRUPTED", "StopRequest", "stop_on_signals"]

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM, as shells report SIGINT."""

_INSIST_AFTER = 3.0  # seconds; a terminal and torchrun both deliver the first Ctrl-C, milliseconds apart


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.signal_name = ""
        """Name of the first signal received."""

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return self._since is not None

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler. A second Ctrl-C a few seconds later raises ``KeyboardInterrupt``."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self.signal_name = signal.Signals(signum).name
        elif signum == signal.SIGINT and now - self._since > _INSIST_AFTER:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """In this context SIGINT and SIGTERM set the flag; afterwards the old handlers are restored. Main thread only."""
    stop = StopRequest()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
