"""``Observer``: forwards, backwards, reductions and gathers report to it. ``Timeline`` is the observer that records."""

from collections.abc import Callable

from .in_flight import InFlight

__all__ = ["UNOBSERVED", "Observer"]


class Observer:
    """Ignores all reports."""

    recording = False
    """Whether ``backward_started`` must be called under wrappers that need no hook for it otherwise."""

    def forward_started(self) -> None:
        """A forward of the wrapper begins. Forwards may nest."""

    def forward_ended(self) -> None:
        """The innermost running forward ended, or raised."""

    def backward_started(self) -> None:
        """The outermost backward reached the wrapper's outputs."""

    def backward_ended(self, synced: bool) -> None:
        """The outermost backward ended. synced: it ran outside ``no_sync``."""

    def bucket_ready(self, bucket: str) -> None:
        """The last contribution to a bucket's gradients is in."""

    def launch(
        self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
    ) -> InFlight:
        """Launch a collective by calling ``start``; returns its handle.

        collective  its name: ``all_gather`` gathers parameters, every other collective reduces gradients
        nbytes      returns the bytes of the bucket on the wire
        """
        return start()

    def wait(self, bucket: str, collective: str, order: Callable[[], None]) -> None:
        """Order the current stream behind a collective by calling ``order``."""
        order()


UNOBSERVED = Observer()
