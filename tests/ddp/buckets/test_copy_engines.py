"""When gathers of parameters run on copy engines: the rule of "auto", what ranks tell each other, and refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reaching_ranks import everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.buckets import buffer, copy_engines
from maingrad.ddp.buckets.buffer import MappedPool
from maingrad.ddp.buckets.copy_engines import (
    MIN_SHARD_NBYTES,
    Gather,
    check_copy_engines,
    choose_copy_engines,
    large_enough,
)
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.launch import simulate

CPU = torch.device("cpu")
LARGE = 2 * MIN_SHARD_NBYTES


def choices(num_ranks: int, nbytes: int = LARGE) -> list[bool]:
    def choose() -> bool:
        world = dist.group.WORLD
        assert world is not None
        return choose_copy_engines([Gather(nbytes, world)], [world], CPU, FailureReporter())

    return simulate(choose, num_ranks)


# ---- The rule of "auto". ----


@pytest.mark.parametrize(
    ("nbytes", "size", "chosen"),
    [
        ([], 2, False),
        ([LARGE], 2, True),
        ([LARGE - 2], 2, False),
        ([LARGE], 4, False),  # a shard is half as large
        ([2 * LARGE], 4, True),
        ([LARGE, LARGE // 2, LARGE // 2], 2, True),
        ([LARGE, LARGE // 2, LARGE // 2 + 2], 2, False),
    ],
)
def test_half_of_the_bytes_are_in_buckets_of_large_shards(nbytes: list[int], size: int, chosen: bool) -> None:
    group: Any = SimpleNamespace(size=lambda: size)
    assert large_enough([Gather(each, group) for each in nbytes]) is chosen


def test_all_ranks_choose_copy_engines_where_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch)
    assert choices(2) == [True] * 2
    assert choices(2, nbytes=LARGE - 2) == [False] * 2
    monkeypatch.setattr(copy_engines, "_peers", None)
    assert not choose_copy_engines([], [], CPU, FailureReporter()), "nobody is asked where nothing is gathered"


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_that_cannot_decides_for_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, _fits_process=lambda _: dist.get_rank() != rank)
    assert choices(3, nbytes=2 * LARGE) == [False] * 3


def test_ranks_that_do_not_reach_each_other_gather_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two GPUs: also ranks whose own pair of groups is on one host choose as the others do."""

    def peers(_: torch.device) -> copy_engines._Peers:
        host = dist.get_rank() // 2
        return copy_engines._Peers(f"gpu {dist.get_rank()}", frozenset({f"gpu {2 * host}", f"gpu {2 * host + 1}"}))

    everywhere(monkeypatch, _peers=peers)
    assert choices(2) == [True] * 2
    assert choices(4, nbytes=2 * LARGE) == [False] * 4


def test_groups_on_one_host_each_are_chosen_among_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hybrid sharding: gathers stay inside a host, and only replicas' reductions leave the host."""

    def peers(_: torch.device) -> copy_engines._Peers:
        host = dist.get_rank() // 2
        return copy_engines._Peers(f"gpu {dist.get_rank()}", frozenset({f"gpu {2 * host}", f"gpu {2 * host + 1}"}))

    everywhere(monkeypatch, _peers=peers)

    def choose() -> bool:
        inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
        return choose_copy_engines([Gather(LARGE, inner)], [inner, outer], CPU, FailureReporter())

    assert simulate(choose, 4) == [True] * 4


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ({}, True),
        ({"pools": 1}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, True),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, True),
        ({"nccl": (2, 27, 7)}, False),
        ({"nccl": (2, 28, 0)}, True),
    ],
)
def test_each_condition_of_a_process_counts(said: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, said.get(name, ""))
    monkeypatch.setattr(MappedPool, "num_made", said.get("pools", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: said.get("capability", (9, 0)))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: said.get("nccl", (2, 29, 1)))
    assert copy_engines._fits_process(torch.device("cuda", 0)) is fits


@pytest.mark.parametrize(("index", "own", "reached"), [(0, 0, {1}), (1, 1, {0}), (2, 2, set()), (None, 1, {0})])
def test_a_rank_tells_its_gpu_and_those_that_it_reaches(
    index: int | None, own: int, reached: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three GPUs, of which the first two reach each other."""

    def reaches(one: int, other: int) -> bool:
        assert one != other, "CUDA knows no peer of itself"
        return {one, other} == {0, 1}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda each: SimpleNamespace(uuid=f"GPU-{each}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    assert copy_engines._peers(device) == (f"GPU-{own}", {f"GPU-{each}" for each in reached})


@pytest.mark.parametrize("grouped", [False, True])
def test_bytes_are_those_of_parameters_that_ranks_gather(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of bf16, whose gradients are of fp32; an expert that its rank has alone is not gathered."""
    seen: dict[int, list[tuple[int, int]]] = {}

    def choose(gathers: list[Gather], *_: object) -> bool:
        seen[dist.get_rank()] = [(each.nbytes, each.group.size()) for each in gathers]
        return False

    monkeypatch.setattr(copy_engines, "choose_copy_engines", choose)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )

    def run() -> None:
        model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
        model[1].weight.allreduce = False
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()] if grouped else WORLD_OF_ONE
        ddp = DistributedDataParallel(model, config, expert_process_group=alone)
        dense, expert = ddp.grids["dense"], ddp.grids["expert"]
        assert dense.gather is not dense.inner, "overlapped gathers have a group of their own"
        assert {id(grid) for grid in ddp.failures.grids} == {id(dense), id(expert)}, "a failure looks at this group too"
        assert expert.gather is expert.inner and (grouped or expert.gather is None)

    simulate(run, 2)
    assert seen == {rank: [(16 * 64 * 2, 2)] for rank in range(2)}


