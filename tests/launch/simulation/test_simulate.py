"""One simulated rank runs at a time, in an order that replays; handles, futures and the store pass the baton."""

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedDeadlockError, SimulatedRankError

lowest_first: Callable[[tuple[int, ...]], int] = min
highest_first: Callable[[tuple[int, ...]], int] = max


def steps(count: int = 5) -> list[int]:
    """The order in which ranks came out of each of ``count`` barriers, as seen by this rank."""
    seen = []
    for _ in range(count):
        dist.barrier()
        seen.append(dist.get_rank())
    return seen


def test_results_and_arguments():
    def fn(offset: int, *, factor: int) -> int:
        return (dist.get_rank() + offset) * factor

    assert simulate(fn, 3, 10, factor=2) == [20, 22, 24]
    assert simulate(dist.get_world_size, 5) == [5] * 5
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        simulate(fn, 0)


def test_only_one_rank_runs_at_a_time():
    inside: list[int] = []
    most = 0

    def fn() -> None:
        nonlocal most
        rank = dist.get_rank()
        for step in range(6):
            inside.append(rank)
            most = max(most, len(inside))
            time.sleep(0.002)  # releases the GIL, so that another runnable thread would run
            torch.randn(64, 64) @ torch.randn(64, 64)
            inside.remove(rank)
            if step % 2:
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(1), async_op=True).wait()

    simulate(fn, 4)
    assert most == 1


def test_the_schedule_replays_from_its_seed():
    def run(seed: int) -> list[tuple[int, str]]:
        schedule: list[tuple[int, str]] = []
        simulate(steps, 4, seed=seed, schedule=schedule)
        return schedule

    schedules = [run(seed) for seed in range(8)]
    assert schedules == [run(seed) for seed in range(8)]
    assert len({tuple(schedule) for schedule in schedules}) == 8
    for schedule in schedules:
        assert sorted(rank for rank, event in schedule if event == "start") == [0, 1, 2, 3]
        assert sorted(rank for rank, event in schedule if event == "finish") == [0, 1, 2, 3]
        launches = [rank for rank, event in schedule if event.startswith("launch barrier")]
        assert all(sorted(launches[i : i + 4]) == [0, 1, 2, 3] for i in range(0, 20, 4))
        waits = [event for _, event in schedule if event.startswith("wait barrier")]
        assert 0 < len(waits) <= 15, "who comes last to a barrier waits for nobody"


def test_order_decides_and_is_checked():
    asked: list[tuple[int, ...]] = []

    def last(runnable: tuple[int, ...]) -> int:
        asked.append(runnable)
        return runnable[-1]

    finished: list[int] = []
    simulate(lambda: (dist.barrier(), finished.append(dist.get_rank())), 3, order=last)
    assert finished == [2, 1, 0]
    assert asked[0] == (0, 1, 2)
    with pytest.raises(ValueError, match=r"order returned 7: it must return one of the ranks that can go on, \(0, 1\)"):
        simulate(steps, 2, order=lambda runnable: 7)
    calls = iter(range(100))
    with pytest.raises(SimulatedRankError, match="order returned 7"):
        simulate(steps, 2, order=lambda runnable: runnable[0] if next(calls) < 3 else 7)


def test_a_race_shows_under_some_orders_and_replays():
    def fn() -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        if dist.get_rank() == 0:
            x.fill_(10.0)  # too early: the collective may not have read x yet
        work.wait()
        return float(x)

    assert simulate(fn, 2, order=lowest_first) == [11.0, 11.0]  # 0 launches, spoils; 1 arrives
    assert simulate(fn, 2, order=highest_first) == [10.0, 2.0]  # 1 launches; 0 arrives, spoils
    outcomes = [simulate(fn, 2, seed=seed) for seed in range(16)]
    assert outcomes == [simulate(fn, 2, seed=seed) for seed in range(16)]
    assert len({tuple(outcome) for outcome in outcomes}) == 2


def test_async_collectives_complete_when_all_have_arrived():
    events: list[tuple[int, str]] = []

    def fn() -> list[float]:
        rank = dist.get_rank()
        tensors = [torch.full((2,), float(rank + k)) for k in range(3)]
        works = []
        for k, tensor in enumerate(tensors):
            works.append(dist.all_reduce(tensor, async_op=True))
            events.append((rank, f"launched {k}"))
        if rank == 0:
            assert not any(work.is_success() for work in works), "nobody else has started"
            assert [tensor[0] for tensor in tensors] == [0.0, 1.0, 2.0]
        for k in (2, 0, 1):
            assert works[k].wait()
            events.append((rank, f"waited {k}"))
            assert works[k].is_completed()
            assert works[k].result()[0] is tensors[k]
        return [float(tensor[0]) for tensor in tensors]

    assert simulate(fn, 2, order=lowest_first) == [[1.0, 3.0, 5.0]] * 2
    # Rank 0 launches all three without blocking, then waits: rank 1 gets in until it has launched them too.
    assert events[:3] == [(0, "launched 0"), (0, "launched 1"), (0, "launched 2")]
    assert events[3:6] == [(1, "launched 0"), (1, "launched 1"), (0, "waited 2")]


