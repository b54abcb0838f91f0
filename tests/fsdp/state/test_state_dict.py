"""State dicts of fully sharded models are DTensors as PyTorch's FSDP2 gives them, whatever the shards are."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import Everything, batch
from gloo import run_ranks
from loops import assert_same
from odd_units import Odd, mesh_for, shard, shard_by_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.plan.cut import Range
from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.state.state_dict import exchange, rows_of_rank
from maingrad.launch import simulate


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


# ---- Ranges. ----


def exchanged(haves: list[tuple[int, int]], wants: list[tuple[int, int]], dtype: torch.dtype) -> bool:
    rank, values = dist.get_rank(), torch.arange(40).to(dtype)
    mine = values[slice(*haves[rank])].clone()
    got = exchange(mine, [Range(*each) for each in haves], [Range(*each) for each in wants], dist.group.WORLD)
    return torch.equal(got, values[slice(*wants[rank])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize(
    "haves, wants",
    [
        ([(0, 17), (17, 23), (23, 40)], [(0, 16), (16, 32), (32, 40)]),
        ([(0, 0), (0, 40), (0, 0)], [(0, 20), (20, 40), (40, 40)]),
        ([(0, 5), (5, 5), (5, 40)], [(0, 40), (0, 40), (7, 9)]),
        ([(3, 9), (9, 12), (0, 0)], [(12, 12), (3, 3), (4, 11)]),
    ],
)
def test_ranges_travel(haves: list[tuple[int, int]], wants: list[tuple[int, int]], dtype: torch.dtype) -> None:
    assert all(simulate(exchanged, 3, haves, wants, dtype))


@pytest.mark.parametrize("rows", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_rows_are_those_of_chunk(rows: int, size: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(rows).chunk(size)] if rows else []
    expected += [0] * (size - len(expected))
    assert [rows_of_rank(rows, rank, size).numel for rank in range(size)] == expected


# ---- Beside PyTorch's own. ----


def same_as_torchs(placement: str) -> None:
    mesh = mesh_for(placement)
    ours, theirs = shard(Odd(), placement, mesh).state_dict(), shard_by_torch(Odd(), mesh).state_dict()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        actual = ours[name]
        if not isinstance(expected, DTensor):
            assert torch.equal(actual, expected), name
            continue
        assert actual.placements == expected.placements, name
        assert actual.device_mesh.mesh.tolist() == expected.device_mesh.mesh.tolist()
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert actual.to_local().shape == expected.to_local().shape, name
        assert torch.equal(actual.to_local(), expected.to_local()), name
        assert not actual.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("placement, ranks", [("zero3", 3), ("zero2", 4), ("hsdp", 4), ("hsdp_zero1", 4)])
def test_they_are_what_fsdp2_gives(placement: str, ranks: int) -> None:
    """Shards in fp32 are saved in fp32, also if the model computes in bf16."""
    run_ranks(same_as_torchs, ranks, placement)


def save(folder: Path, ours: bool, placement: str, seed: int) -> None:
    mesh = mesh_for(placement)
    model = shard(Odd(seed), placement, mesh) if ours else shard_by_torch(Odd(seed), mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load(folder: Path, ours: bool, placement: str, expected_seed: int) -> None:
    mesh = mesh_for(placement)
    model = shard(Odd(9), placement, mesh) if ours else shard_by_torch(Odd(9), mesh)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_same(whole(model.state_dict()), Odd(expected_seed).state_dict())


def torchs_side(ours: Path, theirs: Path) -> None:
    same_as_torchs("zero3")
    load(ours, False, "zero3", 5)
    save(theirs, False, "zero3", 6)


@pytest.mark.in_turn
@pytest.mark.parametrize("run", [simulate, pytest.param(run_ranks, marks=pytest.mark.slow)])
def test_checkpoints_go_to_fsdp2_and_come_from_it(tmp_path: Path, run: Any) -> None:
    """Three ranks of ours -> two of FSDP2 -> four of ours in two instances."""
    simulate(save, 3, tmp_path / "ours", True, "zero3", 5)
    run(torchs_side, 2, tmp_path / "ours", tmp_path / "theirs")
    simulate(load, 4, tmp_path / "theirs", True, "hsdp_zero1", 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving, loading",
    [
        pytest.param(("ours", "zero3", 4), ("theirs", "zero3", 2), id="ours-4-theirs-2"),
        pytest.param(("theirs", "zero3", 2), ("ours", "hsdp_zero1", 4), id="theirs-2-ours-hsdp-4"),
        pytest.param(("ours", "hsdp", 4), ("ours", "zero2", 3), id="ours-hsdp-4-ours-3"),
        pytest.param(("theirs", "hsdp", 4), ("ours", "zero3", 3), id="theirs-hsdp-4-ours-3"),
        pytest.param(("ours", "hsdp_zero1", 4), ("theirs", "zero3", 3), id="ours-4-theirs-3"),
    ],
)
def test_real_ranks_of_both_libraries_share_checkpoints(
    tmp_path: Path, saving: tuple[str, str, int], loading: tuple[str, str, int]
) -> None:
    run_ranks(save, saving[2], tmp_path / "c", saving[0] == "ours", saving[1], 5)
    run_ranks(load, loading[2], tmp_path / "c", loading[0] == "ours", loading[1], 5)


# ---- What may be loaded. ----


def load_every_kind(placement: str) -> None:
    """Load whole tensors, DTensors of these ranks, and DTensors with other placements."""
    mesh = mesh_for(placement)
    model = shard(Odd(1), placement, mesh)
    expected = Odd(2).state_dict()
    model.load_state_dict(expected)
    assert_same(whole(model.state_dict()), expected)

    other = shard(Odd(3), placement, mesh)
    taken = other.load_state_dict(model.state_dict())
    assert not taken.missing_keys and not taken.unexpected_keys
    assert_same(whole(other.state_dict()), expected)

    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = {
        name: distribute_tensor(value, flat, [Shard(value.ndim - 1) if value.ndim else Replicate()])
        for name, value in Odd(4).state_dict().items()
    }
    columns["seen"] = Odd(4).seen
    other.load_state_dict(columns)
    assert_same(whole(other.state_dict()), Odd(4).state_dict())

    state = model.state_dict()
    weight = state["up.weight"]
    by_columns = weight.to_local().t().contiguous().t()
    places = (weight.device_mesh, weight.placements)
    state["up.weight"] = DTensor.from_local(by_columns, *places, shape=weight.shape, stride=weight.stride())
    other.load_state_dict(state)
    assert_same(whole(other.state_dict()), expected)

    with pytest.raises(
        RuntimeError, match=r"up.weight: size mismatch, of shape \[3, 3\], and the whole parameter is \[15, 7"
    ):
        other.load_state_dict({**expected, "up.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r'"up.weight", expected torch.Tensor'):
        other.load_state_dict({**expected, "up.weight": [1.0]})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "up.weight"'):
        other.load_state_dict({name: value for name, value in expected.items() if name != "up.weight"})
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\): parameter '\S+' is a view of this rank's"):
        other.load_state_dict(expected, assign=True)
    assert len(other.load_state_dict({}, strict=False, assign=True).missing_keys) == len(expected)


@pytest.mark.parametrize(
    "run, placement, ranks",
    [
        (simulate, "zero3", 3),
        (simulate, "hsdp_zero1", 4),
        pytest.param(run_ranks, "zero3", 2, marks=pytest.mark.slow),
        pytest.param(run_ranks, "hsdp_zero1", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_whole_tensors_and_dtensors_of_any_kind_are_loaded(run: Any, placement: str, ranks: int) -> None:
    run(load_every_kind, ranks, placement)


# ---- On simulated ranks. ----


def round_trip(placement: str) -> None:
    """A scalar, an empty parameter and two dtypes; and the output of forward."""
    mesh = mesh_for(placement)
    model: Any = Everything(seed=1)
    other: Any = Everything(seed=2)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for unit in (model.up, model, other.up, other):
        fully_shard(unit, mesh=mesh, placements=placement)
    model.set_reshard_after_forward(False)
    tokens = batch(0, 0)
    other.eval()(tokens)
    state = model.state_dict()
    assert state["scale"].placements[-1] == Replicate()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in expected.items()}
    other.load_state_dict(state)
    assert torch.equal(other(tokens), model.eval()(tokens)), "weights that were gathered are gathered again"
    with other.unsharded():
        assert_same({name: value.clone() for name, value in other.state_dict().items()}, expected)
    inner = model.up.state_dict(prefix="up.")
    assert isinstance(model.up, FSDPModule) and inner.keys() == {"up.weight", "up.bias"}
    assert torch.equal(inner["up.weight"].to_local(), state["up.weight"].to_local())


@pytest.mark.in_turn
@pytest.mark.parametrize("placement, ranks", [("zero3", 1), ("zero3", 3), ("zero2", 2), ("hsdp", 4), ("hsdp_zero1", 6)])
def test_what_is_loaded_is_used(placement: str, ranks: int) -> None:
    simulate(round_trip, ranks, placement)


def test_modules_inside_a_unit_have_state_dicts_too() -> None:
    def state_of_part() -> None:
        model = fully_shard(Odd(1))
        state = model.down.state_dict()
        assert isinstance(state["weight"], DTensor) and state["weight"].shape == (7, 15)
        model.down.load_state_dict({"weight": torch.ones(7, 15)})
        with model.unsharded():
            assert torch.equal(model.down.weight, torch.ones(7, 15))
            assert torch.equal(model.up.weight, Odd(1).up.weight)

    simulate(state_of_part, 3)


def test_a_unit_keeps_the_mesh_that_it_was_given() -> None:
    """A unit around it was given none."""

    def meshes() -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        state = fully_shard(model).state_dict()
        assert state["0.weight"].device_mesh.mesh_dim_names == ("dp",)
        assert state["1.weight"].device_mesh.mesh_dim_names != ("dp",)

    simulate(meshes, 2)


def test_the_file_of_another_rank_is_refused_on_all_ranks() -> None:
    """Each rank has saved its DTensors by ``torch.save``, and one loads the file of another rank."""
    saved: dict[int, Any] = {}

    def swap() -> None:
        model, rank = shard(Odd(1)), dist.get_rank()
        saved[rank] = {name: value.clone() for name, value in model.state_dict().items()}
        dist.barrier()
        other = shard(Odd(2))
        with pytest.raises((RuntimeError, ValueError), match="each rank loads the file that it saved itself"):
            other.load_state_dict(saved[1] if rank == 0 else saved[rank])
        found = whole(other.state_dict())
        for name, value in Odd(2).named_parameters():
            assert torch.equal(found[name], value), name
        other.load_state_dict(saved[rank])
        assert_same(whole(other.state_dict()), Odd(1).state_dict())

    simulate(swap, 2)


def test_without_ranks_they_are_plain_tensors() -> None:
    model = shard(Odd(1))
    state = model.state_dict()
    assert not any(isinstance(value, DTensor) for value in state.values())
    assert_same(dict(state), Odd(1).state_dict())
    model.load_state_dict(Odd(2).state_dict())
    assert_same(dict(model.state_dict()), Odd(2).state_dict())
    for name, param in Odd(1).named_parameters():
        assert torch.equal(state[name], param), f"{name} is in memory of its own"


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8))


def with_context_parallel_ranks(sizes: tuple[int, ...]) -> None:
    """A mesh of three dims, the last of which is called "cp", as it is."""
    mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "cp")), layers(1)
    for unit in (*model, model):
        fully_shard(unit, mesh, "hsdp")
    assert len({id(unit.grid.inner) for unit in model.units}) == 1, "one communicator"
    gathers = {id(bucket.reduction.grid.gather) for unit in model.units for bucket in unit.buckets}
    assert len(gathers) == 1, "and one for gathers"
    state = model.state_dict()
    assert_same(whole(state), layers(1).state_dict())
    for value in state.values():
        assert value.placements == (Replicate(), Shard(0))
        assert value.device_mesh.shape == (sizes[0], sizes[1] * sizes[2])
        assert value.device_mesh.mesh_dim_names == ("replicate", "shard_cp")
    model.load_state_dict(layers(2).state_dict())
    assert_same(whole(model.state_dict()), layers(2).state_dict())
    model.load_state_dict(state)
    assert_same(whole(model.state_dict()), layers(1).state_dict())


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_context_parallel_ranks_share_shards(sizes: tuple[int, ...]) -> None:
    simulate(with_context_parallel_ranks, math.prod(sizes), sizes)


class Pretrained(nn.Linear):
    """Saves itself as models of transformers do."""

    def save_pretrained(self, folder: str, *, state_dict: Any = None) -> tuple[str, list[int]]:
        state = self.state_dict() if state_dict is None else state_dict
        return folder, list(state["weight"].shape)


def test_save_pretrained_is_refused_where_it_would_write_one_ranks_part() -> None:
    def on_each_rank() -> None:
        model: Any = Pretrained(4, 6)
        model.inside = fully_shard(nn.Linear(4, 4))
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"save_pretrained of FSDPPretrained.*within model.unsharded\(\)"):
            model.save_pretrained("folder")
        with pytest.raises(RuntimeError, match="whose parameters are sharded"):
            model.save_pretrained("folder", state_dict=None)
        with model.inside.unsharded(), pytest.raises(RuntimeError, match="whose parameters are sharded"):
            model.save_pretrained("folder")
        model.unshard()  # and not the module inside
        with pytest.raises(RuntimeError, match="whose parameters are sharded"):
            model.save_pretrained("folder")
        model.reshard()
        assert model.save_pretrained("folder", state_dict={"weight": torch.ones(3)}) == ("folder", [3])
        with model.unsharded():
            assert model.save_pretrained("folder") == ("folder", [6, 4])

    simulate(on_each_rank, 2)
    assert not hasattr(fully_shard(nn.Linear(4, 6)), "save_pretrained")


class TwoNames(nn.Module):
    """A parameter of two names in one module, and a unit of two names in the module around it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 5)
        self.first.again = self.first.bias
        self.second = self.first
        self.rest = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x) + self.second(x))


