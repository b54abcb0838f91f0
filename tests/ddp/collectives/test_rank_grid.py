"""Which ranks a gradient is reduced over: groups, meshes, instances, parts of the world, experts; what is refused."""

import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import assert_same, wrap
from stock_steps import backward, make_net, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.collectives import rank_grid
from maingrad.ddp.collectives.rank_grid import RankGrid, make_grid, make_grids, with_separate_gather
from maingrad.ddp.torch_internals.distributed import new_group_of_members
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

Ranks = list[int]


def ranks_of(group: dist.ProcessGroup | None) -> Ranks | None:
    return None if group is None else dist.get_process_group_ranks(group)


def described(grid: RankGrid) -> tuple[Ranks | None, Ranks | None, int, int]:
    """The inner ranks, the outer ranks, and this rank's position in both."""
    return ranks_of(grid.inner), ranks_of(grid.outer), grid.inner_rank, grid.outer_rank


# ---- Grids. ----


def test_without_torch_distributed_there_is_one_rank() -> None:
    grid = make_grid(None)
    assert grid == RankGrid(None, None, None, assumed=True)
    assert (grid.size, grid.inner_size, grid.inner_rank, grid.outer_size, grid.outer_rank) == (1, 1, 0, 1, 0)
    assert list(grid.axes) == []
    assert grid.sum(torch.tensor(3.0)) == 3


