"""The ranks that other tests run on tell what went wrong, and fresh ones follow."""

import os
import time

import gloo
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks


def summed(value: float) -> tuple[int, float]:
    total = torch.tensor(value * (1 + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has a wish")
    dist.barrier()


def hangs() -> None:
    time.sleep(60)


def dies() -> None:
    os._exit(7)


def test_results_come_by_rank() -> None:
    assert run_ranks(summed, 2, 2.0) == [(0, 6.0), (1, 6.0)]


def test_a_failing_rank_raises_its_own_exception_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "GRACE", 0.2)  # the other rank waits for this one
    with pytest.raises(ValueError, match="a wish") as caught:
        run_ranks(fails_on_one_rank, 2)
    assert any("on rank 1" in note and "in fails_on_one_rank" in note for note in caught.value.__notes__)
    assert run_ranks(summed, 2, 1.0) == [(0, 3.0), (1, 3.0)]


@pytest.mark.in_turn
def test_ranks_that_hang_or_die_are_told_apart() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)0\.5 s on rank 0:.*in hangs"):
        run_ranks(hangs, 1, timeout=0.5)
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code 7"):
        run_ranks(dies, 1)


def test_functions_must_be_found_by_name() -> None:
    with pytest.raises(TypeError, match="top level"):
        run_ranks(lambda: None, 2)
