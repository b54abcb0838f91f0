"""Who is told what an iteration does: nobody, or a ``Timeline`` that records it.

Forwards, backwards, reductions and gathers report to one observer. The code that reports is the same in both cases.
"""

from collections.abc import Callable

from .in_flight import InFlight

__all__ = ["UNOBSERVED", "Observer"]


class Observer:
    """Is told, and does nothing with it."""

    recording = False
    """Whether it wants to know of backwards under wrappers that have no other reason to watch for them."""

    def forward_started(self) -> None:
        """A forward of the wrapper begins; the outermost one counts."""

    def forward_ended(self) -> None:
        """That forward ended, or failed."""

    def backward_started(self) -> None:
        """The outermost backward reached the wrapper's outputs."""

    def backward_ended(self, synced: bool) -> None:
        """The outermost backward ended. synced: it was no ``no_sync`` microbatch."""

    def bucket_ready(self, bucket: str) -> None:
        """The last contribution to a bucket's gradients is in."""

    def launch(
        self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
    ) -> InFlight:
        """Launch a collective by ``start``; returns the handle to wait for.

        collective  ``all_gather`` is a gather of parameters; any other one reduces gradients
        nbytes      of the bucket's parameters or gradients
        """
        return start()

    def wait(self, bucket: str, collective: str, order: Callable[[], None]) -> None:
        """Order the current stream behind a collective by ``order``."""
        order()


UNOBSERVED = Observer()
