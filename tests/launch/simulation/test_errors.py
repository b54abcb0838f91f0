"""Errors on simulated ranks are reported at once: mismatches, deadlocks, exceptions."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import (
    CollectiveMismatchError,
    SimulatedDeadlockError,
    SimulatedRankError,
    frames_outside,
)

lowest_first: Callable[[tuple[int, ...]], int] = min


@pytest.mark.parametrize("case", ["op", "shape", "dtype", "reduce op", "root"])
def test_mismatched_collectives_name_both(case: str):
    def fn() -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            {
                "op": dist.barrier,
                "shape": lambda: dist.all_reduce(x[:3]),
                "dtype": lambda: dist.all_reduce(x.double()),
                "reduce op": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
                "root": lambda: dist.broadcast(x, 1),
            }[case]()
        elif case == "root":
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    odd = {
        "op": "barrier",
        "shape": r"all_reduce SUM float32\[3\]",
        "dtype": r"all_reduce SUM float64\[4\]",
        "reduce op": r"all_reduce MAX float32\[4\]",
        "root": r"broadcast from rank 1 float32\[4\]",
    }[case]
    usual = r"broadcast from rank 0 float32\[4\]" if case == "root" else r"all_reduce SUM float32\[4\]"
    message = rf"sequence 1 of group 'default' \(ranks 0, 1\): rank 0 launched {usual}, but rank 1 launched {odd}"
    with pytest.raises(SimulatedRankError, match=message) as caught:
        simulate(fn, 2, order=lowest_first)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def test_gathering_into_another_dtype_is_refused():
    """As NCCL and gloo do, which would reinterpret the bytes."""

    def fn() -> None:
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4, dtype=torch.bfloat16))

    with pytest.raises(SimulatedRankError, match=r"a torch\.float32 tensor of shape \(8,\) does not hold 2 of"):
        simulate(fn, 2)


def test_a_caught_mismatch_still_ends_the_simulation():
    def fn() -> None:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(2 + dist.get_rank()))

    with pytest.raises(SimulatedRankError, match=r"rank 0 launched .*\[2\], but rank 1 launched .*\[3\]"):
        simulate(fn, 2, order=lowest_first)


def test_mismatched_transfers_and_splits():
    def transfer() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(2), 0)

    with pytest.raises(
        SimulatedRankError, match=r"rank 0 launched send to rank 1.*\[3\], but rank 1 .*recv from rank 0"
    ):
        simulate(transfer, 2)

    def dtypes() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3).int(), 0)

    with pytest.raises(SimulatedRankError, match=r"launched send .* float32\[3\], but rank 1 .* int32\[3\]") as caught:
        simulate(dtypes, 2)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)

    def splits() -> None:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3], [1, 3])

    with pytest.raises(
        SimulatedRankError, match=r"all_to_all_single float32, sequence 0 .*: a tensor of 1 elem"
    ) as caught:
        simulate(splits, 2)
    assert "rank 1 brought float32[1], float32[3] for float32[1], float32[3]" in str(caught.value)
    with pytest.raises(SimulatedRankError, match=r"a torch.float32 tensor arrives where torch.float64 is expected"):
        simulate(lambda: dist.group.WORLD.reduce_scatter([torch.ones(2).double()], [[torch.ones(2)] * 2]), 2)
    with pytest.raises(SimulatedRankError, match=r"shape \(5,\) does not hold 2 of torch.float32 \(2,\)"):
        simulate(lambda: dist.distributed_c10d._get_default_group().all_gather_single(torch.ones(5), torch.ones(2)), 2)


def test_deadlock_says_who_waits_for_what():
    def fn() -> None:
        pair = dist.new_group([0, 1])
        dist.barrier()
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3), group=pair)
        else:
            dist.barrier()

    with pytest.raises(SimulatedDeadlockError) as caught:
        simulate(fn, 3)
    assert gc.isenabled(), "the message is made without the garbage collector"
    gc.disable()
    try:
        with pytest.raises(SimulatedDeadlockError):
            simulate(fn, 3)
        assert not gc.isenabled(), "who has turned it off wants it off"
    finally:
        gc.enable()
    lines = str(caught.value).splitlines()
    assert lines[0] == "simulated ranks are deadlocked: no rank can go on"
    first = fn.__code__.co_firstlineno
    for rank, waits_for, line in (
        (0, "barrier, sequence 1 of group 'default' (ranks 0, 1, 2); missing ranks: 1", first + 6),
        (1, "all_reduce SUM float32[3], sequence 0 of group '0' (ranks 0, 1); missing ranks: 0", first + 4),
        (2, "barrier, sequence 1 of group 'default' (ranks 0, 1, 2); missing ranks: 1", first + 6),
    ):
        assert lines[1 + rank] == f"  rank {rank} waits for {waits_for}; at {__file__}:{line} in fn"


def test_any_rank_may_end_a_wait_for_a_message_from_anyone() -> None:
    with pytest.raises(SimulatedDeadlockError) as caught:
        simulate(lambda: dist.group.WORLD.recv_anysource([torch.ones(1)], 3).wait(), 2)
    assert str(caught.value).count("; missing ranks: any; at ") == 2


def test_the_frames_of_an_error_from_a_programs_own_on() -> None:
    """Some libraries call the program, and the program calls them."""

    def fail() -> None:
        raise ValueError("within")

    call: Any = fail
    for module in ("torch.c", "program", "torch.b", "maingrad.a"):
        space: dict[str, Any] = {"__name__": module, "call": call}
        exec("def run():\n    call()", space)
        call = space["run"]
    with pytest.raises(ValueError, match="within") as caught:
        call()
    found = frames_outside(caught.value, __name__, "maingrad.", "torch.")
    assert found is not None and found.tb_frame.f_globals["__name__"] == "program"
    assert frames_outside(caught.value, "") is None and frames_outside(caught.value) is caught.value.__traceback__


def test_a_group_of_some_ranks_waits_for_its_own() -> None:
    """Ranks are named by their numbers among all; that a rank outside of the group has finished is no deadlock."""

    def fn(deadlocks: bool) -> float:
        group, rank = dist.new_group([1, 2]), dist.get_rank()
        x = torch.full((1,), float(rank))
        if rank == 2 and not deadlocks:
            dist.all_reduce(x, group=group)
            dist.send(x, 1, group=group)
        if rank == 1:
            dist.all_reduce(x, group=group)
            dist.recv(x, 2, group=group)
        return x.item()

    for seed in range(8):
        assert simulate(fn, 3, False, seed=seed) == [0.0, 3.0, 3.0]
    with pytest.raises(SimulatedDeadlockError, match=r"group '0' \(ranks 1, 2\); missing ranks: 2 \(finished\)"):
        simulate(fn, 3, True, order=max)

    def receives() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 2, group=group)

    with pytest.raises(SimulatedDeadlockError, match=r"recv from rank 2, .* missing ranks: 2 \(finished\)"):
        simulate(receives, 3, order=max)


def test_roots_are_named_by_their_numbers_among_all_ranks() -> None:
    for call, said in (
        (lambda x, group: dist.reduce(x, 2, group=group), "reduce SUM to rank 2"),
        (lambda x, group: dist.broadcast(x, 2, group=group), "broadcast from rank 2"),
        (lambda x, group: dist.gather(x, [x, x] if dist.get_rank() == 2 else None, 2, group=group), "gather to rank 2"),
        (lambda x, group: dist.scatter(x, [x, x] if dist.get_rank() == 2 else None, 2, group=group), "scatter from"),
    ):
        schedule: list[tuple[int, str]] = []

        def fn(call: Any = call) -> None:
            group = dist.new_group([1, 2])
            if dist.get_rank() > 0:
                call(torch.ones(1), group)

        simulate(fn, 3, schedule=schedule)
        assert sum(event.startswith(f"launch {said}") for _, event in schedule) == 2, said


def test_rows_that_do_not_divide_need_splits() -> None:
    with pytest.raises(SimulatedRankError, match="all_to_all_single: 3 rows do not divide among 2 ranks; give splits"):
        simulate(lambda: dist.group.WORLD.all_to_all_single(torch.ones(3), torch.ones(3), [], []), 2)
    with pytest.raises(SimulatedRankError, match="all_to_all_single: 3 rows do not divide among 2 ranks"):
        simulate(lambda: dist.group.WORLD.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2), [], []), 2)


@pytest.mark.parametrize("starts", [[1, 1, 0], [0, 1, 1]])
def test_waiting_for_a_finished_rank_is_reported_while_others_still_run(starts: list[int]):
    def fn() -> None:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3))
        elif dist.get_rank() == 2:
            pytest.fail("the deadlock is known before this rank gets its turn")

    sequence = iter(starts)
    with pytest.raises(SimulatedDeadlockError, match="rank 1 waits for a rank that has finished") as caught:
        simulate(fn, 3, order=lambda runnable: next(sequence))
    assert "missing ranks: 0 (finished), 2; at" in str(caught.value)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip() for line in (lines[0], lines[2])] == ["rank 0 has finished", "rank 2 has not started"]


def test_two_sends_that_wait_for_each_other():
    def fn() -> None:
        other = 1 - dist.get_rank()
        dist.send(torch.ones(1), other)
        dist.recv(torch.ones(1), other)

    with pytest.raises(SimulatedDeadlockError, match=r"rank 0 waits for send to rank 1.*missing ranks: 1"):
        simulate(fn, 2)


def test_polling_for_what_cannot_come():
    def fn() -> None:
        if dist.get_rank() == 0:
            work = dist.barrier(async_op=True)
            while not work.is_completed():
                pass

    with pytest.raises(
        SimulatedDeadlockError, match=r"rank 0 keeps asking is_completed\(\) and nothing else"
    ) as caught:
        simulate(fn, 2)
    assert "\n  rank 0 waits for barrier, sequence 0 of group 'default'" in str(caught.value)
    with pytest.raises(SimulatedDeadlockError, match="\n  rank 1 has not started"):
        simulate(fn, 2, order=min)


def test_an_operation_that_was_never_joined():
    def fn() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.isend(torch.ones(1), 1)
            dist.irecv(torch.ones(1), 1, tag=2)

    with pytest.raises(SimulatedDeadlockError) as caught:
        simulate(fn, 2)
    assert "all ranks have finished, but not all joined" in str(caught.value)
    assert "all_reduce SUM float32[1], sequence 0 of group 'default' (ranks 0, 1); missing ranks: 1" in str(
        caught.value
    )
    assert "send to rank 1, tag 0, float32[1] of group 'default' (ranks 0, 1); missing ranks: 1" in str(caught.value)
    assert "recv from rank 1, tag 2, float32[1] of group 'default' (ranks 0, 1); missing ranks: 1" in str(caught.value)


@pytest.mark.parametrize("error", [KeyError("boo"), SystemExit(3)])
def test_an_exception_stops_all_ranks(error: BaseException):
    reached, unwound = [], []

    def fails_here() -> None:
        raise error

    def fn() -> None:
        try:
            dist.barrier()
            if dist.get_rank() == 2:
                fails_here()
            for _ in range(3):
                dist.barrier()
            reached.append(dist.get_rank())
        except Exception:
            if dist.get_rank() != 2:
                reached.append("user code must not catch what unwinds a rank")
            raise
        finally:
            unwound.append(dist.get_rank())

    with pytest.raises(SimulatedRankError, match=f"simulated rank 2 raised {type(error).__name__}: ") as caught:
        simulate(fn, 4)
    assert caught.value.rank == 2
    assert caught.value.__cause__ is error
    assert "in fails_here\n    raise error" in str(caught.value)
    assert "simulated_schedule.py" not in str(caught.value)
    assert reached == []
    assert sorted(unwound) == [0, 1, 2, 3]


def test_what_other_ranks_raise_while_they_unwind_is_not_the_error() -> None:
    def fn() -> None:
        if dist.get_rank() == 0:
            raise ValueError("the cause")
        try:
            dist.barrier()
        finally:
            raise KeyError("of a clean-up")

    with pytest.raises(SimulatedRankError, match="simulated rank 0 raised ValueError: the cause") as caught:
        simulate(fn, 2, order=max)
    assert caught.value.rank == 0


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_to_all_single"])
def test_dtypes_of_collectives_whose_shapes_may_differ_are_compared(name: str) -> None:
    def fn() -> None:
        own = torch.ones(2, dtype=torch.float32 if dist.get_rank() == 0 else torch.float64)
        if name == "all_gather":
            dist.all_gather([own.clone(), own.clone()], own)
        elif name == "all_to_all":
            dist.all_to_all([own.clone(), own.clone()], [own, own])
        else:
            dist.all_to_all_single(own.clone(), own)

    message = f"rank 0 launched {name} float32, but rank 1 launched {name} float64"
    with pytest.raises(SimulatedRankError, match=message) as caught:
        simulate(fn, 2, order=min)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def test_the_sender_of_a_message_that_has_not_come_is_not_known() -> None:
    def fn() -> int:
        tensor, group = torch.zeros(1), dist.group.WORLD
        if dist.get_rank() == 1:
            dist.send(tensor, 0)
            return 0
        work = group.recv_anysource([tensor], 0)
        with pytest.raises(RuntimeError, match="known for a receive that has completed only"):
            work.source_rank()
        work.wait()
        return work.source_rank()

    assert simulate(fn, 2, order=min) == [1, 0]
    with pytest.raises(SimulatedRankError, match="known for a receive that has completed only"):
        simulate(lambda: dist.barrier(async_op=True).source_rank(), 1)


def test_a_rank_may_ask_a_thousand_times_for_each_rank_there_is() -> None:
    """Others may not have had their turn."""
    turns = itertools.count()

    def fn() -> bool:
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        return True

    def order(runnable: tuple[int, ...]) -> int:
        turn = next(turns)
        return min(runnable) if turn < 2500 else runnable[turn % len(runnable)]

    assert simulate(fn, 3, order=order) == [True] * 3


def test_a_rank_that_waits_at_the_end_of_a_block_is_named_by_the_blocks_line() -> None:
    """And not by a line of ``contextlib``."""

    def fn() -> None:
        if dist.get_rank() == 0:
            with dist.distributed_c10d._coalescing_manager():
                dist.all_reduce(torch.ones(1))

    with pytest.raises(SimulatedDeadlockError) as caught:
        simulate(fn, 2)
    assert f"missing ranks: 1 (finished); at {__file__}:" in str(caught.value)
