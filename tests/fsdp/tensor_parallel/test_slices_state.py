"""State dicts of slices: DTensors over data- and tensor-parallel ranks, as PyTorch's FSDP2 has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sliced_models import mesh_of, ranks_of, world_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from maingrad.ddp import WORLD_OF_ONE
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, set_model_slice, slice_of_marks
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


class Layers(nn.Module):
    """A layer whose rows are cut and one whose columns are, of which data-parallel ranks get uneven parts."""

    def __init__(self, seed: int = 0, rows: int = 10) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(8, rows)
        self.down = nn.Linear(rows, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def cut_layers(group: dist.ProcessGroup, seed: int = 0, **marks: Any) -> Layers:
    model = Layers(seed)
    for name, dim in CUTS.items():
        owner, local = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        param: Any = nn.Parameter(getattr(owner, local).detach().chunk(group.size(), dim)[group.rank()].contiguous())
        param.tensor_model_parallel, param.partition_dim = True, dim
        param.__dict__.update(marks)
        setattr(owner, local, param)
    return model


def build(row: str, group: dist.ProcessGroup, mesh: Any, seed: int = 0) -> Any:
    return fully_shard(cut_layers(group, seed), mesh, row, tensor_parallel_group=group)


def trained(model: Any) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("row", ["zero3", "zero1", "hsdp", "hsdp_zero1"])
def test_a_state_dict_has_the_placements_of_fsdp2(row: str) -> None:
    def on_each_rank() -> None:
        mesh, group, _ = ranks_of(row)
        model, whole = build(row, group, mesh), Layers().state_dict()
        outer = [Replicate()] if row.startswith("hsdp") else []
        found = model.state_dict()
        for name, value in found.items():
            assert isinstance(value, DTensor)
            assert torch.equal(value.full_tensor(), whole[name]), name
        strided = [*outer, _StridedShard(0, split_factor=2), Shard(0)]
        assert list(found["up.weight"].placements) == list(found["up.bias"].placements) == strided
        assert list(found["down.weight"].placements) == [*outer, Shard(0), Shard(1)]
        assert list(found["down.bias"].placements) == [*outer, Shard(0)]
        assert found["up.weight"].device_mesh.mesh_dim_names == (*mesh.mesh_dim_names, "tp")

    simulate(on_each_rank, world_of(row))


def test_one_data_parallel_rank_saves_and_loads_dtensors_over_its_tensor_parallel_ranks() -> None:
    saved: dict[int, Any] = {}

    def on_each_rank() -> None:
        group = mesh_of(2, names=("tp",))["tp"].get_group()
        model, whole = build("zero3", group, WORLD_OF_ONE), Layers().state_dict()
        saved[group.rank()] = found = model.state_dict()
        for name, dim in CUTS.items():
            assert list(found[name].placements) == [Shard(dim)]
            assert torch.equal(found[name].full_tensor(), whole[name]), name
        assert torch.equal(found["down.bias"], whole["down.bias"])
        moments = trained(model).state_dict()["state"]
        assert [tuple(each["exp_avg"].shape) for each in moments.values()] == [(10, 8), (10,), (5, 10), (5,)]
        model.load_state_dict(found)
        for name in CUTS:
            assert torch.equal(model.state_dict()[name].full_tensor(), whole[name]), name
        dist.barrier()
        with pytest.raises(RuntimeError, match="each rank loads the file that it saved itself"):
            model.load_state_dict(saved[1 - group.rank()])

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("form", ["own", "whole", "other mesh", "slices"])
def test_a_model_loads_tensors_of_any_form(form: str) -> None:
    def on_each_rank() -> None:
        mesh, group, _ = ranks_of("zero3")
        model, other = build("zero3", group, mesh), Layers(seed=1).state_dict()
        given: dict[str, Any] = dict(other)
        if form == "own":
            given = build("zero3", group, mesh, seed=1).state_dict()
        elif form == "other mesh":
            given = fully_shard(Layers(seed=1), mesh_of(4, names=("all",))).state_dict()
        elif form == "slices":
            given = {name: value.detach() for name, value in cut_layers(group, seed=1).named_parameters()}
        model.load_state_dict(given)
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), other[name]), name
        with pytest.raises(
            RuntimeError, match=r"size mismatch, of shape \[3, 8\], and the whole parameter is \[10, 8\]"
        ):
            model.load_state_dict({**given, "up.weight": torch.ones(3, 8)})

    simulate(on_each_rank, 4)


def state_of(model: Any, optimizer: Any) -> Any:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


@pytest.mark.in_turn
@pytest.mark.parametrize("into", ["tensor parallel", "data parallel"])
def test_dcp_takes_a_model_and_its_optimizer_to_other_ranks(into: str, tmp_path: Path) -> None:
    def saves() -> dict[str, Tensor]:
        mesh, group, _ = ranks_of("zero3")
        model = build("zero3", group, mesh)
        state = state_of(model, trained(model))
        dcp.save(state, checkpoint_id=tmp_path / "saved")
        return {name: value.full_tensor() for name, value in state["model"].items()}

    def loads() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mesh, group, _ = ranks_of("hsdp" if into == "tensor parallel" else "zero3")
        if into == "tensor parallel":
            model = build("hsdp", group, mesh, seed=1)
        else:
            model = fully_shard(Layers(seed=1), mesh_of(4, names=("all",)))
        optimizer = trained(model)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        again = state_of(model, optimizer)
        moments = {name: each["exp_avg"].full_tensor() for name, each in again["optimizer"]["state"].items()}
        return {name: value.full_tensor() for name, value in again["model"].items()}, moments

    saved = simulate(saves, 4)
    for weights, moments in simulate(loads, 8 if into == "tensor parallel" else 4):
        assert weights.keys() == moments.keys() == {"up.weight", "up.bias", "down.weight", "down.bias"}
        for name, value in saved[0].items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("kind", ["packed", "uneven"])
@pytest.mark.parametrize("data_ranks", [1, 2])
def test_slices_that_no_placement_tells_are_rows_of_the_whole(kind: str, data_ranks: int) -> None:
    def on_each_rank() -> None:
        mesh = mesh_of(data_ranks, 2)
        group, model = mesh["tp"].get_group(), cut_layers(mesh["tp"].get_group())
        whole = torch.arange(80.0).view(10, 8)
        weight: Any = nn.Parameter(torch.zeros(4, 8))
        if kind == "packed":
            weight.tensor_model_parallel, weight.partition_stride, whole = True, 2, whole[:8]
            found = slice_of_marks(weight, group)
            mine = torch.cat([whole[:4].chunk(2)[group.rank()], whole[4:].chunk(2)[group.rank()]])
        else:
            found, mine = uneven_slice(group), whole.tensor_split((6,))[group.rank()]
        model.up.weight = nn.Parameter(torch.zeros_like(mine))
        set_model_slice(model.up.weight, found)
        sharded: Any = fully_shard(model, mesh["dp"], tensor_parallel_group=group)
        sharded.load_state_dict({"up.weight": whole}, strict=False)
        saved = sharded.state_dict()
        with sharded.unsharded(writeback=True):
            assert torch.equal(sharded.up.weight, mine)
            sharded.up.weight.data.zero_()
        assert saved["up.weight"].device_mesh == mesh["dp"]
        assert list(saved["up.weight"].placements) == [Shard(0)]
        assert torch.equal(saved["up.weight"].full_tensor(), whole)
        sharded.load_state_dict(saved)
        assert torch.equal(sharded.state_dict()["up.weight"].full_tensor(), whole)

    simulate(on_each_rank, 2 * data_ranks)


def uneven_slice(group: dist.ProcessGroup) -> ModelSlice:
    """6 and 4 of 10 rows."""
    box = Box((0, 0), (6, 8)) if group.rank() == 0 else Box((6, 0), (4, 8))
    return ModelSlice((10, 8), (box,), 0, group, "slice")


def test_slices_lie_beside_context_parallel_ranks() -> None:
    """The mesh (replicate, shard, "cp") as it is; the state dict's has the tensor-parallel ranks last."""

    def on_each_rank() -> None:
        mesh = mesh_of(2, 1, 2, 2, names=("replicate", "shard", "cp", "tp"))
        model = build("hsdp", mesh["tp"].get_group(), mesh["replicate", "shard", "cp"])
        found, whole = model.state_dict(), Layers().state_dict()
        for name, value in found.items():
            assert torch.equal(value.full_tensor(), whole[name]), name
        assert found["up.weight"].device_mesh.mesh_dim_names == ("replicate", "shard_cp", "tp")

    simulate(on_each_rank, 8)
