"""After a failure: what became of the other ranks, as far as the default group's store and this machine can tell.

Every rank writes its host and process id to the store. A rank that fails adds what it waited for, and then waits
``PATIENCE`` seconds for the other ranks to do the same. For a rank that adds nothing, this rank looks whether that
process still runs, if both are on one machine.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # public, and missing in its __all__

__all__ = ["Process", "RankFates", "announce", "look_up", "process_state"]

PATIENCE = 3.0
"""Seconds that a failed rank waits for the reports of the other ranks."""
_POLL = 0.02
_KEYS = "maingrad/failures"
_SHOWN = 8  # most ranks in one line of a report


def announce(store: Store, rank: int) -> None:
    """Write this rank's process to the store."""
    store.set(f"{_KEYS}/process/{rank}", json.dumps(_own_process()))


def look_up(store: Store, rank: int) -> "Process | None":
    """The process that ``rank`` has announced; None where it has announced none."""
    text = _read(store, f"process/{rank}")
    return None if text is None else Process(*json.loads(text))


class RankFates:
    """The inquiry of a rank whose collective failed.

    waited_for  the collective
    known       processes that were looked up before, by rank

    After ``inquire``: ``gone`` are ranks whose process has ended without a report, ``silent`` other ranks without one.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, waited_for: str, known: Mapping[int, "Process"]
    ) -> None:
        self._store = store
        self._rank = rank
        self._waited_for = waited_for
        self._unheard = [other for other in range(world_size) if other != rank]
        self._processes = dict(known)
        self._told: dict[int, str] = {}
        self._trouble: str | None = "it does not answer"
        self.gone: list[int] = []
        self.silent = list(self._unheard)

    def inquire(self) -> None:
        """Report this rank's failure and read the others' reports. Takes up to ``2 * PATIENCE`` seconds."""
        # A thread, because a call to the store may hang.
        thread = Thread(target=self._run, name="maingrad-failure-report", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)

    def lines(self) -> list[str]:
        """The report: one line each for ranks that are gone, silent, or failed."""
        lines = []
        if self.gone:
            lines.append(f"gone: {_listed(self.gone, self._describe_gone)}")
        if self._trouble is not None:
            lines.append(
                f"the store, through which ranks tell each other, is out of reach ({self._trouble}): of the others "
                f"nothing is known"
            )
        elif self.silent:
            lines.append(f"silent for {PATIENCE:g} s: {_listed(self.silent, self._describe_silent)}")
        same = [rank for rank, what in self._told.items() if what == self._waited_for]
        if same:
            lines.append(f"failed in the same: {_listed(same, lambda rank: f'rank {rank}')}")
        other = [rank for rank in self._told if rank not in same]
        if other:
            lines.append(f"failed elsewhere: {_listed(other, lambda rank: f'rank {rank} in {self._told[rank]}')}")
        return lines

    def _run(self) -> None:
        try:
            self._ask()
            self._trouble = None
        except RuntimeError as error:
            # Where the launcher serves no store rank 0 does, and rank 0 has most likely ended, or is about to.
            self._trouble = str(error).partition("\n")[0]
            deadline = time.monotonic() + PATIENCE
            while not self.gone and self._processes and time.monotonic() < deadline:
                self.gone = [rank for rank in self._unheard if rank in self._processes and self._has_ended(rank)]
                time.sleep(_POLL)
            self.silent = [rank for rank in self._unheard if rank not in self.gone]

    def _ask(self) -> None:
        self._store.set(f"{_KEYS}/waited_for/{self._rank}", self._waited_for)
        deadline = time.monotonic() + PATIENCE
        while True:
            # Look for ended processes before reading reports: a rank that reports and then ends is not gone.
            ended = [rank for rank in self._unheard if self._has_ended(rank)]
            for rank in self._unheard:
                what = _read(self._store, f"waited_for/{rank}")
                if what is not None:
                    self._told[rank] = what
            self._unheard = [rank for rank in self._unheard if rank not in self._told]
            self.gone = [rank for rank in ended if rank in self._unheard]
            self.silent = [rank for rank in self._unheard if rank not in ended]
            if not self.silent or time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        # Rank 0 may serve the store, so it stays until the other ranks have read the reports.
        num_done = self._store.add(f"{_KEYS}/done", 1)
        while self._rank == 0 and num_done <= len(self._told) and time.monotonic() < deadline + 0.5:
            time.sleep(_POLL)
            num_done = self._store.add(f"{_KEYS}/done", 0)

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._processes:
            process = look_up(self._store, rank)
            if process is None:
                return False
            self._processes[rank] = process
        return self._processes[rank].has_ended

    def _describe_gone(self, rank: int) -> str:
        process = self._processes[rank]
        return f"rank {rank} (process {process.pid} on {process.host} has ended)"

    def _describe_silent(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} (has wrapped no model)"
        where = f"process {process.pid} on {process.host}"
        if not process.is_here:
            return f"rank {rank} ({where}, which cannot be seen from here)"
        return f"rank {rank} ({where} runs: it waits elsewhere, or takes another number of steps)"


class Process(NamedTuple):
    """A rank's process. Only on Linux can this rank see whether it still runs."""

    host: str
    pid: int
    started: str
    """When the process started, in clock ticks since boot: tells a process from a later one with the same pid."""
    machine: str
    """Boot id and pid namespace: ``pid`` has a meaning only where both are equal. Empty outside of Linux."""

    @property
    def is_here(self) -> bool:
        """Whether this rank's process runs on the same machine and in the same pid namespace."""
        return self.machine != "" and self.machine == _machine()

    @property
    def has_ended(self) -> bool:
        """Whether the process has certainly ended."""
        if not self.is_here:
            return False
        state, started = process_state(self.pid)
        return state in ("Z", "X", "") or started != self.started  # zombie, dead, or a later process with this pid


def _read(store: Store, key: str) -> str | None:
    key = f"{_KEYS}/{key}"
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _own_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), pid, process_state(pid)[1], _machine())


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def process_state(entry: int | str) -> tuple[str, str]:
    """Linux's letter for a process's state, and its start in clock ticks; empty strings where there is no process.

    entry  process id, or a thread's folder below ``/proc``
    """
    try:
        fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _listed(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    shown = [describe(rank) for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
