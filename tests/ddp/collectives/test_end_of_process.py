"""A program that ends right after its last collective ends well: gloo's threads may still release tensors then."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from maingrad.ddp.collectives import in_flight

IMITATION = """
import hashlib, sys, threading
from pathlib import Path
from maingrad.ddp import DistributedDataParallel

def work(name, rounds):  # computes without the interpreter's lock, as gloo's threads do, and needs the lock in the end
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    started.wait()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    sys.stdout.write(f"{name} released\\n")
    sys.stdout.flush()

started = threading.Barrier(3)
threading.Thread(target=work, args=("pt_gloo_runloop", 300_000), daemon=True).start()
threading.Thread(target=work, args=("another", 500_000_000), daemon=True).start()
started.wait()
"""

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, init_process_group

sys.setswitchinterval(10)  # a thread that waits for the interpreter's lock may wait until the interpreter ends
init_process_group()
model = DistributedDataParallel(torch.nn.Linear(32, 32))
model(torch.randn(4, 32)).sum().backward()
model.finish_grad_sync()
dist.all_gather_object([None, None], "the last collective")
dist.destroy_process_group()
"""


@pytest.mark.in_turn
def test_a_process_waits_for_threads_of_gloo_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", IMITATION], capture_output=True, text=True, check=True)
    assert ended.stdout == "pt_gloo_runloop released\n"


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_thread_that_ends_meanwhile_is_no_error(error: type[OSError]) -> None:
    """Its file is gone, or reads as of no process."""

    def read_text() -> str:
        raise error

    assert in_flight._text(SimpleNamespace(read_text=read_text)) == ""


def test_a_thread_that_runs_on_holds_no_process_up_for_more_than_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, naps = itertools.count(), itertools.count()
    monkeypatch.setattr(in_flight, "_text", lambda stat: "7 (pt_gloo_runloop) R 1")

    def sleep(_: float) -> None:
        assert next(naps) < 100, "it waits on and on"

    monkeypatch.setattr(in_flight, "time", SimpleNamespace(monotonic=seconds.__next__, sleep=sleep))
    in_flight._let_gloo_finish()
    assert 5 < next(naps) < 15


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_end_well_again_and_again() -> None:
    """Without the wait a sixth of these processes aborted."""
    for _ in range(10):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        ended = subprocess.run(
            [sys.executable, *command, sys.executable, "-c", PROGRAM], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
