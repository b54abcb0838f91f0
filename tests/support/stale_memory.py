"""Memory that holds NaN until somebody writes it: every ``torch.empty``, and the pool's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from maingrad.ddp.buckets.buffer import ReleasableBuffer

__all__ = ["stale_empty", "stale_memory"]


@contextmanager
def stale_empty() -> Iterator[None]:
    """Every ``torch.empty`` holds NaN."""
    torch.use_deterministic_algorithms(True)  # which fills uninitialised memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def stale_memory() -> Iterator[list[int]]:
    """Everything that is taken holds NaN, and so does every ``torch.empty``; yields the sizes of what was taken."""
    taken: list[int] = []
    take = ReleasableBuffer.take

    def take_stale(self: ReleasableBuffer) -> None:
        fresh = not self.resident
        take(self)
        if fresh:
            taken.append(self.data.numel())
            self.data.data.fill_(torch.nan)

    ReleasableBuffer.take = take_stale  # type: ignore[method-assign]
    try:
        with stale_empty():
            yield taken
    finally:
        ReleasableBuffer.take = take  # type: ignore[method-assign]
