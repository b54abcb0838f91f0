"""What became of the other ranks, as far as the store of the default group and the machine can tell.

Every rank leaves in the store where its process runs. One that fails adds what it waited for, and waits a little for
the others to do the same. Of those that do not, processes on this machine are asked for: they have ended, or run on.
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

__all__ = ["Process", "RankFates", "announce", "look_up"]

PATIENCE = 3.0
"""Seconds in which the other ranks may say that they failed as well."""
_POLL = 0.02
_KEYS = "maingrad/failures"
_SHOWN = 8  # ranks that a line lists


def announce(store: Store, rank: int) -> None:
    """Leave word of this rank's process."""
    store.set(f"{_KEYS}/process/{rank}", json.dumps(_own_process()))


def look_up(store: Store, rank: int) -> "Process | None":
    """The process of a rank that has announced itself."""
    text = _read(store, f"process/{rank}")
    return None if text is None else Process(*json.loads(text))


class RankFates:
    """The inquiry of a rank that waited for something in vain.

    known   processes that were looked up before

    gone    ranks whose process has ended without a word
    silent  other ranks that have not said that they failed as well
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
        """Tell and ask; takes up to twice ``PATIENCE``."""
        # In a thread, since a store whose host hangs keeps its clients waiting.
        thread = Thread(target=self._run, name="maingrad-failure-report", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)

    def lines(self) -> list[str]:
        """One line for each kind of fate."""
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
            # Rank 0 serves the store where the launcher does not, and has ended most likely, or is about to.
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
            # In this order: a rank that tells and then ends is not gone without a word.
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
        # Where rank 0 serves the store it stays until the others have read what it says.
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
    """A process. Only Linux tells of those that are not our children."""

    host: str
    pid: int
    started: str
    """Clock ticks since the machine's start: pids are used again."""
    machine: str
    """This start of the machine, and the container whose pid it is; empty where nothing can be known."""

    @property
    def is_here(self) -> bool:
        """Whether this process can see it."""
        return self.machine != "" and self.machine == _machine()

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        if not self.is_here:
            return False
        state, started = _state(self.pid)
        return state in ("Z", "X", "") or started != self.started  # a zombie, dead, or another process by now


def _read(store: Store, key: str) -> str | None:
    key = f"{_KEYS}/{key}"
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _own_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), pid, _state(pid)[1], _machine())


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """Linux's letter for a process's state, and when it started; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _listed(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    shown = [describe(rank) for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
