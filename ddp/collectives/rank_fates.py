"""After a failure: which other ranks have failed too, by what they write to the default group's store.

Every rank writes its host and process id to the store when it wraps its model. A rank that fails adds what it waited
for, and then waits ``PATIENCE`` seconds for the other ranks to do the same.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from threading import Thread

from torch.distributed import Store  # type: ignore[attr-defined]  # public, and missing in its __all__

__all__ = ["announce", "ask_others"]

PATIENCE = 3.0
"""Seconds that a failed rank waits for the reports of the other ranks."""
_POLL = 0.02
_KEYS = "maingrad/failures"
_SHOWN = 8  # most ranks in one line of a report


def announce(store: Store, rank: int) -> None:
    """Write this rank's process to the store."""
    store.set(f"{_KEYS}/process/{rank}", f"process {os.getpid()} on {socket.gethostname()}")


def ask_others(store: Store, rank: int, world_size: int, waited_for: str) -> tuple[list[int], list[str]]:
    """The other ranks without a report, and lines for an error: which ranks are silent, and what others waited for.

    Reports this rank's own failure. Takes up to ``2 * PATIENCE`` seconds.
    """
    silent = [other for other in range(world_size) if other != rank]
    reported: dict[int, str] = {}
    processes: dict[int, str] = {}
    trouble: str | None = "it does not answer"

    def read(what: str, ranks: Sequence[int]) -> dict[int, str]:
        keys = {other: f"{_KEYS}/{what}/{other}" for other in ranks}
        return {other: bytes(store.get(key)).decode() for other, key in keys.items() if store.check([key])}

    def ask() -> None:
        nonlocal trouble
        try:
            store.set(f"{_KEYS}/waited_for/{rank}", waited_for)
            deadline = time.monotonic() + PATIENCE
            while silent and time.monotonic() < deadline:
                reported.update(read("waited_for", silent))
                silent[:] = [other for other in silent if other not in reported]
                time.sleep(_POLL)
            processes.update(read("process", silent[:_SHOWN]))
            # Rank 0 may serve the store, so it stays until the other ranks have read the reports.
            num_done = store.add(f"{_KEYS}/done", 1)
            while rank == 0 and num_done <= len(reported) and time.monotonic() < deadline + 0.5:
                time.sleep(_POLL)
                num_done = store.add(f"{_KEYS}/done", 0)
            trouble = None
        except RuntimeError as error:
            trouble = str(error).partition("\n")[0]

    # A thread, because a call to the store may hang.
    thread = Thread(target=ask, name="maingrad-failure-report", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    lines = []
    if trouble is not None:
        lines.append(
            f"the store, through which ranks tell each other, is out of reach ({trouble}): look whether the process "
            f"that serves it has ended (rank 0, where no launcher does)"
        )
    elif silent:
        named = _listed({other: f"({processes.get(other, 'has wrapped no model')})" for other in silent})
        lines.append(
            f"silent for {PATIENCE:g} s: {named}: look whether it has ended, waits elsewhere, or takes another number "
            f"of steps"
        )
    same = {other: "" for other, what in reported.items() if what == waited_for}
    elsewhere = {other: f"in {what}" for other, what in reported.items() if other not in same}
    lines += [f"failed in the same: {_listed(same)}"] if same else []
    lines += [f"failed elsewhere: {_listed(elsewhere)}"] if elsewhere else []
    return silent, lines


def _listed(ranks: Mapping[int, str]) -> str:
    shown = [f"rank {rank} {ranks[rank]}".rstrip() for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
