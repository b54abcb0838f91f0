"""Turns a failed collective into a report: who waited for what and how long, and which ranks are gone.

gloo    A wait raises when a connection is closed, or after the group's timeout. gloo closes all of a group's
        connections when one wait times out; a rank that fails for another reason closes them the same way here, so
        that all ranks fail together instead of one after the other, each when the last one's process has ended.
        A rank that takes another number of steps and is in a collective of its own ends alike: both wait until the
        timeout, or gloo finds that sizes differ and ends that rank's process by SIGABRT. Collectives of one group that
        happen to agree in kind and size are mixed up unseen: ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` compares each one.
NCCL    Waits order streams and raise nothing. A thread of torch's, the watchdog, sees a communicator's error or a
        collective's timeout, logs it and by default ends the process (``TORCH_NCCL_ASYNC_ERROR_HANDLING``). Only what
        NCCL raises while a collective is being launched is reported from here. Which collective each rank had reached
        is in the flight recorder's dumps: ``TORCH_NCCL_DUMP_ON_TIMEOUT=1`` with ``TORCH_NCCL_TRACE_BUFFER_SIZE`` above
        0. (torch's documentation: ProcessGroupNCCL environment variables; Flight Recorder for debugging stuck jobs.)
"""

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ..torch_internals import default_store
from .rank_fates import Process, RankFates, announce, look_up

__all__ = ["CollectiveError", "FailureReporter", "Watch"]

_CLOSING_TAG = 0x6D617467  # of messages that nobody sends


class CollectiveError(RuntimeError):
    """A collective failed, because a rank is gone or the ranks have gone different ways.

    rank    this one, in the default group
    gone    ranks whose process has ended without a word
    silent  other ranks that have not said that they failed as well
    """

    def __init__(self, report: str, *, rank: int = 0, gone: Sequence[int] = (), silent: Sequence[int] = ()) -> None:
        super().__init__(report)
        self.rank = rank
        self.gone = tuple(gone)
        self.silent = tuple(silent)


class FailureReporter:
    """What one wrapper needs in order to say why its collectives fail. Costs one key of the store."""

    def __init__(self) -> None:
        self.groups: Iterable[dist.ProcessGroup] = ()
        """Those that the wrapper communicates over."""
        self._first: CollectiveError | None = None
        self._known: dict[int, Process] = {}
        self.active = dist.is_available() and dist.is_initialized() and _on_processes()
        """False without ``torch.distributed``, and on simulated ranks, whose errors tell everything themselves."""
        if self.active:
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            self._store = default_store()
            with suppress(RuntimeError):  # whoever needs the store itself says that it is out of reach
                announce(self._store, self._rank)

    def remember_rank_0(self) -> None:
        """Find out where rank 0 runs, which often serves the store: it cannot be asked for once that is gone."""
        if self.active:
            process = look_up(self._store, 0)
            if process is not None:
                self._known[0] = process

    def watch(self, what: str, bucket: str | None = None, num_params: int = 0) -> "Watch":
        """A ``with`` block around a collective, or the wait for it, whose failure is to be reported.

        what        name of the collective, or what it is for
        bucket      name of the bucket that it reduces or gathers
        num_params  parameters of that bucket
        """
        return Watch(self, what, bucket, num_params)

    def report(self, error: RuntimeError, waited_for: str, seconds: float) -> CollectiveError:
        """The error to raise from ``error``. Asking for the other ranks takes up to a few seconds.

        Later failures follow from the first, which is reported again.
        """
        if self._first is not None:
            return self._first
        for group in self.groups:
            _close_connections(group)
        fates = RankFates(self._store, self._rank, self._world_size, waited_for, self._known)
        fates.inquire()
        lines = [
            f"rank {self._rank} waited {seconds:.2f} s for {waited_for}, which failed: {_in_short(error)}",
            *fates.lines(),
        ]
        self._first = CollectiveError("\n  ".join(lines), rank=self._rank, gone=fates.gone, silent=fates.silent)
        return self._first


class Watch:
    """See ``FailureReporter.watch``. Texts are made when something fails."""

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
    """Close all of a gloo group's connections: whoever waits for this rank, or will, fails at once.

    gloo has no call for it, but does so when a wait times out. So wait a millisecond for a message that nobody sends.
    Where the connection to a rank is closed already that raises at once and closes no other: then try the next rank.
    """
    if "gloo" not in _backends(group):
        return
    nothing = torch.empty(1)
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], rank, _CLOSING_TAG).wait(timedelta(milliseconds=1))


def _backends(group: dist.ProcessGroup | None) -> str:
    """Names by device, such as ``"cpu:gloo,cuda:nccl"``. ``get_backend`` knows none where torch chose them."""
    return str(dist.get_backend_config(group))


def _in_short(error: BaseException) -> str:
    """The first sentence of an error, without the place in torch's source."""
    text = re.sub(r"^\[[^]]*\] ?", "", str(error).partition("\n")[0])
    return text.partition(". ")[0] or type(error).__name__
