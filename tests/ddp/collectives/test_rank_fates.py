"""What a failed rank finds out about the other ranks, from the store and from this machine's process table."""

import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from maingrad.ddp.collectives import rank_fates
from maingrad.ddp.collectives.rank_fates import Process, RankFates, announce


@pytest.fixture
def child() -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def described(process: subprocess.Popen[bytes]) -> Process:
    """The description that the process writes to the store."""
    own = rank_fates._own_process()
    return own._replace(pid=process.pid, started=rank_fates.process_state(process.pid)[1])


def test_a_process_has_ended_when_it_is_a_zombie_or_gone_and_not_before(child: subprocess.Popen[bytes]) -> None:
    process = described(child)
    assert process.is_here
    assert not process.has_ended
    child.send_signal(signal.SIGSTOP)
    assert not process.has_ended, "it may go on"
    child.kill()
    deadline = time.monotonic() + 10
    while not process.has_ended:  # a zombie until somebody asks for its exit code
        assert time.monotonic() < deadline
    child.wait()
    assert process.has_ended


def test_a_pid_that_is_used_again_is_another_process(child: subprocess.Popen[bytes]) -> None:
    assert described(child)._replace(started="1").has_ended


@pytest.mark.parametrize("machine", ["", "another 4026531836"])
def test_nothing_is_said_of_processes_elsewhere(machine: str) -> None:
    process = Process("elsewhere", 2**22 + 1, "1", machine)
    assert not process.is_here
    assert not process.has_ended


def test_ranks_on_other_machines_are_silent_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fates, "PATIENCE", 0.1)
    store = dist.HashStore()
    announce(store, 0)
    store.set("maingrad/failures/process/1", json.dumps(Process("elsewhere", 5, "1", "another 1")))
    fates = RankFates(store, 0, 3, "all_reduce of bucket 0", {})
    fates.inquire()
    assert (fates.gone, fates.silent) == ([], [1, 2])
    assert fates.lines() == [
        "silent for 0.1 s: rank 1 (process 5 on elsewhere, which cannot be seen from here), "
        "rank 2 (has wrapped no model)"
    ]


def test_whoever_tells_and_then_ends_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    store.set("maingrad/failures/process/1", json.dumps(described(child)))
    store.set("maingrad/failures/waited_for/1", "all_gather of bucket 2")
    child.kill()
    child.wait()
    fates = RankFates(store, 2, 3, "all_reduce of bucket 0", {})
    store.set("maingrad/failures/waited_for/0", "all_reduce of bucket 0")
    fates.inquire()
    assert (fates.gone, fates.silent) == ([], [])
    assert fates.lines() == ["failed in the same: rank 0", "failed elsewhere: rank 1 in all_gather of bucket 2"]


def test_rank_0_stays_until_the_others_have_read() -> None:
    store = dist.HashStore()
    store.set("maingrad/failures/waited_for/1", "all_reduce of bucket 0")
    fates = RankFates(store, 0, 2, "all_reduce of bucket 0", {})
    thread = threading.Thread(target=fates.inquire)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    store.add("maingrad/failures/done", 1)
    thread.join(rank_fates.PATIENCE / 2)
    assert not thread.is_alive()


class Frozen(dist.Store):
    """A store whose host does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def set(self, key: str, value: Any) -> None:
        self.over.wait()


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fates, "PATIENCE", 0.1)
    store = Frozen()
    fates = RankFates(store, 1, 2, "all_reduce of bucket 0", {})
    start = time.monotonic()
    fates.inquire()
    assert time.monotonic() - start < 20.0, "it waits for PATIENCE, not for the store"
    store.over.set()
    assert fates.lines() == [
        "the store, through which ranks tell each other, is out of reach (it does not answer): "
        "of the others nothing is known"
    ]


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fates, "PATIENCE", 0.1)
    fates = RankFates(dist.HashStore(), 0, 1000, "all_reduce of bucket 0", {})
    fates.inquire()
    assert len(fates.silent) == 999
    (line,) = fates.lines()
    assert line.endswith("rank 8 (has wrapped no model) and 991 more")
