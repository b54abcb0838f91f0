"""Simulates N ranks of torch.distributed as threads of one process. Exactly one thread runs at a time.

    def train(steps):
        rank = torch.distributed.get_rank()  # the default group exists already
        ...
        return weights

    results = simulate(train, 4, 20, seed=1)  # a list: what train(20) returned on each rank

A thread switch happens only inside communication (collectives, point-to-point, waits). ``seed`` decides which rank runs
next: a race replays from its seed, and another seed tries another order. ``collectives.py`` documents the arithmetic.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...kernels.compat import private_name, raise_where_absent
from .group import BACKEND, SimulatedProcessGroup
from .meeting import CollectiveMismatchError, SharedGroup
from .schedule import Scheduler, SimulatedDeadlockError, current_rank
from .store import SimulatedStore

__all__ = ["CollectiveMismatchError", "SimulatedDeadlockError", "SimulatedRankError", "frames_outside", "simulate"]

T = TypeVar("T")

_REPLACED = [
    private_name(f"torch.{name}", loss="no ranks can be simulated")
    for name in (
        "distributed.distributed_c10d._world",
        "distributed.distributed_c10d._new_process_group_helper",
        "distributed.distributed_c10d._update_default_pg",
        "_C._distributed_c10d._register_process_group",
        "_C._distributed_c10d._unregister_all_process_groups",
        "_C._distributed_c10d._set_thread_isolation_mode",
    )
]
"""What ``_simulated_distributed`` replaces of torch.distributed, as it is at import."""

_running = threading.Lock()
"""Held while a simulation owns the torch.distributed state of the process."""


class SimulatedRankError(RuntimeError):
    """A simulated rank raised. ``rank`` is its number, ``__cause__`` its exception; the message has its traceback."""

    def __init__(self, rank: int, error: BaseException) -> None:
        self.rank = rank
        trace = "".join(traceback.format_exception(error))
        super().__init__(f"simulated rank {rank} raised {type(error).__name__}: {error}\n\n{trace}")


def simulate(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    seed: int = 0,
    order: Callable[[tuple[int, ...]], int] | None = None,
    schedule: MutableSequence[tuple[int, str]] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` simulated ranks and return their results, by rank.

    fn          runs on every rank with the default process group initialised: collectives, subgroups, DeviceMesh and
                synchronous checkpoints work as on real ranks. All ranks get the same argument objects, so in-place
                changes of one rank are visible to the others, unlike on real ranks
    seed        decides which rank runs next at each point of communication
    order       decides instead of ``seed``: called with the ranks that can run (ascending), returns one of them
    schedule    a list that receives (rank, event) for every start, launch, wait and finish

    Each rank starts with the caller's random state (torch, ``random``, numpy), default dtype, grad mode and autocast,
    and then has its own. At the end, the caller's state and the torch.distributed state of the process are restored.

    Raises SimulatedRankError if a rank raises; the other ranks end at their next collective. If ranks launch different
    collectives, its ``__cause__`` is a CollectiveMismatchError. Raises SimulatedDeadlockError at once if no rank can
    run, if a rank waits for a finished rank, or if all ranks finished and one never joined an operation. Raises
    RuntimeError inside another simulation, and ValueError for less than one rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not dist.is_available():
        raise RuntimeError("simulate needs torch.distributed, which this build of torch leaves out")
    inside = current_rank()
    if inside is not None:
        raise RuntimeError(f"simulate was called on simulated rank {inside.index}: simulations do not nest")
    if not _running.acquire(blocking=False):
        raise RuntimeError("another thread is inside simulate: it owns torch.distributed in this process")
    try:
        scheduler = Scheduler(world_size, seed, order, schedule)
        groups: dict[tuple[str, tuple[int, ...]], SharedGroup] = {}
        with _simulated_distributed(scheduler, groups) as on_rank:
            scheduler.run(lambda rank: on_rank(rank, lambda: fn(*args, **kwargs)))
    finally:
        _running.release()
    if scheduler.failure is None:
        _check_all_joined(groups)
        return [rank.result for rank in scheduler.ranks]
    if scheduler.failed_rank is None:
        raise scheduler.failure
    cause = scheduler.failure.with_traceback(frames_outside(scheduler.failure, f"{__package__}."))
    raise SimulatedRankError(scheduler.failed_rank, cause) from cause


def _check_all_joined(groups: dict[tuple[str, tuple[int, ...]], SharedGroup]) -> None:
    left = [pending for group in groups.values() for pending in group.unfinished()]
    if left:
        lines = [f"  {p.describe()}; missing ranks: {', '.join(map(str, p.missing()))}" for p in left]
        raise SimulatedDeadlockError("\n".join(["all ranks have finished, but not all joined:", *lines]))


def frames_outside(error: BaseException, *packages: str) -> TracebackType | None:
    """The frames of an error from the first on that is in none of ``packages``; None: there is none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(packages):
        trace = trace.tb_next
    return trace


