"""Shards whose borders cut no atom: rows, blocks of rows, whole parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import fully_shard
from maingrad.fsdp.unit.plan import ShardAtoms
from maingrad.launch import simulate

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 33, bias=False), nn.Tanh(), nn.Linear(33, 5))


Place = tuple[str, tuple[int, ...], int, int, tuple[int, ...]]
"""Of a shard: name, shape, start, end, local shape."""


def train(atoms: ShardAtoms, size: int | None = None) -> tuple[list[Tensor], list[Place]]:
    """The weights after some steps, and where this rank's shards lie."""
    model = fully_shard(build(), shard_atoms=atoms, bucket_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x = torch.randn(4, 15, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [p.shard for p in model.parameters()]
    places = [
        (info.name, info.shape, info.start, info.end, tuple(p.shape))
        for info, p in zip(shards, model.parameters(), strict=True)
    ]
    with model.unsharded():
        return [p.detach().clone() for p in model.parameters()], places


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("atoms", ["row", "whole", 2, {"*.weight": "row", "0.bias": "whole"}], ids=str)
def test_atoms_stay_together_and_training_is_the_same(atoms: ShardAtoms, world_size: int):
    wanted, _ = simulate(lambda: train("element"), world_size)[0]
    for weights, places in simulate(lambda: train(atoms), world_size):
        torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-7)
        for name, shape, start, end, local in places:
            rows = {"row": 1, "whole": shape[0], 2: 2}.get(atoms if not isinstance(atoms, dict) else "", 0)
            if isinstance(atoms, dict):
                rows = 1 if name.endswith("weight") else shape[0] if name == "0.bias" else 0
            if rows == 0:
                continue
            row = torch.Size(shape[1:]).numel()
            assert start % (rows * row) == 0, name
            assert end % (rows * row) == 0 or end == torch.Size(shape).numel(), name
            assert local == ((end - start) // row, *shape[1:]), name


@pytest.mark.parametrize("atoms", ["row", "whole", {"*.weight": "row"}], ids=str)
@pytest.mark.sampled(1)
def test_the_size_of_buckets_moves_no_atom(atoms: ShardAtoms):
    """Units of coarser atoms than elements have as few buckets as atoms allow, whatever their size."""
    for (weights, places), (others, other_places) in zip(
        simulate(lambda: train(atoms), 3), simulate(lambda: train(atoms, 1), 3), strict=True
    ):
        assert places == other_places
        assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.sampled(1)
def test_elements_are_cut_in_each_bucket_anew(size: int):
    """Buckets change the place of elements, not the results. Each rank has its part of every bucket."""
    (wanted, alone), *_ = simulate(lambda: train("element"), 3)
    for weights, places in simulate(lambda: train("element", size), 3):
        torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-7)
        if size == 1:  # each parameter is a bucket of its own, of whole 128 elements
            for name, shape, start, end, _ in places:
                assert end - start <= -(-torch.Size(shape).numel() // 384) * 128, name
    assert places != alone


def test_whole_parameters_suit_an_optimizer_of_matrices():
    """Each matrix is whole on one rank, in its own shape; other ranks have no element of it."""
    places = [places for _, places in simulate(lambda: train("whole"), 3)]
    for of_ranks in zip(*places, strict=True):
        assert sorted(local[0] for *_, local in of_ranks)[:-1] == [0, 0]
        assert max(local for *_, local in of_ranks) == of_ranks[0][1]
        assert sorted((start, end) for _, _, start, end, _ in of_ranks)[:-1] == [(0, 0)] * 2, "none are elements 0 to 0"


def test_one_matrix_that_is_cut_is_enough_to_refuse_an_optimizer_of_matrices() -> None:
    def step(atoms: ShardAtoms) -> str:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 128, bias=False))
        for layer, each in zip(model, ("whole", atoms), strict=True):
            fully_shard(layer, shard_atoms=each)
        fully_shard(model)(torch.ones(2, 4)).sum().backward()
        try:
            torch.optim.Muon(model.parameters()).step()
        except RuntimeError as error:
            return str(error)
        return "stepped"

    said = simulate(step, 2, "element")
    assert all("shards cut them apart" in each for each in said), said
    assert simulate(step, 2, "whole") == ["stepped"] * 2


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'\*\.wait' matches no parameter"):
        fully_shard(build(), shard_atoms={"*.weight": "row", "*.wait": "row", "*": "element"})


def test_what_is_no_atom_is_refused():
    with pytest.raises(ValueError, match="'column'"):
        fully_shard(build(), shard_atoms="column")  # type: ignore[arg-type]


def test_a_slice_of_tensor_parallelism_is_no_whole_matrix() -> None:
    """Ranks outside of the mesh hold the other slices: an optimizer of whole parameters would take each for a whole."""

    def step(marked: bool) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(5, 16, bias=False)
        layer.weight.tensor_model_parallel = marked  # type: ignore[assignment]
        model = fully_shard(layer, mesh=mesh["dp"], shard_atoms="whole")
        model(torch.ones(2, 5)).sum().backward()
        try:
            torch.optim.Muon(model.parameters()).step()
        except RuntimeError as error:
            return str(error)
        return "stepped"

    for said in simulate(step, 4, True):
        assert "Muon updates whole parameters, and would take slices for them: parameter 'weight'" in said
    assert simulate(step, 4, False) == ["stepped"] * 4
