"""Programs in processes of their own, without the seconds in which Python imports torch."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread
from typing import Any

from gloo import fork_server_here, forkserver

__all__ = ["PythonProcess", "python_process", "run_python"]


class PythonProcess:
    """``python *arguments``, forked from a process that has imported torch and the library; in a session of its own.

    Ranks that ``-m torch.distributed.run`` starts are forked as well.
    """

    def __init__(self, arguments: tuple[str | Path, ...], environment: Mapping[str, str] | None = None) -> None:
        self._arguments = [str(each) for each in arguments]
        context = forkserver()
        (mine_out, out), (mine_err, err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_run, args=(self._arguments, os.getcwd(), dict(environment or os.environ), out, err)
        )
        self.process.start()
        out.close()
        err.close()
        self._out, self._err = _Reader(mine_out), _Reader(mine_err)

    def ended(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """How it ended; ``subprocess.TimeoutExpired`` where it did not."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout, bytes(self._out.text), bytes(self._err.text))
        for reader in (self._out, self._err):
            reader.join(1.0)  # who else writes there, and goes on, is not waited for
        return subprocess.CompletedProcess(
            self._arguments, self.process.exitcode, self._out.text.decode(), self._err.text.decode()
        )


@contextmanager
def python_process(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[PythonProcess]:
    """Start ``python *arguments``: ``-c CODE``, ``-m MODULE`` or a file, and what follows; it is killed at the end."""
    started = PythonProcess(arguments, environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join()


def run_python(
    *arguments: str | Path, timeout: float = 60.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)``."""
    with python_process(*arguments, environment=environment) as started:
        return started.ended(timeout)


class _Reader(Thread):
    """Takes what comes, since a program stands still whose output nobody takes."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(daemon=True)
        self._pipe, self.text = pipe, bytearray()
        self.start()

    def run(self) -> None:
        while block := os.read(self._pipe.fileno(), 1 << 16):
            self.text += block
        self._pipe.close()


def _run(arguments: list[str], folder: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        _fork_ranks()
    _run_here(arguments, folder, environment)


def _run_here(arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        if not environment.get("PYTHONSAFEPATH"):
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _fork_ranks() -> None:
    """Let torchrun in this process fork the ranks, from a server that is forked before torchrun has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    fork_server_here()
    executed = SubprocessHandler._popen

    def popen(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[:2] != (sys.executable, "-u"):
            return executed(self, args, env)
        return _Rank(args[2:], env, [each and each.name for each in (self._stdout, self._stderr)])

    SubprocessHandler._popen = popen


class _Rank:
    """What torchrun asks of ``Popen``. ``paths`` are those of files for the output, or None: torchrun's own output."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], paths: Sequence[str | None]) -> None:
        self._process = forkserver().Process(target=_run_rank, args=(arguments, os.getcwd(), environment, paths))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._process.exitcode


def _run_rank(
    arguments: Sequence[str], folder: str, environment: Mapping[str, str], paths: Sequence[str | None]
) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        if path is not None:
            with open(path, "a") as file:
                os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # a rank may be killed
    _run_here(arguments, folder, environment)
