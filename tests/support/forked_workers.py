"""xdist's workers as forks of its controller, which has imported what all of them test: each would take ten seconds.

A worker that starts by itself is a new Python; what it runs, collects and says is the same.
"""

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.python import importtestmodule
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from gloo import leave_files

__all__ = ["fork_workers"]


def fork_workers(config: pytest.Config) -> None:
    """Import the test modules that ``config`` names, and let execnet fork workers from here on."""
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            known = set(sys.modules)
            try:
                importtestmodule(file, config)
            except (Exception, pytest.skip.Exception):
                # Workers import it again, and say what is wrong.
                for name in set(sys.modules) - known:
                    if getattr(sys.modules[name], "__file__", None) == str(file):
                        del sys.modules[name]
    gc.collect()
    gc.freeze()
    gateway_io.Popen2IOMaster = _Fork


class _Fork(Popen2IO):
    """A worker, seen by the controller."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        worker_reads, writes = os.pipe()
        reads, worker_writes = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            try:
                _work(worker_reads, worker_writes, args[-1])
            finally:
                os._exit(0)
        os.close(worker_reads)
        os.close(worker_writes)
        super().__init__(os.fdopen(writes, "wb"), os.fdopen(reads, "rb"), execmodel)

    def wait(self) -> int | None:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, 9)


def _work(reads: int, writes: int, code: str) -> None:
    """``python -c code``, with what execnet sends next on stdin; without what the controller does when it ends."""
    atexit._clear()
    logging.getLogger().handlers.clear()
    os.dup2(reads, 0)
    os.dup2(writes, 1)
    leave_files()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False), sys.__stderr__
    exec(code, {"__name__": "__main__"})
    atexit._run_exitfuncs()
