"""Programs in processes of their own, without the seconds in which Python imports torch."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread

from gloo import forkserver

__all__ = ["PythonProcess", "python_process", "run_python"]


class PythonProcess:
    """``python *arguments``, forked from a process that has imported torch and the library; in a session of its own."""

    def __init__(self, arguments: tuple[str | Path, ...]) -> None:
        self._arguments = [str(each) for each in arguments]
        context = forkserver()
        (mine_out, out), (mine_err, err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_run, args=(self._arguments, os.getcwd(), dict(os.environ), out, err)
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
def python_process(*arguments: str | Path) -> Iterator[PythonProcess]:
    """Start ``python *arguments``: ``-c CODE``, ``-m MODULE`` or a file, and what follows; it is killed at the end."""
    started = PythonProcess(arguments)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join()


def run_python(*arguments: str | Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``."""
    with python_process(*arguments) as started:
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
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
