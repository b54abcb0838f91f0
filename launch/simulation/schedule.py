"""Runs one rank's thread at a time: the baton, its seeded order, and the detection of deadlocks.

A rank gives the baton away only in `Scheduler.pass_baton` and `Scheduler.wait`. The thread that holds the baton takes
all decisions, so no data needs a lock. Each rank has one lock, on which its thread sleeps until it gets the baton.
"""

import contextvars
import gc
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from types import FrameType
from typing import Any, Protocol

from ...kernels.compat import private_name
from .state import ProcessState, ThreadState

__all__ = ["Scheduler", "SimulatedDeadlockError", "SimulatedRank", "Waitable", "current_rank"]

_MAX_IDLE_POLLS = 1000
"""Consecutive polls per rank, without a launch or a finish in between, that count as a deadlock."""

_ensure_cuda_guard: Callable[[], None] = private_name(
    "torch._C._ensureCUDADeviceGuardSet",
    loss="on torch 2.11 without a GPU, fake tensors of a simulated rank can crash the process",
    fallback=lambda: None,
)
"""Set torch's stand-in for a missing CUDA, which fake tensors need. torch 2.11 frees it with the thread that set it and
keeps the pointer: the thread that outlives the ranks must be the first to set it."""


class SimulatedDeadlockError(RuntimeError):
    """No simulated rank can go on, or one waits for a finished rank. The message says which rank waits for what."""


class _Stopped(BaseException):
    """Unwinds the other ranks once one has failed; not an Exception, so that user code does not catch it."""


class Waitable(Protocol):
    """Something a rank can wait for."""

    @property
    def done(self) -> bool: ...

    def describe(self) -> str:
        """The name of what is waited for, for messages."""
        ...

    def missing(self) -> Sequence[int]:
        """The ranks that must all still act before the wait can end; empty where any one rank can end it."""
        ...


class SimulatedRank:
    """One rank: its thread, and what it waits for."""

    def __init__(self, index: int, state: ProcessState) -> None:
        self.index = index
        self.state = state
        self.result: Any = None
        self.finished = False
        self.waiting_for: Waitable | None = None
        self.deliveries: deque[Callable[[], None]] = deque()
        """Callbacks that must run on this rank's own thread; a waiting rank wakes up to run them."""
        self.thread: threading.Thread | None = None
        self.turn = threading.Lock()
        self.turn.acquire()

    def can_go_on(self) -> bool:
        return not self.finished and (self.waiting_for is None or self.waiting_for.done or bool(self.deliveries))


class _Here(threading.local):
    rank: SimulatedRank | None = None


_here = _Here()


def current_rank() -> SimulatedRank | None:
    """The simulated rank whose thread this is, or None."""
    return _here.rank


