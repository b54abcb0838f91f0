"""State of each simulated rank, the caller's state that is restored afterwards, and whole programs."""

import ctypes
import gc
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from python_processes import run_python
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros
from torch.nn.functional import dropout

from maingrad.ddp.torch_internals.distributed import start_all_gather
from maingrad.launch import simulate
from maingrad.launch.simulation.group import SimulatedProcessGroup
from maingrad.launch.simulation.schedule import SimulatedRank
from maingrad.launch.simulation.simulate import SimulatedDeadlockError, SimulatedRankError


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw() -> tuple[Any, ...]:
    return torch.randn(3).tolist(), dropout(torch.ones(16)).tolist(), random.random(), np.random.rand()


@pytest.mark.parametrize("seed", range(4))
def test_random_state_is_each_ranks_own(seed: int):
    expected = []
    for rank in range(3):  # as three processes would draw
        seed_all(rank)
        expected.append([draw() for _ in range(5)])

    def fn() -> list[Any]:
        seed_all(dist.get_rank())
        drawn = []
        for step in range(5):
            drawn.append(draw())
            if step % 2:
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(1), async_op=True).wait()
        return drawn

    assert simulate(fn, 3, seed=seed) == expected


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_a_normal_number_that_lies_ready_is_its_ranks_own(generator: Any):
    """numpy draws two at once: every second one moves nothing in the generator's memory. And numbers that it draws one
    by one, from any generator."""
    kinds = ("randn", "randn", "rand", "rand", "randn", "rand")
    expected = []
    for rank in range(3):
        drawn = np.random.RandomState(generator(rank))
        expected.append([getattr(drawn, kind)() for kind in kinds])

    def fn() -> list[float]:
        np.random.set_state(np.random.RandomState(generator(dist.get_rank())).get_state(legacy=False))
        drawn = []
        for kind in kinds:
            drawn.append(getattr(np.random, kind)())
            dist.barrier()
        return drawn

    callers = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(0))
    try:
        assert simulate(fn, 3) == expected
    finally:
        np.random.set_bit_generator(callers)


def test_ranks_start_from_the_callers_random_state_and_the_caller_gets_it_back():
    seed_all(7)
    expected = draw()
    seed_all(7)

    def fn() -> tuple[Any, ...]:
        dist.barrier()
        return draw()

    assert simulate(fn, 3) == [expected] * 3
    assert simulate(draw, 3) == [expected] * 3, "a rank that begins when another one has drawn"
    assert draw() == expected
    seed_all(7)
    with pytest.raises(SimulatedRankError):
        simulate(lambda: (draw(), 1 / 0), 2)
    assert draw() == expected


def test_dtype_modes_and_context_are_each_ranks_own():
    def fn() -> tuple[Any, ...]:
        inherited = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        rank = dist.get_rank()
        torch.set_default_dtype((torch.float64, torch.float16, torch.bfloat16)[rank])
        torch.set_grad_enabled(rank == 1)
        dist.barrier()
        return *inherited, torch.ones(1).dtype, torch.is_grad_enabled()

    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        results = simulate(fn, 3)
        assert not torch.is_grad_enabled()
    dtypes = (torch.float64, torch.float16, torch.bfloat16)
    assert results == [(False, True, torch.float16, dtypes[rank], rank == 1) for rank in range(3)]
    assert torch.get_default_dtype() is torch.float32
    torch.set_autocast_enabled("cuda", True)  # torch.autocast itself wants a GPU
    try:
        assert simulate(lambda: torch.is_autocast_enabled("cuda"), 2) == [True, True]
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.inference_mode(), torch.device("meta"):
        assert simulate(lambda: torch.ones(1, device="cpu").is_inference(), 2) == [True, True]
    try:
        torch.set_default_device("meta")
        assert simulate(lambda: torch.ones(1).device.type, 2) == ["meta", "meta"]
    finally:
        torch.set_default_device(None)
    assert simulate(lambda: torch.ones(1).device.type, 2) == ["cpu", "cpu"]


def test_context_variables_are_each_ranks_own():
    variable.set("caller's")

    def fn() -> tuple[str, str]:
        inherited = variable.get()
        variable.set(f"rank {dist.get_rank()}'s")
        dist.barrier()
        return inherited, variable.get()

    assert simulate(fn, 2) == [("caller's", "rank 0's"), ("caller's", "rank 1's")]
    assert variable.get() == "caller's"


