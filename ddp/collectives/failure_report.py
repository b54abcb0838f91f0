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
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, and missing in its __all__

from ..torch_internals.distributed import default_store
from .rank_grid import RankGrid, own_rank

__all__ = [
    "CollectiveError",
    "FailureReporter",
    "Watch",
    "ask_others",
    "gather",
    "run_and_gather",
    "run_on_all_ranks",
    "with_more_text",
]

PATIENCE = 3.0
"""Seconds that a failed rank waits for the reports of the other ranks."""
_POLL = 0.02
_GRACE = 0.5
"""Seconds that rank 0, which may serve the store, stays for the others to read the last report."""
_KEYS = "maingrad/failures"
_SHOWN = 8  # most ranks in one line of a report
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
    """Reports why one wrapper's collectives fail: ranks tell each other through the default group's store."""

    def __init__(self) -> None:
        self.grids: Iterable[RankGrid] = ()
        """The wrapper's ranks, whose groups are closed after a failure."""
        self._first: CollectiveError | None = None
        self.active = False
        """False without ``torch.distributed``, and on simulated ranks, whose own errors say everything."""
        if default_store is not None and dist.is_initialized() and re.search("gloo|nccl", _backends(None)):
            self.active = True
            self._store = default_store()

    def watch(self, what: str, bucket: str | None = None) -> "Watch":
        """A ``with`` block around a collective or a wait: its failure is raised as a ``CollectiveError``.

        what    name of the collective, or its purpose
        bucket  name of the bucket that is reduced or gathered
        """
        return Watch(self, what, bucket)

    def report(self, error: RuntimeError, waited_for: str, seconds: float) -> CollectiveError:
        """The error to raise from ``error``. Asking the other ranks takes up to ``2 * PATIENCE`` seconds.

        Later failures follow from the first one, so the first report is returned again.
        """
        if self._first is not None:
            return self._first
        rank = dist.get_rank()
        for group in {id(group): group for grid in self.grids for group in grid[:3] if group is not None}.values():
            _close_connections(group)
        silent, lines = ask_others(self._store, rank, dist.get_world_size(), waited_for)
        own = f"rank {rank} waited {seconds:.2f} s for {waited_for}, which failed: {_first_line(error)}"
        self._first = CollectiveError("\n  ".join((own, *lines)), rank=rank, silent=silent)
        return self._first


class Watch:
    """See ``FailureReporter.watch``."""

    __slots__ = ("_bucket", "_reporter", "_since", "_what")

    def __init__(self, reporter: FailureReporter, what: str, bucket: str | None) -> None:
        self._reporter, self._what, self._bucket = reporter, what, bucket

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # torch raises RuntimeError itself for gloo, and DistError, a subclass, for NCCL and stores.
        if self._reporter.active and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            waited_for = self._what if self._bucket is None else f"{self._what} of {self._bucket}"
            raise self._reporter.report(error, waited_for, time.monotonic() - self._since) from error


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


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# ---- The other ranks' fates. A rank that fails writes to the store what it waited for, and then waits ``PATIENCE``
# ---- seconds for the others to do the same.


def ask_others(store: Store, rank: int, world_size: int, waited_for: str) -> tuple[list[int], list[str]]:
    """The other ranks without a report, and lines for an error: which ranks are silent, and what others waited for.

    Reports this rank's own failure. Takes ``PATIENCE`` seconds at most, and twice as long where the store is mute.
    """
    keys = {other: f"{_KEYS}/{other}" for other in range(world_size) if other != rank}
    answers: dict[int, str] = {}
    trouble: list[str] = ["it does not answer"]

    def ask() -> None:
        try:
            store.set(f"{_KEYS}/{rank}", waited_for)
            deadline = time.monotonic() + PATIENCE
            while len(answers) < len(keys) and time.monotonic() < deadline:
                for other, key in keys.items():
                    if other not in answers and store.check([key]):
                        answers[other] = bytes(store.get(key)).decode()
                time.sleep(_POLL)
            if rank == 0:
                time.sleep(_GRACE)
            trouble.clear()
        except RuntimeError as error:
            trouble[:] = [_first_line(error)]

    # A thread, because a store whose host is stopped or cut off never answers, and its calls have no timeout.
    asking = Thread(target=ask, name="maingrad-failure-report", daemon=True)
    asking.start()
    asking.join(2 * PATIENCE + _GRACE)
    reported = dict(answers)
    lines = [
        f"the store, through which ranks tell each other, is out of reach ({each}): look whether the process that "
        f"serves it has ended (rank 0, where no launcher does)"
        for each in trouble
    ]
    silent = [other for other in keys if other not in reported]
    if silent and not lines:
        named = _listed([f"rank {other}" for other in silent])
        lines.append(
            f"silent for {PATIENCE:g} s: {named}: look whether it has ended, waits elsewhere, or takes another number "
            f"of steps"
        )
    failed = (f"rank {other}" + ("" if what == waited_for else f" in {what}") for other, what in reported.items())
    if reported:
        lines.append(f"failed too: {_listed(sorted(failed))}")
    return silent, lines


