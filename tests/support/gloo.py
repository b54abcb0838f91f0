"""Runs functions on real ranks: processes that hold a gloo group, started once and handed one job after another.

Importing torch takes seconds, a job milliseconds, so processes are forked from one that has imported it, and those of
each world size stay until the test session ends. A job that fails may leave collectives half done: its processes are
ended, and the next job gets fresh ones.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["fork_server_here", "forkserver", "leave_files", "load_module", "run_ranks"]

COLLECTIVE_TIMEOUT = timedelta(seconds=30)
START_TIMEOUT = 60.0
GRACE = 3.0  # seconds in which the other ranks of a failed job may tell their side
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "maingrad.ddp",
    "maingrad.fsdp",
    "maingrad.te_integration",
)


def fork_server_here() -> None:
    """Let ``forkserver`` begin as a fork of this process, with all that this process has imported by now.

    Otherwise the server is a new Python that imports torch and the library for seconds. No other thread may hold a
    lock here, so this is called before tests begin, and before the first backward or simulation has started threads.
    """

    def fork(path: Any, arguments: Sequence[Any], inherited: Sequence[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        # What ``exec`` would have done: pytest's captured streams and an open end of a pipe go.
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        leave_files(inherited)
        # ``ensure_running`` holds it; a process of this server may fork a server of its own.
        multiprocessing.forkserver._forkserver._lock = threading.Lock()
        gc.freeze()
        gc.enable()
        try:
            exec(arguments[-1])  # python -c, which raises SystemExit when this process has ended
        finally:
            os._exit(0)

    if not Path("/proc/self/fd").exists():
        return
    for name in PRELOADED:
        importlib.import_module(name)
    executed, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork
    try:
        multiprocessing.forkserver.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = executed


def leave_files(kept: Collection[int] = ()) -> None:
    """Lead what this process has open to nowhere, but the streams and ``kept``, as ``exec`` would close it."""
    # Loggers may still write to such a stream, so its number is not free for a pipe.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept and number != nowhere:
            with contextlib.suppress(OSError):
                os.dup2(nowhere, number)


def forkserver() -> ForkServerContext:
    """Makes processes that have imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))  # where ``fork_server_here`` has not started it
    return context


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 45.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` processes whose default group is gloo; returns the results by rank.

    fn       a function at the top level of a module; it finds its rank by ``dist.get_rank()``
    args     pickled; so are the results
    timeout  seconds; then ``TimeoutError`` with every rank's stack

    The default random state is seeded alike on every rank before each job. The exception of the rank that failed first
    is raised here, with the tracebacks of all that failed as its notes.
    """
    if "." in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not at the top level of its module: other processes cannot find it")
    pool = _pools.get(world_size)
    if not _pools:
        atexit.register(_end_all)  # a fork has none of this process's pools
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(fn, args, timeout)
    except BaseException:
        _pools.pop(world_size).end()
        raise


class _Failure(NamedTuple):
    """How a job ended on a rank that raised."""

    exception: BaseException
    traceback: str


class _Pool:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gloo-ranks-"))
        self._connections: list[Connection] = []
        self._processes = []
        context = forkserver()
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, str(self._folder)), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        for connection in self._connections:
            if not connection.poll(START_TIMEOUT):
                self.end()
                raise TimeoutError(f"{world_size} ranks did not start within {START_TIMEOUT:g} s")
            connection.recv_bytes()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        # By file, since a test module has no name that another process could import.
        job = pickle.dumps((fn.__module__, fn.__code__.co_filename, fn.__name__, pickle.dumps(args)))
        for connection in self._connections:
            connection.send_bytes(job)
        answers: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}  # in the order in which they came in
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._connections):
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise TimeoutError(
                    f"{fn.__name__} did not end within {timeout:g} s on {self._stacks(waiting.values())}"
                )
            for connection in ready:
                rank = waiting[connection]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], _Failure):
                    failures[rank] = answers[rank]
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            first = next(iter(failures.values())).exception
            for rank, failure in failures.items():
                first.add_note(f"on rank {rank}:\n{failure.traceback}")
            raise first
        return [answers[rank] for rank in range(len(self._connections))]

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(START_TIMEOUT)  # its end is told by the process that forked it
            text = f"rank {rank} ended with exit code {process.exitcode} in the middle of its job"
            return _Failure(RuntimeError(text), text)

    def _stacks(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{(self._folder / f'stacks-{rank}').read_text()}" for rank in ranks)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(connection: Connection, rank: int, world_size: int, folder: str) -> None:
    """A rank's life: join the group, then run jobs until the other end of ``connection`` is gone."""
    torch.set_num_threads(1)
    with Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        gc.freeze()  # so that the collection after each job looks at what the job left, not at all of torch
        connection.send_bytes(b"ready")
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, KeyboardInterrupt):
                break
            answer = _run_job(job)
            gc.collect()
            connection.send_bytes(answer)
        # Not through interpreter shutdown: a job's threads may still wait for ranks that are gone.
        os._exit(0)


def _run_job(job: bytes) -> bytes:
    try:
        module, file, name, args = pickle.loads(job)
        fn = getattr(load_module(module, file), name)
        torch.manual_seed(0)
        return pickle.dumps(fn(*pickle.loads(args)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps(_Failure(error.with_traceback(None), text))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps(_Failure(RuntimeError(f"{type(error).__name__}: {error}"), text))
        return answer


def load_module(name: str, file: str) -> Any:
    """The module as pytest named it, so that what it defines can be pickled to and fro."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        while "." in name:  # pickle imports the packages above it first, and they exist in name only
            name = name.rpartition(".")[0]
            sys.modules.setdefault(name, types.ModuleType(name))
        spec.loader.exec_module(module)
        return module
    return sys.modules[name]


_pools: dict[int, _Pool] = {}


def _end_all() -> None:
    while _pools:
        _pools.popitem()[1].end()