variable: ContextVar[str] = ContextVar("variable")


def test_distributed_is_as_before_when_it_was_not_initialised():
    assert not dist.is_initialized()
    world, helper, hook = dist.distributed_c10d._world, dist.distributed_c10d._new_process_group_helper, sys.excepthook

    def fn(fail: bool) -> bool:
        dist.new_group([0])
        mesh = dist.init_device_mesh("cpu", (2,))
        dist.barrier(group=mesh.get_group())
        if fail and dist.get_rank() == 1:
            raise ValueError("on purpose")
        return dist.is_initialized()

    assert simulate(fn, 2, False) == [True, True]
    with pytest.raises(SimulatedRankError):
        simulate(fn, 2, True)
    with pytest.raises(SimulatedDeadlockError):
        simulate(lambda: dist.get_rank() and dist.barrier(), 2)
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world is world
    assert dist.distributed_c10d._new_process_group_helper is helper
    assert sys.excepthook is hook
    assert dist.distributed_c10d._world.pg_map == {}


def test_a_real_group_lives_on():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = dist.group.WORLD
        sub = dist.new_group([0])

        def fn() -> tuple[int, str, float]:
            x = torch.ones(2)
            dist.all_reduce(x)
            return (
                dist.get_world_size(),
                dist.get_backend(),
                float(functional.all_reduce(x, "sum", dist.group.WORLD)[0]),
            )

        assert simulate(fn, 3) == [(3, "simulated", 9.0)] * 3
        with pytest.raises(SimulatedRankError):
            simulate(lambda: 1 / 0, 2)
        assert dist.group.WORLD is real
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        x = torch.ones(2)
        dist.all_reduce(x, group=sub)
        # Simulated ranks have each a registry of names; the process's serves all its threads again.
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch._C._distributed_c10d._resolve_process_group, real.group_name).result() is real
    finally:
        dist.destroy_process_group()


def test_a_rank_may_destroy_its_group_and_make_a_new_one():
    def fn() -> tuple[bool, float]:
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        initialised = dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=3)
        x = torch.ones(1)
        dist.all_reduce(x)
        return initialised, float(x)

    hook = sys.excepthook
    try:
        assert simulate(fn, 3) == [(False, 3.0)] * 3
    finally:
        sys.excepthook = hook  # init_process_group wraps it
    assert simulate(lambda: dist.destroy_process_group(), 2) == [None, None]
    assert not dist.is_initialized()


class Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``: ten numbers, summed over all of malloc's arenas."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def megabytes_in_use() -> float:
    """Allocated and not freed memory. Resident memory says less: malloc keeps what ended threads have freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    numbers = mallinfo2().numbers
    hblkhd, uordblks = numbers[4], numbers[7]
    return (hblkhd + uordblks) / 1e6


@pytest.mark.in_turn
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc counts the bytes in use")
def test_many_simulations_leave_no_threads_and_no_memory():
    def fn(fail: bool) -> Tensor:
        x = torch.ones(1_000_000)
        work = dist.all_reduce(x, async_op=True)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh["dp"].get_group())
        nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()
        if fail and dist.get_rank() == 1:
            raise ValueError("on purpose")
        work.wait()
        return x[:1].clone()

    def run(times: int) -> None:
        for seed in range(times):
            simulate(fn, 4, False, seed=seed)
            with pytest.raises(SimulatedRankError):
                simulate(fn, 4, True, seed=seed)
        gc.collect()

    def objects() -> int:
        return sum(type(o) in (SimulatedProcessGroup, SimulatedRank) for o in gc.get_objects())

    threads = threading.active_count()
    run(2)  # caches settle
    kept = objects()  # by torch's own caches of DTensor's meshes, from other tests
    before = megabytes_in_use()
    run(3)
    assert threading.active_count() == threads
    assert objects() <= kept  # those caches may drop objects
    assert megabytes_in_use() - before < 10, "one leaked tensor of each simulation would be 24 MB"


def test_tensors_of_ranks_are_freed_without_the_garbage_collector():
    def fn() -> tuple[weakref.ref[Tensor], Any]:
        x, y = torch.ones(1000), torch.empty(3, 1000)
        works = dist.all_reduce(x, async_op=True), start_all_gather(y, x, dist.group.WORLD)
        for work in works:
            work.wait()
        return weakref.ref(x), works[1]

    gc.disable()
    try:
        results = simulate(fn, 3)  # a handle that lives on keeps its own output alone
        assert len(results) == 3
        assert [alive() for alive, _ in results] == [None] * 3
    finally:
        gc.enable()


def test_backward_runs_on_the_thread_of_its_rank():
    def fn() -> tuple[list[str], list[float], list[float]]:
        torch.manual_seed(0)
        layer, names = nn.Linear(3, 2), []
        reduced = torch.empty(0)

        def hook(parameter: nn.Parameter) -> None:
            nonlocal reduced
            names.append(threading.current_thread().name)
            assert dist.get_rank() == int(names[-1].removeprefix("simulated-rank-"))
            reduced = parameter.grad.clone()
            dist.all_reduce(reduced)  # passes the baton in the middle of the backward

        layer.weight.register_post_accumulate_grad_hook(hook)
        layer(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        return names, layer.weight.grad.flatten().tolist(), reduced.flatten().tolist()

    for seed in range(4):
        for rank, (names, grad, reduced) in enumerate(simulate(fn, 4, seed=seed)):
            assert names == [f"simulated-rank-{rank}"]
            assert grad == [float(rank)] * 6
            assert reduced == [6.0] * 6


def train(data_parallel: str, dtype: torch.dtype = torch.float64) -> list[float]:
    """Three steps of SGD, each rank on its rows of one batch, with gradients averaged in one of three ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    batch = torch.randn(3, 8, 6, dtype=dtype)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapped = nn.parallel.DistributedDataParallel(model) if data_parallel == "torch ddp" else model
    if data_parallel == "torch fsdp":
        for module in (model[0], model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    for rows in batch:
        model.zero_grad()
        wrapped(rows.chunk(world)[rank]).square().mean().backward()
        if data_parallel == "loop":
            works = [dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return nn.utils.parameters_to_vector(whole).tolist()


@pytest.mark.in_turn
@pytest.mark.parametrize("data_parallel", ["loop", "torch ddp", "torch fsdp"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_training_equals_one_process(data_parallel: str, world_size: int):
    expected = train("none")
    for seed in range(3):
        results = simulate(train, world_size, data_parallel, seed=seed)
        assert all(result == results[0] for result in results)
        assert results[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.in_turn
def test_checkpoint_saved_on_four_ranks_loads_on_two(tmp_path: Path):
    whole = torch.arange(64.0).view(8, 8)

    def save(folder: Path) -> None:
        mesh = dist.init_device_mesh("cpu", (4,))
        state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "whole": whole, "step": 3}
        dcp.save(state, checkpoint_id=folder)

    def load(folder: Path) -> tuple[Tensor, Tensor, int]:
        mesh = dist.init_device_mesh("cpu", (2,))
        sharded = zeros(8, 8, device_mesh=mesh, placements=[Shard(1)])
        state: dict[str, Any] = {"sharded": sharded, "whole": torch.zeros(8, 8), "step": 0}
        dcp.load(state, checkpoint_id=folder)
        loaded = state["sharded"]
        assert isinstance(loaded, DTensor)
        assert loaded.to_local().shape == (8, 4)
        return loaded.full_tensor(), state["whole"], state["step"]

    for seed in range(3):
        simulate(save, 4, tmp_path / str(seed), seed=seed)
        for sharded, replicated, step in simulate(load, 2, tmp_path / str(seed), seed=seed):
            assert torch.equal(sharded, whole)
            assert torch.equal(replicated, whole)
            assert step == 3


_ONE_OPERATION_AFTER_THE_OTHER = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from maingrad.launch import simulate


def on_rank(size):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return float((distribute_tensor(torch.ones(size), mesh, [Shard(0)]) * 2).full_tensor().sum())


for size in range(4, 12):
    assert simulate(on_rank, 2, size) == [2.0 * size] * 2
"""


@pytest.mark.in_turn
def test_a_process_may_first_use_dtensors_on_simulated_ranks():
    """torch 2.11 freed what fake tensors need with the thread that first made one."""
    done = run_python("-c", _ONE_OPERATION_AFTER_THE_OTHER, timeout=60.0)
    assert done.returncode == 0, done.stderr
