"""Runs functions on real ranks that may die, hang or raise, each in a process of its own, and tells how they ended.

The processes are forked from one that has imported torch already: a run takes about half a second.
"""

import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from gloo import forkserver, load_module

__all__ = ["Ended", "assert_silent", "run_to_the_end", "the_report"]

Store = Literal["launcher", "rank 0", "file"]


class Ended(NamedTuple):
    """How a rank's process ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    output: str
    """What it wrote to stdout and stderr, the traceback of its last exception included."""
    returned: Any
    """What its function returned; None where it did not."""


def run_to_the_end(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    collective_timeout: float = 5.0,
    limit: float = 25.0,
    store: Store = "launcher",
    backend: str | None = "gloo",
) -> list[Ended]:
    """Run ``fn(*args)`` on ``world_size`` processes of one gloo group, until all of them have ended.

    fn                  a function at the top level of a module; it finds its rank by ``dist.get_rank()``
    collective_timeout  seconds, of the default group
    limit               seconds; whoever runs on then is killed, and ``TimeoutError`` has every rank's output
    store               who serves the store: this process, as torchrun does, rank 0, or the file system
    backend             what ``init_process_group`` is given; None: torch chooses
    """
    folder = Path(tempfile.mkdtemp(prefix="ending-ranks-"))
    context = forkserver()
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if store == "launcher" else None
    port = None if server is None else server.port
    job = (fn.__module__, fn.__code__.co_filename, fn.__name__, pickle.dumps(args))
    processes = [
        context.Process(
            target=_rank, args=(job, rank, world_size, str(folder), store, port, collective_timeout, backend)
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        ran_on = _wait(processes, time.monotonic() + limit)
        ended = [_ending(process, folder, rank) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder)
    if ran_on:
        texts = "\n".join(f"rank {rank}:\n{one.output}" for rank, one in enumerate(ended))
        raise TimeoutError(f"ranks {ran_on} of {fn.__name__} did not end within {limit:g} s\n{texts}")
    return ended


# ---- What survivors say. ----

REPORT = re.compile(
    r"^maingrad\.ddp\.collectives\.failure_report\.CollectiveError: "
    r"rank (?P<rank>\d+) waited (?P<seconds>\d+\.\d\d) s for "
    r"(?P<what>.*), which failed: (?P<why>.*)\n(?P<fates>(?:  .*\n)*)",
    re.MULTILINE,
)


def the_report(rank: int, ended: Ended) -> re.Match[str]:
    """The one report of a survivor, by which its process ended."""
    assert ended.exit_code == 1, f"rank {rank}: {ended.output}"
    reports = list(REPORT.finditer(ended.output))
    assert len(reports) == 1, ended.output
    assert ended.output.endswith(reports[0].group()), "it is the last word"
    assert int(reports[0]["rank"]) == rank
    return reports[0]


def assert_silent(report: re.Match[str], victim: int) -> None:
    named = rf"  silent for 3 s: rank {victim}: look whether it has ended, .*\n"
    assert re.match(named, report["fates"]), report.group()


# ---- Processes. ----


def _wait(processes: list[ForkServerProcess], deadline: float) -> list[int]:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    ran_on = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in ran_on:
        processes[rank].kill()
        processes[rank].join()
    return ran_on


def _ending(process: ForkServerProcess, folder: Path, rank: int) -> Ended:
    result = folder / f"returned-{rank}"
    assert process.exitcode is not None, "joined"
    return Ended(
        process.exitcode,
        (folder / f"output-{rank}").read_text(errors="replace"),
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _rank(
    job: tuple[str, str, str, bytes],
    rank: int,
    world_size: int,
    folder: str,
    store: Store,
    port: int | None,
    collective_timeout: float,
    backend: str | None,
) -> None:
    with Path(folder, f"output-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=collective_timeout)
    chosen = _store(store, rank, world_size, folder, port)
    dist.init_process_group(backend, store=chosen, rank=rank, world_size=world_size, timeout=timeout)
    module, file, name, args = job
    returned = getattr(load_module(module, file), name)(*pickle.loads(args))
    Path(folder, f"returned-{rank}").write_bytes(pickle.dumps(returned))


def _store(store: Store, rank: int, world_size: int, folder: str, port: int | None) -> dist.Store:
    if store == "file":
        return dist.FileStore(f"{folder}/store", world_size)
    if store == "launcher":
        return dist.TCPStore("127.0.0.1", port, world_size, False)
    # Rank 0 takes a free port and leaves its number in a file.
    number = Path(folder, "port")
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        number.with_suffix(".new").write_text(str(served.port))
        number.with_suffix(".new").rename(number)
        return served
    while not number.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(number.read_text()), world_size, False)