@pytest.mark.parametrize("placement", ["zero3", "hsdp_zero1"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.sampled(2)
def test_what_has_two_names_is_saved_and_loaded_by_each(placement: str, inside: bool, tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        model = TwoNames(seed)
        for module in (model.first, model) if inside else (model,):
            fully_shard(module, mesh=mesh_for(placement), placements=placement)
        return model

    def round_trip() -> None:
        model, wanted = build(1), TwoNames(1).state_dict()
        state = model.state_dict()
        assert state.keys() == wanted.keys() and len(state) == 8
        assert_same(whole(state), wanted)
        for given in (state, wanted, dict(reversed(state.items()))):
            other = build(2)
            other.load_state_dict(given)
            assert_same(whole(other.state_dict()), wanted)
        other = build(2)
        kept = {name: value for name, value in state.items() if name not in ("first.again", "second.weight")}
        assert set(other.load_state_dict(kept, strict=False).missing_keys) == {"first.again", "second.weight"}
        assert_same(whole(other.state_dict()), wanted)
        save_checkpoint(tmp_path / "c", model)
        other = build(2)
        load_checkpoint(tmp_path / "c", other)
        assert_same(whole(other.state_dict()), wanted)
        assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))

    simulate(round_trip, 4)


def test_dtensors_of_another_mesh_with_as_many_ranks_are_loaded() -> None:
    """With the same placements, over instances of other ranks."""

    def load() -> None:
        model, expected = shard(Odd(1), "hsdp", mesh_for("hsdp")), Odd(2).state_dict()
        turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("outer", "inner"))
        state = {
            name: distribute_tensor(value, turned, [Replicate(), Shard(0) if value.ndim else Replicate()])
            for name, value in expected.items()
            if name != "seen"
        }
        assert state["cube"].placements == model.state_dict()["cube"].placements
        model.load_state_dict({**state, "seen": expected["seen"]})
        assert_same(whole(model.state_dict()), expected)

    simulate(load, 4)