class _RankWorld(dist.distributed_c10d._World):
    """One rank's groups. torch keeps a process's groups in module globals, behind properties of the same names."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}
        self.group_count = 0


class _WorldOfThread:
    """Replaces torch's world object: a simulated rank sees its own world, any other thread sees the process's world."""

    def __init__(self, process_world: Any, local: threading.local) -> None:
        object.__setattr__(self, "_process_world", process_world)
        object.__setattr__(self, "_local", local)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._local, "world", self._process_world), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self._local, "world", self._process_world), name, value)


@contextlib.contextmanager
def _simulated_distributed(
    scheduler: Scheduler, groups: dict[tuple[str, tuple[int, ...]], SharedGroup]
) -> Iterator[Callable[[int, Callable[[], Any]], Any]]:
    """Replace the process's torch.distributed state by one state per rank.

    Yields the function that runs a rank within its own state. Three parts of torch are replaced: the world object, in
    which torch's Python code looks groups up; the function behind ``new_group``, so that every backend becomes the
    simulated one; and the C++ registry of group names, which torch can keep per thread.
    """
    raise_where_absent(*_REPLACED)
    c10d: Any = dist.distributed_c10d
    c10d_cpp: Any = torch._C._distributed_c10d
    process_world, process_helper = c10d._world, c10d._new_process_group_helper
    local = threading.local()
    store = SimulatedStore(scheduler)
    everyone = tuple(range(len(scheduler.ranks)))

    def add_group(name: str, members: tuple[int, ...], rank: int, desc: str | None = None) -> SimulatedProcessGroup:
        world = local.world
        shared = groups.setdefault((name, members), SharedGroup(name, members))
        group = SimulatedProcessGroup(scheduler, shared, members.index(rank), store, desc or "undefined")
        world.pg_map[group] = (BACKEND, store)
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {member: index for index, member in enumerate(members)}
        world.pg_backend_config[group] = ",".join(f"{device.type}:{BACKEND}" for device in group._device_types)
        world.pg_to_tag[group] = f"ptd:{name}"
        for tag in ("", f"ptd:{name}"):
            world.tags_to_pg.setdefault(tag, []).append(group)
        c10d_cpp._register_process_group(name, group)
        return group

    def new_group_helper(
        size: int, group_rank: int, members: list[int], backend: Any, old_store: Any, name: str, **options: Any
    ) -> tuple[Any, Any]:
        inside = current_rank()
        if inside is None:
            return process_helper(size, group_rank, members, backend, old_store, name, **options)  # type: ignore[no-any-return]
        if members and inside.index not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        # Without members: init_process_group after destroy_process_group wants a new default group.
        return add_group(name, tuple(members) or everyone, inside.index, options.get("group_desc")), store

    def on_rank(rank: int, body: Callable[[], Any]) -> Any:
        local.world = _RankWorld()
        try:
            c10d._update_default_pg(add_group("default", everyone, rank, "default_pg"))
            return body()
        finally:
            c10d_cpp._unregister_all_process_groups()
            del local.world

    c10d._world = _WorldOfThread(process_world, local)
    c10d._new_process_group_helper = new_group_helper
    c10d_cpp._set_thread_isolation_mode(True)
    try:
        yield on_rank
    finally:
        c10d_cpp._set_thread_isolation_mode(False)
        c10d._world, c10d._new_process_group_helper = process_world, process_helper
        default = process_world.default_pg
        c10d_cpp._set_global_rank(-1 if default is None else default.rank())