def test_asking_is_completed_in_a_loop_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    def fn() -> bool:
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        return work.wait(timedelta(seconds=1))

    for seed in range(5):
        assert simulate(fn, 4, seed=seed) == [True] * 4
    # Many polls are no deadlock while other ranks launch in between.
    monkeypatch.setattr("maingrad.launch.simulation.schedule._MAX_IDLE_POLLS", 20)
    assert simulate(lambda: [fn() for _ in range(150)], 2) == [[True] * 150] * 2


def test_futures_call_back_on_the_thread_of_their_rank():
    def fn() -> tuple[int, list[Any]]:
        calls: list[Any] = []
        x = torch.full((2,), float(dist.get_rank()))
        future = dist.all_reduce(x, async_op=True).get_future()
        following = future.then(lambda f: (calls.append((dist.get_rank(), float(f.value()[0][0]))), 7)[1])
        dist.barrier()
        return following.wait(), calls

    for order in (lowest_first, highest_first):
        assert simulate(fn, 3, order=order) == [(7, [(rank, 3.0)]) for rank in range(3)]


def test_an_error_of_a_callback_is_raised_by_the_wait_for_it():
    def fn() -> bool:
        work = dist.all_reduce(torch.ones(2), async_op=True)

        def fail(future: Any) -> None:
            raise ArithmeticError("in a callback")

        following = work.get_future().then(fail)
        with pytest.raises(ArithmeticError, match="in a callback"):
            following.wait()
        return work.wait()

    assert simulate(fn, 2) == [True, True]


def test_a_callback_may_launch_what_another_rank_waits_for():
    def fn() -> float:
        x, y = torch.ones(1), torch.ones(1)
        launched = []
        work = dist.all_reduce(x, async_op=True)
        if dist.get_rank() == 0:
            work.get_future().then(lambda f: launched.append(dist.all_reduce(y, async_op=True)))
            dist.recv(torch.empty(1), 1)  # comes only after the launch in the callback
            launched[0].wait()
        else:
            work.wait()
            dist.all_reduce(y)
            dist.send(torch.ones(1), 0)
        return float(y)

    for seed in range(10):
        assert simulate(fn, 2, seed=seed) == [2.0, 2.0]


def test_simulations_do_not_nest_or_share_the_process():
    with pytest.raises(SimulatedRankError, match="simulate was called on simulated rank 0: simulations do not nest"):
        simulate(lambda: simulate(dist.get_rank, 2), 1)

    def fn() -> str:
        refusals: list[str] = []

        def elsewhere() -> None:
            assert not dist.is_initialized(), "other threads see the process's own state"
            for attempt in (lambda: simulate(dist.get_rank, 2), lambda: group.barrier()):
                with pytest.raises(RuntimeError) as caught:
                    attempt()
                refusals.append(str(caught.value))

        group = dist.group.WORLD
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return refusals

    for refusals in simulate(fn, 2):
        assert refusals[0].startswith("another thread is inside simulate")
        assert refusals[1].startswith("a thread that is not a simulated rank uses a process group of simulated rank")


