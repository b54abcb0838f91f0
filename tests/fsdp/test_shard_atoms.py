"""Shards whose borders cut no atom: rows, blocks of rows, whole parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.fsdp.unit_plan import ShardAtoms
from maingrad.launch import simulate

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 33, bias=False), nn.Tanh(), nn.Linear(33, 5))


def train(atoms: ShardAtoms) -> tuple[list[Tensor], list[tuple[str, tuple[int, ...], int, int, tuple[int, ...]]]]:
    """The weights after some steps, and where this rank's shards lie: name, shape, start, end, local shape."""
    model = fully_shard(build(), shard_atoms=atoms)
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


def test_whole_parameters_suit_an_optimizer_of_matrices():
    """Each matrix is on one rank, in its own shape; others have none of it."""
    places = [places for _, places in simulate(lambda: train("whole"), 3)]
    for of_ranks in zip(*places, strict=True):
        assert sorted(local[0] for *_, local in of_ranks)[:-1] == [0, 0]
        assert max(local for *_, local in of_ranks) == of_ranks[0][1]


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'\*\.wait' matches no parameter"):
        fully_shard(build(), shard_atoms={"*.wait": "row"})


def test_what_is_no_atom_is_refused():
    with pytest.raises(ValueError, match="'column'"):
        fully_shard(build(), shard_atoms="column")  # type: ignore[arg-type]
