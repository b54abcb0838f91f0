"""What a failed rank finds out about the other ranks from the store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from maingrad.ddp.collectives import failure_report
from maingrad.ddp.collectives.failure_report import announce, ask_others


def test_ranks_without_a_report_are_silent_and_named_with_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 0.1)
    store = dist.HashStore()
    announce(store, 0)
    store.set("maingrad/failures/process/1", "process 5 on elsewhere")
    silent, lines = ask_others(store, 0, 3, "all_reduce of bucket 0")
    assert silent == [1, 2]
    assert lines == [
        "silent for 0.1 s: rank 1 (process 5 on elsewhere), rank 2 (has wrapped no model): look whether it has ended, "
        "waits elsewhere, or takes another number of steps"
    ]


def test_ranks_that_report_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports before the patience ends is heard, and the last report ends the inquiry."""
    monkeypatch.setattr(failure_report, "PATIENCE", 60.0)
    store = dist.HashStore()
    store.set("maingrad/failures/waited_for/1", "all_gather of bucket 2")
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask_others, store, 2, 3, "all_reduce of bucket 0")
        time.sleep(0.3)
        assert not asked.done()
        store.set("maingrad/failures/waited_for/0", "all_reduce of bucket 0")
        silent, lines = asked.result(20)
    assert silent == []
    assert lines == ["failed in the same: rank 0", "failed elsewhere: rank 1 in all_gather of bucket 2"]


def test_what_was_read_before_the_store_went_is_told() -> None:
    class Ends(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer\nmore")

    store = Ends()
    store.set("maingrad/failures/waited_for/0", "all_reduce of bucket 0")
    _, (trouble, told) = ask_others(store, 1, 2, "all_reduce of bucket 0")
    assert "is out of reach (Connection reset by peer): look whether the process that serves it has ended" in trouble
    assert told == "failed in the same: rank 0"


def test_rank_0_stays_until_the_others_have_read() -> None:
    store = dist.HashStore()
    store.set("maingrad/failures/waited_for/1", "all_reduce of bucket 0")
    thread = threading.Thread(target=ask_others, args=(store, 0, 2, "all_reduce of bucket 0"))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    store.add("maingrad/failures/done", 1)
    thread.join(failure_report.PATIENCE / 2)
    assert not thread.is_alive()


class Frozen(dist.Store):
    """A store whose host does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def set(self, key: str, value: Any) -> None:
        self.over.wait()


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 0.1)
    store = Frozen()
    start = time.monotonic()
    _, lines = ask_others(store, 1, 2, "all_reduce of bucket 0")
    assert time.monotonic() - start < 20.0, "it waits for PATIENCE, not for the store"
    store.over.set()
    assert lines == [
        "the store, through which ranks tell each other, is out of reach (it does not answer): look whether the "
        "process that serves it has ended (rank 0, where no launcher does)"
    ]


@pytest.mark.in_turn
def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 1.0)
    silent, (line,) = ask_others(dist.HashStore(), 0, 1000, "all_reduce of bucket 0")
    assert len(silent) == 999
    assert "rank 8 (has wrapped no model) and 991 more: look whether" in line