@pytest.mark.parametrize("chosen", [False, True])
def test_all_ranks_of_the_model_choose_together(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with other slices too; and kinds of parameters with the same ranks share one group."""
    asked: list[set[int]] = []
    made: list[str] = []
    separate = copy_engines.with_separate_gather

    def choose(gathers: list[Gather], axes: Any, *_: object) -> bool:
        asked.append({rank for group in axes for rank in dist.get_process_group_ranks(group)})
        return chosen

    def make(grid: Any, **options: Any) -> Any:
        made.append(f"{len(grid.ranks)} ranks")
        assert options == {"copy_engines": chosen}
        return separate(grid)

    monkeypatch.setattr(copy_engines, "choose_copy_engines", choose)
    monkeypatch.setattr(copy_engines, "with_separate_gather", make)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        DistributedDataParallel(
            nn.Linear(4, 4), config, process_group=mesh["dp"], tensor_parallel_group=mesh["tp"].get_group()
        )

    simulate(run, 4)
    assert asked == [{0, 1, 2, 3}] * 4
    assert sorted(made) == ["2 ranks"] * 4 + ["4 ranks"] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_only_gathers_that_overlap_have_a_group_of_their_own(overlap: bool) -> None:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap
    )

    def run() -> bool:
        ddp = DistributedDataParallel(nn.Linear(4, 4), config)
        grid = ddp.grids["dense"]
        assert {id(each) for each in ddp.failures.grids} == {id(grid)}
        return grid.gather is not grid.inner

    assert simulate(run, 2) == [overlap] * 2


# ---- Refusals. ----


@pytest.mark.parametrize(
    ("backends", "lacks", "exist"),
    [
        ({"nccl"}, "", True),
        (set(), "", True),  # a world of one
        ({"gloo"}, "", False),
        ({"gloo", "nccl"}, "", False),
        ({"nccl"}, "zero_cta_options", False),
        ({"nccl"}, "backend_on", False),
    ],
)
def test_what_cannot_gather_by_copy_engines_is_refused_where_it_is_asked_to(
    backends: set[str], lacks: str, exist: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engines, "zero_cta_options", lambda: None if lacks == "zero_cta_options" else object())
    monkeypatch.setattr(copy_engines, "backend_on", None if lacks == "backend_on" else lambda *_: object())
    gpu = torch.device("cuda", 0)
    for wanted in (False, "auto") if not exist else (False, "auto", True):
        check_copy_engines(wanted, backends, gpu, "the option")  # type: ignore[arg-type]
    if not exist:
        got = ", ".join(sorted(backends))
        with pytest.raises(ValueError, match=f"the option needs parameters on CUDA, .*; got cuda:0 and {got};"):
            check_copy_engines(True, backends, gpu, "the option")
    with pytest.raises(ValueError, match=r"the option needs parameters on CUDA, .*; got cpu"):
        check_copy_engines(True, backends, CPU, "the option")


# ---- Mapped memory. ----


def test_memory_is_allocated_in_the_pool_and_mapped_by_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: notes.append(name)

    @contextmanager
    def use_mem_pool(pool: object, device: torch.device) -> Iterator[None]:
        notes.append(f"in {pool}")
        yield
        notes.append("out")

    backend = SimpleNamespace(
        mem_allocator="NCCL's memory", register_mem_pool=lambda pool, *, symm: notes.append(f"map {pool} {symm}")
    )
    monkeypatch.setattr(buffer, "backend_on", lambda *_: backend)
    monkeypatch.setattr(dist, "all_reduce", noted("communicator"))
    monkeypatch.setattr(dist, "barrier", noted("barrier"))
    monkeypatch.setattr(torch.cuda, "synchronize", noted("synchronize"))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(MappedPool, "num_made", 0)
    (layout,) = DistributedDataParallel(nn.Linear(2, 2)).plan.buffers
    pool = "pool of NCCL's memory"
    group: Any = object()
    buffer.FlatBuffer(layout, torch.float32, CPU, mapped_in=group)
    waits = ["synchronize", "barrier"]
    assert notes == ["communicator", f"in {pool}", "out", *waits, f"map {pool} True", *waits]
    assert MappedPool.num_made == 1
    notes.clear()
    memory = buffer.ReleasableBuffer(8, torch.float32, CPU)
    memory.pool = MappedPool(group, CPU)
    for taken in (["communicator"], [f"in {pool}", "out"]):
        assert notes == taken
        notes.clear()
        memory.release()
        memory.take()
    buffer.FlatBuffer(layout, torch.float32, CPU)
    assert MappedPool.num_made == 2
