"""What a failed rank finds out about the other ranks from the store."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from maingrad.ddp.collectives import rank_fates
from maingrad.ddp.collectives.rank_fates import RankFates, announce


def test_ranks_without_a_report_are_silent_and_named_with_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fates, "PATIENCE", 0.1)
    store = dist.HashStore()
    announce(store, 0)
    store.set("maingrad/failures/process/1", "process 5 on elsewhere")
    fates = RankFates(store, 0, 3, "all_reduce of bucket 0")
    fates.inquire()
    assert fates.silent == [1, 2]
    assert fates.lines() == [
        "silent for 0.1 s: rank 1 (process 5 on elsewhere), rank 2 (has wrapped no model): look whether it has ended, "
        "waits elsewhere, or takes another number of steps"
    ]


def test_ranks_that_report_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports before the patience ends is heard, and the last report ends the inquiry."""
    monkeypatch.setattr(rank_fates, "PATIENCE", 60.0)
    store = dist.HashStore()
    store.set("maingrad/failures/waited_for/1", "all_gather of bucket 2")
    fates = RankFates(store, 2, 3, "all_reduce of bucket 0")
    thread = threading.Thread(target=fates.inquire)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and fates.silent == [0]
    store.set("maingrad/failures/waited_for/0", "all_reduce of bucket 0")
    thread.join(20)
    assert not thread.is_alive()
    assert fates.silent == []
    assert fates.lines() == ["failed in the same: rank 0", "failed elsewhere: rank 1 in all_gather of bucket 2"]


def test_what_was_read_before_the_store_went_is_told() -> None:
    class Ends(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer\nmore")

    store = Ends()
    store.set("maingrad/failures/waited_for/0", "all_reduce of bucket 0")
    fates = RankFates(store, 1, 2, "all_reduce of bucket 0")
    fates.inquire()
    trouble, told = fates.lines()
    assert "is out of reach (Connection reset by peer): look whether the process that serves it has ended" in trouble
    assert told == "failed in the same: rank 0"


def test_rank_0_stays_until_the_others_have_read() -> None:
    store = dist.HashStore()
    store.set("maingrad/failures/waited_for/1", "all_reduce of bucket 0")
    fates = RankFates(store, 0, 2, "all_reduce of bucket 0")
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
    fates = RankFates(store, 1, 2, "all_reduce of bucket 0")
    start = time.monotonic()
    fates.inquire()
    assert time.monotonic() - start < 20.0, "it waits for PATIENCE, not for the store"
    store.over.set()
    assert fates.lines() == [
        "the store, through which ranks tell each other, is out of reach (it does not answer): look whether the "
        "process that serves it has ended (rank 0, where no launcher does)"
    ]


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fates, "PATIENCE", 1.0)
    fates = RankFates(dist.HashStore(), 0, 1000, "all_reduce of bucket 0")
    fates.inquire()
    assert len(fates.silent) == 999
    (line,) = fates.lines()
    assert "rank 8 (has wrapped no model) and 991 more: look whether" in line