GROUPS: dict[str, tuple[int, Callable[[], Any], int, list[Any]]] = {
    # ranks of the world, what is given, instances, [(inside, across) of each rank that is a member]
    "the default group": (3, lambda: None, 1, [([0, 1, 2], None)] * 3),
    "two instances": (
        4,
        lambda: None,
        2,
        [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])],
    ),
    "as many instances as ranks": (2, lambda: None, 2, [([0], [0, 1]), ([1], [0, 1])]),
    "a part of the world": (4, lambda: dist.new_group([1, 3]), 1, [None, ([1, 3], None), None, ([1, 3], None)]),
    "a part of the world in two instances": (
        6,
        lambda: dist.new_group([0, 2, 3, 5]),
        2,
        [([0, 2], [0, 3]), None, ([0, 2], [2, 5]), ([3, 5], [0, 3]), None, ([3, 5], [2, 5])],
    ),
    "a mesh of one dim": (3, lambda: init_device_mesh("cpu", (3,)), 1, [([0, 1, 2], None)] * 3),
    "context-parallel ranks alone": (
        3,
        lambda: init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)),
        1,
        [([0, 1, 2], None)] * 3,
    ),
    "a mesh of two dims": (
        4,
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in")),
        1,
        [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])],
    ),
    "a mesh of two dims and the number that it says": (
        2,
        lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("out", "in")),
        2,
        [([0], [0, 1]), ([1], [0, 1])],
    ),
    "two dims of a mesh of three": (
        8,
        lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("out", "tensor", "in"))["out", "in"],
        1,
        [([r // 4 * 4 + r // 2 % 2 * 2 + i for i in (0, 1)], [r % 4, r % 4 + 4]) for r in range(8)],
    ),
    "replicas, shards and context-parallel ranks": (
        8,
        lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp")),
        1,
        [([r // 4 * 4 + i for i in range(4)], [r % 4, r % 4 + 4]) for r in range(8)],
    ),
    "a mesh over a part of the world": (
        4,
        lambda: DeviceMesh("cpu", [1, 3]),
        1,
        [None, ([1, 3], None), None, ([1, 3], None)],
    ),
}


def grid_of(make: Callable[[], Any], instances: int, members: Ranks) -> Any:
    given = make()
    if dist.get_rank() not in members:
        with pytest.raises(ValueError, match=rf"rank {dist.get_rank()} is not in process_group: .*wrap on its members"):
            make_grid(given, num_instances=instances)
        return None
    if isinstance(given, DeviceMesh):  # the part of a larger mesh that this rank is in
        members = given.mesh.flatten().tolist()
    grid = make_grid(given, num_instances=instances)
    inner, outer, inner_rank, outer_rank = described(grid)
    inner_group = grid.inner
    assert inner is not None
    assert inner[inner_rank] == dist.get_rank()
    assert outer is None or outer[outer_rank] == dist.get_rank()
    assert grid.size == len(members)
    assert grid.inner_size == len(inner)
    assert [group.size() for group in grid.axes] == [len(axis) for axis in (inner, outer) if axis and len(axis) > 1]
    assert grid.gather is grid.inner, "no communicator more than needed"
    if isinstance(given, DeviceMesh):
        assert make_grid(given, num_instances=instances).inner is inner_group, "one for all units that get the mesh"

    # Sums go over all members, whatever the axes; broadcasts come from the first.
    assert grid.sum(torch.tensor(2.0 ** dist.get_rank())) == sum(2.0**rank for rank in members)
    told = torch.tensor(float(dist.get_rank()))
    grid.broadcast(told)
    assert told == members[0]
    return inner, outer


@pytest.mark.parametrize("name", GROUPS)
def test_a_grid_has_its_ranks_inside_and_across(name: str) -> None:
    world, make, instances, expected = GROUPS[name]
    members = [rank for rank, place in enumerate(expected) if place is not None]
    assert simulate(grid_of, world, make, instances, members) == expected


def test_a_grid_may_have_the_ranks_of_whole_copies() -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
        column = make_grid(mesh["outer", "inner"])
        grid = column._replace(tensor=mesh["tp"].get_group())
        assert (column.size, grid.size, len(list(grid.axes))) == (4, 8, 3)
        assert (column.leaves_ranks_out, grid.leaves_ranks_out) == (True, False)
        assert (
            len({column.groups, grid.groups, grid._replace(outer=None).groups, grid._replace(gather=None).groups}) == 3
        )
        assert grid.sum(torch.tensor(2.0 ** dist.get_rank())) == 2**8 - 1
        told = torch.tensor(float(dist.get_rank()))
        grid.broadcast(told)
        assert told == 0
        apart = torch.full((2, 4), float(dist.get_rank()))
        grid.broadcast(apart[:, ::2])
        assert apart[:, ::2].count_nonzero() == 0 and (apart[:, 1::2] == dist.get_rank()).all()
        assert grid.is_first is (dist.get_rank() == 0)

    simulate(on_each_rank, 8)


def communicators(instances: int, separate: bool) -> tuple[Ranks | None, Ranks | None, bool]:
    grid = make_grid(None, num_instances=instances)
    grid = with_separate_gather(grid) if separate else grid
    return ranks_of(grid.inner), ranks_of(grid.gather), grid.gather is grid.inner


def test_gathers_have_a_communicator_of_their_own_where_they_overlap() -> None:
    for instances in (1, 2):
        for inner, gather, same in simulate(communicators, 4, instances, True):
            assert inner == gather
            assert not same
    assert all(same for _, _, same in simulate(communicators, 4, 4, True)), "one rank gathers nothing"
    assert all(same for _, _, same in simulate(communicators, 4, 2, False))


@pytest.mark.parametrize("copy_engines", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_every_kind_of_parameters_is_gathered_apart_by_copy_engines_if_asked(
    tensor: bool, copy_engines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options_of_groups: list[Any] = []

    def make(ranks: Ranks, pg_options: Any, **options: Any) -> dist.ProcessGroup:
        options_of_groups.append(pg_options)
        return new_group_of_members(ranks, **options)

    monkeypatch.setattr(rank_grid, "new_group_of_members", make)
    monkeypatch.setattr(rank_grid, "zero_cta_options", lambda: "copy engines")

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ranks, tensor_ranks = (mesh["dp"], mesh["tp"].get_group()) if tensor else (None, None)
        grids = make_grids(
            ranks,
            every_other(),
            tensor_ranks=tensor_ranks,
            has_experts=True,
            num_instances=1,
            separate_gather=True,
            copy_engines=copy_engines,
        )
        for kind, grid in grids.items():
            assert grid.gather is not grid.inner, kind
            assert ranks_of(grid.gather) == ranks_of(grid.inner)

    simulate(on_each_rank, 4)
    gathering = 4 * (3 if tensor else 2)
    joined = 4 if tensor else 0  # all ranks, for reductions
    assert (
        Counter(options_of_groups)
        == Counter({"copy engines": gathering, None: joined} if copy_engines else {None: gathering + joined})
        + Counter()
    )


def test_a_rank_alone_among_others_makes_as_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 names later groups after their number."""
    made: Counter[int] = Counter()

    def make(ranks: Ranks, **options: Any) -> dist.ProcessGroup:
        made[dist.get_rank()] += 1
        return new_group_of_members(ranks, **options)

    monkeypatch.setattr(rank_grid, "new_group_of_members", make)

    def on_each_rank() -> None:
        parts = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        with_separate_gather(make_grid(parts[dist.get_rank() % 2]))

    simulate(on_each_rank, 3)
    assert made == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(("said", "taken"), [((10, 30), 30), ((30, 10), 30), ((None, 10), 10), ((None, None), None)])
def test_groups_that_are_made_wait_as_long_as_the_most_patient_backend(
    said: tuple[int | None, int | None], taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's default is 30 minutes, and NCCL's is 10."""
    minutes = {kind: each and timedelta(minutes=each) for kind, each in zip(("cpu", "cuda"), said, strict=True)}
    made: list[Any] = []
    monkeypatch.setattr(rank_grid, "new_group_of_members", lambda ranks, timeout, **_: made.append(timeout))
    monkeypatch.setattr(rank_grid, "timeout_on", lambda group, device: minutes[device.type])
    monkeypatch.setattr(rank_grid.dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(rank_grid.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_grid.dist, "get_process_group_ranks", lambda group: [0])
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with_separate_gather(RankGrid(group, None, group))
    assert made == [taken and timedelta(minutes=taken)]


def backends_of_groups_made_for(instances: int) -> list[str]:
    """The world's backend is gloo. Another one stands for gloo in a world of NCCL."""
    if "of_others" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "of_others",
            lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
            devices=["cpu"],
        )
    grid = with_separate_gather(make_grid(dist.new_group([0, 1], backend="of_others"), num_instances=instances))
    return [dist.get_backend_config(group) for group in (grid.inner, grid.outer, grid.gather) if group is not None]


def test_groups_that_are_made_have_the_backend_of_the_given_one() -> None:
    for instances in (1, 2):
        for found in run_ranks(backends_of_groups_made_for, 2, instances):
            assert set(found) == {"cpu:of_others"}


def expert_grids() -> tuple[Any, Any]:
    rank = dist.get_rank()
    experts = dist.new_group([rank % 2, rank % 2 + 2, rank % 2 + 4, rank % 2 + 6], use_local_synchronization=True)
    grids = make_grids(None, experts, has_experts=True, num_instances=2, separate_gather=False)
    return described(grids["dense"])[:2], described(grids["expert"])[:2]


def test_experts_have_as_many_instances_of_their_own_ranks() -> None:
    found = simulate(expert_grids, 8)
    assert found[0] == (([0, 1, 2, 3], [0, 4]), ([0, 2], [0, 4]))
    assert found[7] == (([4, 5, 6, 7], [3, 7]), ([5, 7], [3, 7]))


@pytest.mark.parametrize("tensor", [False, True])
def test_without_a_group_of_their_own_experts_are_everywhere(tensor: bool) -> None:
    """One tensor-parallel rank is as good as none."""

    def same() -> bool:
        grids = make_grids(
            None,
            None,
            tensor_ranks=groups_of_one() if tensor else None,
            has_experts=True,
            num_instances=1,
            separate_gather=True,
        )
        return grids["expert"] is grids["dense"] is grids["slice"]

    assert all(simulate(same, 2))


def test_experts_of_tensor_parallel_ranks_may_be_in_other_instances() -> None:
    """Everyone is the ranks of all instances."""

    def on_each_rank() -> tuple[Any, Any, Any]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
        grids = make_grids(
            mesh["outer", "inner"],
            mesh["outer"],
            tensor_ranks=mesh["tp"].get_group(),
            has_experts=True,
            num_instances=1,
            separate_gather=False,
        )
        return described(grids["dense"])[:2], described(grids["slice"])[:2], described(grids["expert"])[:2]

    found = simulate(on_each_rank, 8)
    assert found[0] == (([0, 1, 2, 3], [0, 4]), ([0, 2], [0, 4]), ([0, 4], None))
    assert found[7] == (([4, 5, 6, 7], [3, 7]), ([5, 7], [3, 7]), ([3, 7], None))


def test_a_process_alone_may_have_the_others_as_slices_or_as_replicas() -> None:
    def on_each_rank() -> None:
        options: Any = {"has_experts": True, "num_instances": 1, "separate_gather": False}
        for ranks, tensor_ranks in ((WORLD_OF_ONE, neighbours()), (neighbours(), None)):
            grids = make_grids(ranks, WORLD_OF_ONE, tensor_ranks=tensor_ranks, **options)
            assert ranks_of(grids["dense"].inner) == [dist.get_rank() // 2 * 2 + n for n in (0, 1)]
            assert grids["expert"].size == 1
        pair = neighbours()
        assert (
            make_grids(groups_of_one(), None, tensor_ranks=pair, **options | {"has_experts": False})["dense"].inner
            is pair
        )
        alone = make_grids(WORLD_OF_ONE, WORLD_OF_ONE, **options)
        assert alone["expert"] is alone["dense"]

    simulate(on_each_rank, 4)


# ---- What fits nowhere. ----


def groups_of_one() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def neighbours() -> dist.ProcessGroup:
    first = dist.get_rank() // 2 * 2
    return dist.new_group([first, first + 1], use_local_synchronization=True)


def every_other() -> dist.ProcessGroup:
    first = dist.get_rank() % 2
    return dist.new_group([first, first + 2], use_local_synchronization=True)


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "instances that do not divide": (
        lambda: {"instances": 3},
        "num_distributed_optimizer_instances = 3 does not divide the 4 ranks of process_group",
    ),
    "more instances than ranks": (lambda: {"instances": 8}, "= 8 does not divide the 4 ranks of process_group"),
    "instances that do not divide the experts": (
        lambda: {"instances": 2, "experts": groups_of_one()},
        "= 2 does not divide the 1 ranks of expert_process_group",
    ),
    "another number than the mesh says": (
        lambda: {"ranks": init_device_mesh("cpu", (2, 2)), "instances": 4},
        "num_distributed_optimizer_instances is 4, and the mesh of process_group has 2 instances: leave the option out",
    ),
    "a number for a mesh of one dim": (
        lambda: {"ranks": init_device_mesh("cpu", (4,)), "instances": 2},
        "is 2, and the mesh of process_group has 1 instances.*a mesh of two dims",
    ),
    "a mesh of three dims": (
        lambda: {"ranks": init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))},
        re.escape("process_group: a data-parallel mesh is (inner) or (outer, inner); this one has 3 dims ('a', 'b', '"),
    ),
    "a mesh of three dims, the first of context-parallel ranks": (
        lambda: {"ranks": init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("cp", "replicate", "shard"))},
        re.escape("this one has 3 dims ('cp', 'replicate', 'shard'): flatten those that share shards"),
    ),
    "a mesh of three dims for experts": (
        lambda: {"experts": init_device_mesh("cpu", (1, 2, 2))},
        r"expert_process_group: a data-parallel mesh is \(inner\) or \(outer, inner\); this one has 3 dims",
    ),
    "experts elsewhere": (
        lambda: {"ranks": neighbours(), "experts": every_other()},
        r"expert_process_group has ranks \[\d\], which are not in process_group \[\d, \d\]",
    ),
    "experts elsewhere, on a mesh": (
        lambda: {"ranks": neighbours(), "experts": init_device_mesh("cpu", (2, 2))},
        r"expert_process_group has ranks \[\d, \d\], which are not in process_group \[\d, \d\]",
    ),
}


def refused(make: Callable[[], dict[str, Any]], message: str) -> None:
    given = make()
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=given.get("instances", 1)
    )
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(
            Mixed(), config, process_group=given.get("ranks"), expert_process_group=given.get("experts")
        )


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ranks_are_refused_by_name(wrong: str) -> None:
    make, message = WRONG[wrong]
    simulate(refused, 4, make, message)


@pytest.mark.parametrize("option", ["process_group", "expert_process_group"])
def test_ranks_that_are_no_group_are_refused_by_name(option: str) -> None:
    with pytest.raises(TypeError, match=rf"^{option} is a ProcessGroup, a DeviceMesh, .* or None; got list"):
        DistributedDataParallel(Mixed(), **{option: [0, 1]})


def test_a_group_of_experts_without_experts_is_refused() -> None:
    def wrap_plain() -> None:
        with pytest.raises(ValueError, match=r"expert_process_group has no effect: no parameter.*allreduce = False"):
            DistributedDataParallel(make_net(), expert_process_group=groups_of_one())

    simulate(wrap_plain, 2)


def test_instances_without_torch_distributed_are_refused() -> None:
    with pytest.raises(ValueError, match="= 2 does not divide the 1 ranks of process_group"):
        wrap(make_net(), use_distributed_optimizer=True, num_distributed_optimizer_instances=2)


# ---- Training on a part of the world. ----


def train_on_part(members: Ranks, config: dict[str, Any], of_mesh: bool) -> dict[str, Tensor] | None:
    """``stock_steps.train`` on the members of a group; a rank draws the batches of its rank in the group."""
    group: Any = DeviceMesh("cpu", members) if of_mesh else dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    ddp = DistributedDataParallel(make_net(), DistributedDataParallelConfig(**config), process_group=group)
    optimizer = DistributedOptimizer(ddp, lr=0.02, max_grad_norm=0.1)
    place = members.index(dist.get_rank())
    for step in range(3):
        backward(ddp, step, torch.float32, rank=place)
        optimizer.step()
        ddp.zero_grad_buffer()
    return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}


@pytest.mark.parametrize(("instances", "of_mesh"), [(1, False), (2, False), (1, True)])
@pytest.mark.sampled(2)
def test_a_part_of_the_world_trains_as_a_world_of_its_own(instances: int, of_mesh: bool) -> None:
    config = {"use_distributed_optimizer": True, "bucket_size": 300, "overlap_param_gather": True}
    instanced = {**config, "num_distributed_optimizer_instances": instances}
    options = {"lr": 0.02, "max_grad_norm": 0.1}
    expected = simulate(train, 4, torch.float32, range(3), instanced, options)[0][0][-1]
    members = [1, 2, 4, 5]
    for rank, weights in enumerate(simulate(train_on_part, 6, members, instanced, of_mesh)):
        assert (weights is not None) is (rank in members)
        if weights is not None:
            assert_same(weights, expected)


# ---- The scale of experts' gradients. ----


class Mixed(nn.Module):
    """The gradients of its dense parameter and of its expert equal the input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(5))
        self.expert = nn.Parameter(torch.zeros(3))
        self.expert.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.dense.sum() + self.expert.sum())


def mean_grads(config: dict[str, Any], tokens: int | None, per_expert: int) -> dict[str, list[float]]:
    """The gradient of each parameter on the ranks that hold it; rank r's own is r + 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stride = size // per_expert
    same = dist.new_group(list(range(rank % stride, size, stride)), use_local_synchronization=True)
    ddp = DistributedDataParallel(Mixed(), DistributedDataParallelConfig(**config), expert_process_group=same)
    ddp(torch.tensor(rank + 1.0)).backward()
    ddp.finish_grad_sync(*(() if tokens is None else (torch.tensor(tokens * (rank + 1)),)))
    held: dict[str, list[float]] = {}
    for bucket in ddp.buckets:
        first, last = ddp.owned_range(bucket.layout)
        for slot in bucket.layout.slots:
            start, end = (min(max(place - bucket.layout.start, first), last) for place in (slot.start, slot.end))
            held[slot.spec.name] = bucket.grad_data[start:end].tolist()
    return held


SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(
    "config", [{}, SHARDED, {**SHARDED, "num_distributed_optimizer_instances": 2}], ids=["whole", "sharded", "hybrid"]
)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.sampled(4)
def test_experts_are_divided_by_the_dense_ranks_or_by_all_tokens(config: dict[str, Any], per_token: bool) -> None:
    """Four ranks with gradients 1, 2, 3, 4; experts of ranks 0 and 2, of 1 and 3. Their tokens came from all four, so
    that Megatron-core divides by four as well. Per token: ranks have 10, 20, 30, 40 tokens."""
    divisor = 100 if per_token else 4
    tokens = 10 if per_token else None
    found = simulate(mean_grads, 4, {**config, "calculate_per_token_loss": per_token}, tokens, 2)
    for rank, held in enumerate(found):
        assert set(held["dense"]) <= {torch.tensor((1 + 2 + 3 + 4) / divisor).item()}
        own = (1 + 3) if rank % 2 == 0 else (2 + 4)
        assert set(held["expert"]) <= {torch.tensor(own / divisor).item()}
    copies = 4 if not config else 2 if "num_distributed_optimizer_instances" in config else 1
    assert sum(len(held["dense"]) for held in found) == 5 * copies
    # Each of two experts is held by two ranks, whole where every instance has one of them.
    assert sum(len(held["expert"]) for held in found) == 3 * 2 * (1 if config == SHARDED else 2)


@pytest.mark.parametrize("per_expert", [1, 4])
def test_experts_on_one_rank_and_on_all(per_expert: int) -> None:
    for rank, held in enumerate(simulate(mean_grads, 4, {}, None, per_expert)):
        assert held["dense"] == [2.5] * 5
        assert held["expert"] == [2.5 if per_expert == 4 else (rank + 1) / 4] * 3


@pytest.mark.parametrize("library", ["ddp", "fsdp"])
def test_models_of_uneven_groups_do_not_part_the_ranks(library: str) -> None:
    """Ranks 0 and 2 share one model, rank 1 has one alone; then all of them share one."""

    def wrapped(group: dist.ProcessGroup | None) -> nn.Module:
        torch.manual_seed(0)
        if library == "fsdp":
            return fully_shard(nn.Linear(4, 4), mesh=group)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        return DistributedDataParallel(nn.Linear(4, 4), config, process_group=group)

    def run() -> list[float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        losses = []
        for group in (groups[dist.get_rank() % 2], None):
            model = wrapped(group)
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            losses.append(loss.item())
        return losses

    assert len({tuple(losses) for losses in simulate(run, 3)}) == 1


def groups_after_unlike_models(kind: str) -> list[float]:
    """Ranks 0 and 2 have a model of two units that rank 1 lacks, or has alone. Then everybody makes groups again."""
    rank = dist.get_rank()
    parts = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    torch.manual_seed(0)
    if kind == "everybody has one" or rank != 1:
        part = parts[rank % 2]
        unlike = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(unlike[0], part)
        fully_shard(unlike, part)
        unlike(torch.ones(1, 2)).sum().backward()
        sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
        DistributedDataParallel(nn.Linear(2, 2), sharded, process_group=part)
    together = torch.ones(1)
    dist.all_reduce(together, group=dist.new_group([0, 1, 2]))
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model)
    model(torch.full((1, 2), float(rank))).sum().backward()
    return [together.item(), model.weight.grad.full_tensor().sum().item()]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["everybody has one", "two have one"])