def test_ctrl_c_ends_all_ranks():
    def fn() -> None:
        pressed = 0.0
        for step in range(10**9):
            dist.barrier()
            # Pressed again after seconds: Python drops an interrupt that comes while a finaliser runs.
            if step >= 3 and dist.get_rank() == 0 and time.monotonic() - pressed > 10:
                pressed = time.monotonic()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(fn, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    ranks = [thread for thread in threading.enumerate() if thread.name.startswith("simulated-rank")]
    for thread in ranks:  # a rank that is about to end may have no core yet
        thread.join(timeout=20)
    assert not [thread for thread in ranks if thread.is_alive()]
    assert simulate(dist.get_rank, 2) == [0, 1]


def test_the_store_waits_by_passing_the_baton():
    def fn() -> tuple[bytes, bytes, int]:
        store = dist.PrefixStore("mine/", dist.distributed_c10d._get_default_store())
        store.add("arrived", 1)
        if dist.get_rank() == 2:
            store.set("key", "value")
            assert store.compare_set("key", "value", "other") == b"other"
        value = store.get("key")
        dist.distributed_c10d._store_based_barrier(dist.get_rank(), store, "", 3, timedelta(seconds=5))
        return value, store.get("arrived"), store.add("count", 2)

    results = simulate(fn, 3)
    assert [(value, arrived) for value, arrived, _ in results] == [(b"other", b"3")] * 3
    assert sorted(count for _, _, count in results) == [2, 4, 6]
    with pytest.raises(SimulatedDeadlockError, match="rank 0 waits for key 'nobody sets it' of the store"):
        simulate(lambda: dist.distributed_c10d._get_default_store().get("nobody sets it"), 2)


def test_a_thousand_small_simulations_take_seconds():
    start = time.perf_counter()
    for seed in range(100):
        assert simulate(steps, 4, 1, seed=seed) == [[0], [1], [2], [3]]
    assert time.perf_counter() - start < 6.0  # 0.25 s on one idle core


def test_the_store_is_one_for_all_ranks_and_keeps_bytes():
    """As torch's own stores: counters are digits, and a missing key compares as empty."""

    def fn() -> list[Any]:
        store = dist.distributed_c10d._get_default_store()
        found: list[Any] = [store.check([]), store.check(["a"])]
        store.set("a", b"\x00\xff")
        store.set("b", "text")
        found += [store.check(["a", "b"]), store.check(["a", "c"]), store.num_keys(), store.get("a"), store.get("b")]
        found += [store.add("n", 3), store.add("n", -1), store.get("n")]
        found += [store.compare_set("a", "wrong", "new"), store.compare_set("c", "", "new"), store.get("c")]
        found += [store.compare_set("d", "expected", "new"), store.check(["d"])]
        found += [store.delete_key("a"), store.delete_key("a"), store.check(["a"]), store.num_keys()]
        store.wait(["b", "c"])
        return found

    (found,) = simulate(fn, 1)
    assert found == [
        *(True, False, True, False, 2, b"\x00\xff", b"text"),
        *(3, 2, b"2"),
        *(b"\x00\xff", b"new", b"new"),
        *(b"expected", False),
        *(True, False, False, 3),
    ]


def test_a_store_waits_for_each_of_its_keys_on_ranks_alone():
    stores: list[Any] = []

    def fn() -> int:
        store = dist.distributed_c10d._get_default_store()
        stores.append(store)
        if dist.get_rank() == 0:
            store.wait(["one", "two"])
            return int(store.num_keys())
        store.set("one", "")
        dist.barrier(dist.new_group([1], use_local_synchronization=True))
        store.set("two", "")
        return 0

    for seed in range(3):
        assert simulate(fn, 2, seed=seed)[0] >= 2
    with pytest.raises(RuntimeError, match="a thread that is not a simulated rank waits for the store"):
        stores[-1].get("one")


def test_handles_of_work():
    """Results, success and sources, before and after completion; ``synchronize`` waits as ``wait`` does."""

    def fn() -> None:
        rank, ones = dist.get_rank(), torch.ones(2)
        work = dist.all_reduce(ones, async_op=True)
        work.synchronize()
        assert ones.tolist() == [2.0, 2.0] and work.is_success() and work.is_completed() and work.exception() is None
        assert work.result()[0] is ones
        again = dist.all_reduce(ones, async_op=True)
        again.block_current_stream()
        assert ones.tolist() == [4.0, 4.0] and again.wait()
        with pytest.raises(RuntimeError, match="known for a receive that has completed only"):
            work.source_rank()
        if rank == 0:
            dist.send(ones, 1)
        else:
            received = torch.zeros(2)
            work = dist.irecv(received)
            assert work is not None
            work.wait()
            assert received.tolist() == [4.0, 4.0] and work.source_rank() == 0
            waiting = dist.irecv(torch.zeros(1), 0, tag=3)
            assert waiting is not None and not waiting.is_success()
        dist.barrier()
        if rank == 0:
            dist.send(ones[:1], 1, tag=3)

    simulate(fn, 2, order=max)
    simulate(fn, 2, order=min)


def test_groups_belong_to_their_rank():
    groups: list[Any] = []

    def fn() -> None:
        group: Any = dist.group.WORLD
        groups.append(group)
        dist.barrier()
        rank = dist.get_rank()
        assert (group.rank(), group.size(), group.getBackendName(), group.group_name) == (
            rank,
            2,
            "simulated",
            "default",
        )
        assert group.group_desc == "default_pg" and repr(group) == (
            f"SimulatedProcessGroup(rank {rank} of group 'default' (ranks 0, 1))"
        )
        other = next(each for each in groups if each is not group)
        with pytest.raises(RuntimeError, match=f"rank {rank} uses a process group of simulated rank {1 - rank}"):
            other.own_rank()

    simulate(fn, 2)
    with pytest.raises(RuntimeError, match="a thread that is not a simulated rank uses"):
        groups[0].own_rank()


def test_default_tags_of_sends_and_receives_are_zero():
    def fn() -> float:
        group: Any = dist.group.WORLD
        here = torch.full((1,), float(dist.get_rank()))
        if dist.get_rank() == 0:
            group.send([here], 1).wait()
            dist.send(here + 5, 1, tag=0)
            group.send([here + 7], 1, 0).wait()
            return 0.0
        dist.recv(here, 0, tag=0)
        first = here.item()
        group.recv([here], 0).wait()
        second = here.item()
        group.recv_anysource([here]).wait()
        return 100 * first + 10 * second + here.item()

    assert simulate(fn, 2) == [0.0, 57.0]


def test_less_than_one_rank_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        simulate(dist.get_rank, 0)