class Scheduler:
    """Runs one function on every rank and passes the baton between them.

    seed      determines the order in which ranks go on
    order     determines it instead: called with the ranks that can go on (ascending), returns one of them
    schedule  receives (rank, event) for every start, launch, wait and finish
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        order: Callable[[tuple[int, ...]], int] | None,
        schedule: MutableSequence[tuple[int, str]] | None,
    ) -> None:
        self._start_state = ProcessState.capture()
        self._thread_state = ThreadState.capture()
        self.ranks = [SimulatedRank(index, self._start_state) for index in range(world_size)]
        self.schedule = schedule
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self._order = order or random.Random(seed).choice
        self._idle_polls = 0
        self._stopped = False
        # One copy per rank: the other ranks do not see a context variable that one rank sets.
        self._context = contextvars.copy_context()
        self._body: Callable[[int], Any] = lambda rank: None
        self._all_finished = threading.Lock()

    def run(self, body: Callable[[int], Any]) -> None:
        """Call ``body(rank)`` on every rank; returns when all threads have ended. `failure` says what went wrong."""
        self._body = body
        _ensure_cuda_guard()
        self._all_finished.acquire()
        try:
            self._resume(self.ranks[self._choose()])
            self._all_finished.acquire()
        except BaseException:  # Ctrl-C: the ranks unwind at their next collective, then the exception is raised again.
            self._stopped = True
            if any(rank.thread is not None for rank in self.ranks):
                self._all_finished.acquire()
            raise
        finally:
            for rank in self.ranks:
                if rank.thread is not None:
                    rank.thread.join()
            self._start_state.restore()

    def record(self, rank: SimulatedRank, event: str) -> None:
        if self.schedule is not None:
            self.schedule.append((rank.index, event))

    def pass_baton(self, rank: SimulatedRank) -> None:
        """Give the baton to any rank that can go on, which may be this rank."""
        self.raise_if_stopped()
        self._idle_polls = 0
        self._hand_on(rank)

    def wait(self, rank: SimulatedRank, pending: Waitable) -> None:
        """Return once ``pending`` is done; other ranks run meanwhile."""
        self.raise_if_stopped()
        if not pending.done:
            self.record(rank, f"wait {pending.describe()}")
        while not pending.done:
            rank.waiting_for = pending
            self._raise_if_hopeless(rank)
            self._hand_on(rank)

    def poll(self, rank: SimulatedRank, pending: Waitable) -> bool:
        """Whether ``pending`` is done. Passes the baton first, so that a polling loop does not starve other ranks."""
        self.raise_if_stopped()
        if not pending.done:
            self._idle_polls += 1
            if self._idle_polls > _MAX_IDLE_POLLS * len(self.ranks):
                rank.waiting_for = pending
                self._raise_deadlock(f"rank {rank.index} keeps asking is_completed() and nothing else happens")
            self._hand_on(rank)
        return pending.done

    def fail(self, rank: SimulatedRank, error: BaseException) -> None:
        """Stop all ranks because of ``error`` on ``rank``; the first failure is the one reported."""
        if not self._stopped:
            self.failure, self.failed_rank = error, rank.index
            self._stopped = True

    def raise_if_stopped(self) -> None:
        if self._stopped:
            raise _Stopped

    def _choose(self) -> int:
        runnable = tuple(rank.index for rank in self.ranks if rank.can_go_on())
        if not runnable:
            self._raise_deadlock("no rank can go on")
        chosen = self._order(runnable)
        if chosen not in runnable:
            raise ValueError(f"order returned {chosen!r}: it must return one of the ranks that can go on, {runnable}")
        return chosen

    def _hand_on(self, rank: SimulatedRank) -> None:
        chosen = self.ranks[self._choose()]
        if chosen is not rank:
            rank.state = ProcessState.capture()
            self._resume(chosen)
            rank.turn.acquire()
            rank.state.restore()
        rank.waiting_for = None
        self.raise_if_stopped()
        self._deliver(rank)

    def _deliver(self, rank: SimulatedRank) -> None:
        while rank.deliveries:
            rank.deliveries.popleft()()

    def _resume(self, rank: SimulatedRank) -> None:
        if rank.thread is None:
            run = self._context.copy().run
            rank.thread = threading.Thread(
                target=run, args=(self._run_rank, rank), name=f"simulated-rank-{rank.index}", daemon=True
            )
            try:
                rank.thread.start()
            except BaseException:
                rank.thread = None
                raise
        else:
            rank.turn.release()

    def _run_rank(self, rank: SimulatedRank) -> None:
        _here.rank = rank
        try:
            rank.state.restore()
            self.record(rank, "start")
            rank.result = self._thread_state.run(lambda: self._body(rank.index))
            self._deliver(rank)
            self.record(rank, "finish")
        except _Stopped:
            pass
        except BaseException as error:
            self.fail(rank, error)
        finally:
            self._finish(rank)

    def _finish(self, rank: SimulatedRank) -> None:
        rank.finished = True
        self._idle_polls = 0
        following: SimulatedRank | None = None
        if not self._stopped and not all(other.finished for other in self.ranks):
            try:
                for other in self.ranks:
                    self._raise_if_hopeless(other)
                following = self.ranks[self._choose()]
            except _Stopped:
                pass
            except BaseException as error:  # from the caller's order function
                self.fail(rank, error)
        if self._stopped:
            following = next((r for r in self.ranks if r.thread is not None and not r.finished), None)
        if following is None:
            self._all_finished.release()
        else:
            self._resume(following)

    def _raise_if_hopeless(self, rank: SimulatedRank) -> None:
        pending = rank.waiting_for
        if rank.finished or rank.can_go_on() or pending is None:
            return
        if any(self.ranks[other].finished for other in pending.missing()):
            self._raise_deadlock(f"rank {rank.index} waits for a rank that has finished")

    def _raise_deadlock(self, reason: str) -> None:
        lines = [f"simulated ranks are deadlocked: {reason}", *map(self._describe_rank, self.ranks)]
        self._stopped = True
        self.failure = SimulatedDeadlockError("\n  ".join(lines))
        raise _Stopped

    def _describe_rank(self, rank: SimulatedRank) -> str:
        if rank.finished:
            return f"rank {rank.index} has finished"
        if rank.thread is None:
            return f"rank {rank.index} has not started"
        pending = rank.waiting_for
        if pending is None or pending.done:
            return f"rank {rank.index} can go on"
        missing = [f"{other} (finished)" if self.ranks[other].finished else str(other) for other in pending.missing()]
        return (
            f"rank {rank.index} waits for {pending.describe()}; missing ranks: {', '.join(missing) or 'any'}; "
            f"at {_user_line(rank.thread)}"
        )


def _user_line(thread: threading.Thread) -> str:
    """File, line and function of the innermost frame of ``thread`` that is neither torch's nor the simulator's."""
    frame = _frame_of(thread)
    simulator = f"{__package__}."
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", simulator, "threading", "contextlib")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """The innermost frame of ``thread``.

    Before Python 3.12 a garbage collection may start while ``sys._current_frames`` holds its lock. A finalizer that
    enters Python from C++ then waits for this lock for ever (python/cpython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()