def _listed(named: Sequence[str]) -> str:
    return ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")


# ---- Agreement. A check may fail on some ranks only: a damaged file, a parameter that differs. Without agreement the
# ---- other ranks would enter the next collective and wait there for the ranks that raised.

T = TypeVar("T")
U = TypeVar("U")

_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)
"""Classes of errors that other ranks raise too. An error of any other class becomes a ``RuntimeError`` there."""


def gather(value: T, axes: Iterable[dist.ProcessGroup], failures: FailureReporter | None, what: str) -> dict[int, T]:
    """All-gather of Python objects over a grid: every rank's value, by rank, in the same order on all ranks.

    axes      the grid's groups: inside an instance, then across instances
    failures  names the rank in the ``CollectiveError`` that is raised where a rank is gone
    what      the value, for that error
    """
    values = {own_rank(): value}
    with failures.watch(what) if failures is not None else nullcontext():
        for group in axes:
            parts: list[dict[int, T]] = [{}] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = {rank: each for part in parts for rank, each in part.items()}
    return values


def run_on_all_ranks(
    action: Callable[[], T], axes: Iterable[dist.ProcessGroup], failures: FailureReporter | None, what: str
) -> T:
    """Run ``action`` on every rank. If it raises on some ranks, all ranks raise the first such rank's error.

    what  the action, for the ``CollectiveError`` of ranks that get no answer; ``axes``, ``failures`` as in ``gather``
    """
    return run_and_gather(action, lambda _: None, axes, failures, what)[0]


def run_and_gather(
    action: Callable[[], T],
    telling: Callable[[T], U],
    axes: Iterable[dist.ProcessGroup],
    failures: FailureReporter | None,
    what: str,
) -> tuple[T, list[U]]:
    """``run_on_all_ranks``, and an all-gather of what each rank tells about its result, in the same order on all ranks.

    telling  called with ``action``'s result; returns the object that the other ranks get
    """
    axes = list(axes)
    if not axes:
        result = action()
        return result, [telling(result)]
    result, told = cast(T, None), cast(U, None)
    cause: Exception | None = None
    mine: tuple[int, str] | None = None
    try:
        result = action()
        told = telling(result)
    except Exception as error:
        mine, cause = (_kind_of(error), str(error) or type(error).__name__), error
    answers = gather((mine, told), axes, failures, f"word from all ranks after {what}")
    raised = {rank: failure for rank, (failure, _) in answers.items() if failure is not None}
    if raised:
        rank, (kind, text) = next(iter(raised.items()))
        if len(raised) < len(answers) or len(set(raised.values())) > 1:
            text += f" (on rank {rank})"
        raise _KINDS[kind](text) from cause
    return result, [each for _, each in answers.values()]


def _kind_of(error: BaseException) -> int:
    return next((index for index, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)


def with_more_text(error: BaseException, more: str) -> BaseException:
    """``error`` with the text ``more`` added, as an error of the same class. ``KeyboardInterrupt`` stays as it is."""
    if isinstance(error, CollectiveError):
        report = f"{error}\n  {more.lstrip('; ')}"
        return CollectiveError(report, rank=error.rank, silent=error.silent)
    return _KINDS[_kind_of(error)](f"{error}{more}") if isinstance(error, Exception) else error