@pytest.mark.parametrize("processes", [True, False])
def test_ranks_with_other_models_meet_in_later_groups(kind: str, processes: bool) -> None:
    """torch names groups by their number, which differs between ranks with other models (2.14)."""
    if kind != "everybody has one" and torch.__version__ < "2.14":
        pytest.skip("this torch names groups by how many a rank is in, which differs here")
    run = run_ranks if processes else simulate
    assert run(groups_after_unlike_models, 3, kind) == [[3.0, 2.0]] * 3


def group_of_two_in_a_later_world(folder: str) -> float:
    """Ranks 0 and 1 make a group of their own in a world, and again in a later one, where ranks moved on."""
    own = dist.get_rank()
    dist.destroy_process_group()
    for number in range(2):
        rank, timeout = (own + number) % 3, timedelta(seconds=5)
        method = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3, timeout=timeout)
        together = torch.ones(1)
        if rank < 2:
            dist.all_reduce(together, group=new_group_of_members([0, 1]))
        dist.barrier()  # the third rank would leave while the others still connect to it
        if not number:
            dist.destroy_process_group()
    return together.item()


def test_a_later_world_counts_its_groups_anew(tmp_path: Path) -> None:
    """Processes that had other ranks would look for the same group under different names."""
    assert run_ranks(group_of_two_in_a_later_world, 3, str(tmp_path)) == [2.0, 1.0, 2.0]
