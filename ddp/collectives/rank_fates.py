"""After a failure: which other ranks have failed too, by what they write to the default group's store.

Every rank writes its host and process id to the store when it wraps its model. A rank that fails adds what it waited
for, and then waits ``PATIENCE`` seconds for the other ranks to do the same.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from threading import Thread

from torch.distributed import Store  # type: ignore[attr-defined]  # public, and missing in its __all__

__all__ = ["RankFates", "announce"]

PATIENCE = 3.0
"""Seconds that a failed rank waits for the reports of the other ranks."""
_POLL = 0.02
_KEYS = "maingrad/failures"
_SHOWN = 8  # most ranks in one line of a report


def announce(store: Store, rank: int) -> None:
    """Write this rank's process to the store."""
    store.set(f"{_KEYS}/process/{rank}", f"process {os.getpid()} on {socket.gethostname()}")


class RankFates:
    """The inquiry of a rank whose collective failed. After ``inquire``, ``silent`` are the ranks without a report."""

    def __init__(self, store: Store, rank: int, world_size: int, waited_for: str) -> None:
        self._store = store
        self._rank = rank
        self._waited_for = waited_for
        self._reported: dict[int, str] = {}
        self._processes: dict[int, str] = {}
        self._trouble: str | None = "it does not answer"
        self.silent = [other for other in range(world_size) if other != rank]

    def inquire(self) -> None:
        """Report this rank's failure and read the others' reports. Takes up to ``2 * PATIENCE`` seconds."""
        # A thread, because a call to the store may hang.
        thread = Thread(target=self._ask, name="maingrad-failure-report", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)

    def lines(self) -> list[str]:
        """The report: one line each for ranks that are silent, or failed."""
        lines = []
        if self._trouble is not None:
            lines.append(
                f"the store, through which ranks tell each other, is out of reach ({self._trouble}): look whether the "
                f"process that serves it has ended (rank 0, where no launcher does)"
            )
        elif self.silent:
            silent = _listed(self.silent, lambda rank: f"({self._processes.get(rank, 'has wrapped no model')})")
            lines.append(
                f"silent for {PATIENCE:g} s: {silent}: look whether it has ended, waits elsewhere, or takes another "
                f"number of steps"
            )
        same = [rank for rank, what in self._reported.items() if what == self._waited_for]
        if same:
            lines.append(f"failed in the same: {_listed(same, lambda _: '')}")
        other = [rank for rank in self._reported if rank not in same]
        if other:
            lines.append(f"failed elsewhere: {_listed(other, lambda rank: f'in {self._reported[rank]}')}")
        return lines

    def _ask(self) -> None:
        try:
            self._store.set(f"{_KEYS}/waited_for/{self._rank}", self._waited_for)
            deadline = time.monotonic() + PATIENCE
            while self.silent and time.monotonic() < deadline:
                self._reported |= self._read("waited_for", self.silent)
                self.silent = [rank for rank in self.silent if rank not in self._reported]
                time.sleep(_POLL)
            self._processes = self._read("process", self.silent[:_SHOWN])
            # Rank 0 may serve the store, so it stays until the other ranks have read the reports.
            num_done = self._store.add(f"{_KEYS}/done", 1)
            while self._rank == 0 and num_done <= len(self._reported) and time.monotonic() < deadline + 0.5:
                time.sleep(_POLL)
                num_done = self._store.add(f"{_KEYS}/done", 0)
            self._trouble = None
        except RuntimeError as error:
            self._trouble = str(error).partition("\n")[0]

    def _read(self, what: str, ranks: Sequence[int]) -> dict[int, str]:
        """What some of these ranks have written."""
        keys = {rank: f"{_KEYS}/{what}/{rank}" for rank in ranks}
        return {rank: bytes(self._store.get(key)).decode() for rank, key in keys.items() if self._store.check([key])}


def _listed(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    shown = [f"rank {rank} {describe(rank)}".rstrip() for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
