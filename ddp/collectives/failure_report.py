"""Turns a failed collective into a report: which rank waited for what and how long, and what the other ranks say.

gloo    A wait raises when a connection is closed, or after the group's timeout. A rank that fails here closes all of
        its group's connections, so that all ranks fail at once. Ranks that take different numbers of steps wait for
        each other until the timeout; or gloo finds that sizes differ and ends the process by SIGABRT. Two different
        collectives of the same kind and size are mixed up without an error: ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` compares
        each one.
NCCL    A wait orders streams and raises nothing. torch's watchdog thread sees a communicator's error or a timeout, logs
        it, and by default ends the process (``TORCH_NCCL_ASYNC_ERROR_HANDLING``). This file reports only errors that
        NCCL raises while a collective is launched. The flight recorder's dumps show the last collective of each rank:
        set ``TORCH_NCCL_DUMP_ON_TIMEOUT=1`` and ``TORCH_NCCL_TRACE_BUFFER_SIZE`` above 0. (torch's documentation:
        ProcessGroupNCCL environment variables; Flight Recorder for debugging stuck jobs.)
"""

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ..torch_internals.distributed import default_store
from .rank_fates import announce, ask_others
from .rank_grid import RankGrid, all_groups

__all__ = ["CollectiveError", "FailureReporter", "Watch"]

_CLOSING_TAG = 0x6D617467  # tag of a message that nobody sends


class CollectiveError(RuntimeError):
    """A collective failed: a rank is gone, or the ranks called different collectives.

    rank    this rank, in the default group
    silent  ranks that have not reported a failure: they have ended, wait elsewhere, or take other numbers of steps
    """

    def __init__(self, report: str, *, rank: int = 0, silent: Sequence[int] = ()) -> None:
        super().__init__(report)
        self.rank = rank
        self.silent = tuple(silent)


class FailureReporter:
    """Reports why one wrapper's collectives fail. Each rank writes one key to the default group's store."""

    def __init__(self) -> None:
        self.grids: Iterable[RankGrid] = ()
        """The wrapper's ranks, whose groups are closed after a failure."""
        self._first: CollectiveError | None = None
        self.active = dist.is_available() and dist.is_initialized() and _on_processes() and default_store is not None
        """False without ``torch.distributed``, and on simulated ranks, whose own errors say everything."""
        if self.active:
            assert default_store is not None
            self._store = default_store()
            with suppress(RuntimeError):  # an unreachable store is reported when it is needed
                announce(self._store, dist.get_rank())

    def watch(self, what: str, bucket: str | None = None, num_params: int = 0) -> "Watch":
        """A ``with`` block around a collective or a wait: its failure is raised as a ``CollectiveError``.

        what        name of the collective, or its purpose
        bucket      name of the bucket that is reduced or gathered
        num_params  number of the bucket's parameters
        """
        return Watch(self, what, bucket, num_params)

    def report(self, error: RuntimeError, waited_for: str, seconds: float) -> CollectiveError:
        """The error to raise from ``error``. Asking the other ranks takes up to ``2 * PATIENCE`` seconds.

        Later failures follow from the first one, so the first report is returned again.
        """
        if self._first is not None:
            return self._first
        rank = dist.get_rank()
        for group in all_groups(self.grids):
            _close_connections(group)
        silent, lines = ask_others(self._store, rank, dist.get_world_size(), waited_for)
        own = f"rank {rank} waited {seconds:.2f} s for {waited_for}, which failed: {_in_short(error)}"
        self._first = CollectiveError("\n  ".join((own, *lines)), rank=rank, silent=silent)
        return self._first


class Watch:
    """See ``FailureReporter.watch``."""

    __slots__ = ("_bucket", "_num_params", "_reporter", "_since", "_what")

    def __init__(self, reporter: FailureReporter, what: str, bucket: str | None, num_params: int) -> None:
        self._reporter = reporter
        self._what = what
        self._bucket = bucket
        self._num_params = num_params

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # torch raises RuntimeError itself for gloo, and DistError, a subclass, for NCCL and stores.
        if self._reporter.active and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            waited_for = self._what
            if self._bucket is not None:
                noun = "parameter" if self._num_params == 1 else "parameters"
                waited_for += f" of {self._bucket}, {self._num_params} {noun}"
            raise self._reporter.report(error, waited_for, time.monotonic() - self._since) from error


def _on_processes() -> bool:
    return any(name in _backends(None) for name in ("gloo", "nccl"))


def _close_connections(group: dist.ProcessGroup) -> None:
    """Close all connections of a gloo group, so that every rank that waits for this one fails at once.

    gloo has no function for this, but a wait that times out closes them: so wait a millisecond for a message that
    nobody sends. If the connection to one rank is closed already, that wait raises at once and closes no other
    connection: so try every rank.
    """
    if "gloo" not in _backends(group):
        return
    nothing = torch.empty(1)
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], rank, _CLOSING_TAG).wait(timedelta(milliseconds=1))


def _backends(group: dist.ProcessGroup | None) -> str:
    """Backends by device, such as ``"cpu:gloo,cuda:nccl"``. ``get_backend`` has none where torch chose it."""
    return str(dist.get_backend_config(group))


def _in_short(error: BaseException) -> str:
    """The first sentence of an error, without torch's file and line."""
    text = re.sub(r"^\[[^]]*\] ?", "", str(error).partition("\n")[0])
    return text.partition(". ")[0] or type(error).__name__
