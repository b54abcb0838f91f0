"""The ranks of ``ep``: which of them hold all experts together, and which the same ones."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_models import tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from maingrad.ddp.collectives.rank_grid import WORLD_OF_ONE, make_grid
from maingrad.launch import parallelize, simulate
from maingrad.launch.parallelizing.experts import mesh_of, same_place, share_experts


def test_the_ranks_that_hold_the_same_experts() -> None:
    """Two instances of four ranks, of which neighbours hold all experts together."""

    def groups(hybrid: bool) -> tuple[Any, ...]:
        grid = make_grid(init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner")) if hybrid else None)
        ep = mesh_of(2, grid)
        same: Any = same_place(ep, grid)
        if not hybrid:
            return ep.mesh.tolist(), dist.get_process_group_ranks(same)
        names = same.mesh_dim_names
        return ep.mesh.tolist(), names, [dist.get_process_group_ranks(same.get_group(name)) for name in names]

    for rank, found in enumerate(simulate(groups, 8, True)):
        first = rank // 2 * 2
        alike = [4 * (rank // 4) + rank % 2 + step for step in (0, 2)]
        assert found == ([first, first + 1], ("outer", "inner"), [[rank % 4, rank % 4 + 4], alike])
    for rank, found in enumerate(simulate(groups, 8, False)):
        assert found[1] == list(range(rank % 2, 8, 2))


def test_one_rank_of_an_instance_holds_the_same_experts_as_those_of_other_instances() -> None:
    """Where all ranks of an instance share them out; without instances nobody else has them."""

    def groups() -> tuple[Any, ...]:
        grid = make_grid(init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner")))
        same: Any = same_place(mesh_of(3, grid), grid)
        ranks = [dist.get_process_group_ranks(same.get_group(name)) for name in same.mesh_dim_names]
        alone = same_place(mesh_of(6, make_grid(None)), make_grid(None))
        return same.mesh_dim_names, ranks, alone is WORLD_OF_ONE

    for rank, found in enumerate(simulate(groups, 6)):
        assert found == (("outer", "inner"), [[rank % 3, rank % 3 + 3], [rank]], True)


def test_a_mesh_of_two_dims_holds_no_experts() -> None:
    def refused() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "ep"))
        with pytest.raises(ValueError, match="has one dim, this one has 2"):
            parallelize(tiny("qwen3_moe"), "zero1", ep=mesh)

        with pytest.raises(ValueError, match=r"ep = 4 does not divide the 2 data-parallel rank\(s\) of an instance"):
            parallelize(tiny("qwen3_moe"), "hsdp", mesh=mesh, ep=4)

    simulate(refused, 4)


def test_experts_over_other_ranks_than_those_of_the_batches_are_refused() -> None:
    def refused() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
        everyone = init_device_mesh("cpu", (4,))
        others = [2, 3] if dist.get_rank() < 2 else [0, 1]
        with pytest.raises(ValueError, match=re.escape(f"ep has ranks {others}, which are not among")):
            parallelize(tiny("qwen3_moe"), "zero1", mesh=mesh["data"], ep=everyone)

    simulate(refused, 4)


def test_experts_that_were_shared_out_need_not_divide_again() -> None:
    """Three of six are here."""

    def again() -> tuple[int, list[int]]:
        model: Any = copy.deepcopy(parallelize(tiny("qwen3_moe", num_experts=6), "ddp", ep=2))
        found = share_experts(model, None, None, {}, fuse=True)
        return len(found), [len(module.gate_up_proj) for module in found]

    assert simulate(again, 2) == [(2, [3, 3])] * 2


def test_parameters_of_a_stacks_own_module_alone_are_experts() -> None:
    """A layer inside it is on all ranks, and is averaged over all of them."""

    def marked() -> tuple[list[str], list[int]]:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.ModuleDict({"experts": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2)})
        experts: Any = model["experts"]
        experts.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2, 2), mesh, [Shard(0)]))
        experts.inside = nn.Linear(2, 2)
        ((module, same),) = share_experts(model, None, None, {}, fuse=False).items()
        assert module is experts and same is WORLD_OF_ONE, "no other rank has the same"
        found = [name for name, param in model.named_parameters() if getattr(param, "allreduce", True) is False]
        return found, [*experts.weight.to_local().shape]

    assert simulate(marked, 4) == [(["experts.weight"], [1, 2, 2])] * 4
