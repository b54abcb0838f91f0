"""Rows of the table of placements, and the reductions of rows that only sharded models have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp.collectives.in_flight import in_stages
from maingrad.ddp.collectives.rank_grid import in_two_dims, make_grid
from maingrad.ddp.collectives.reduction import PLACEMENTS, AxisPlacement, GradReduction, Placement, Placements
from maingrad.launch import simulate

WHOLE, SHARDED = Placement.WHOLE, Placement.SHARDED


def axis(letters: str) -> AxisPlacement:
    """``"wws"``: whole parameter, whole gradient, sharded optimizer."""
    return AxisPlacement(*({"w": WHOLE, "s": SHARDED}[letter] for letter in letters))


REFUSED = {
    ("sws", "www"): "inner axis: parameter sharded, gradient whole",
    ("wsw", "www"): "inner axis: .*what shards the gradient the optimizer",
    ("sss", "sws"): "outer axis: parameter sharded, gradient whole",
    ("www", "wws"): "optimizer: whole on the inner axis and sharded on the outer one; swap the axes",
    ("sss", "sss"): "sharded on both axes are sharded over all ranks",
    ("sss", "wss"): "sharded on both axes are sharded over all ranks",
}


@pytest.mark.parametrize("row", REFUSED)
def test_rows_that_cannot_be_are_refused(row: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=REFUSED[row]):
        Placements(*map(axis, row)).check()


def test_rows_of_the_table_can_be() -> None:
    for row in PLACEMENTS.values():
        row.check()


def test_what_rows_gather_and_how_often_they_reduce() -> None:
    inner = {name: row.inner for name, row in PLACEMENTS.items()}
    assert {name for name, axis in inner.items() if axis.gathers} == {"zero1", "hybrid", "zero2"}
    assert {name for name, axis in inner.items() if not axis.scatters} == {"ddp"}
    once = {said: {name for name, axis in inner.items() if axis.reduces_once(said)} for said in (None, True, False)}
    assert once[None] == once[True] == {"ddp", "zero1", "hybrid"}, "whole gradients are at rest there"
    assert once[False] == set(PLACEMENTS)


@pytest.mark.parametrize(("name", "numel"), [("hsdp_zero1", 2), ("hsdp", 4), ("ddp", 8)])
def test_each_rank_owns_the_sum_that_its_row_says(name: str, numel: int) -> None:
    """Of two instances of two ranks."""

    def on_each_rank() -> tuple[tuple[int, int], int, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        reduction = GradReduction(make_grid(mesh), PLACEMENTS[name], factor=0.5, device=torch.device("cpu"))
        grads = torch.arange(8.0) * 4 ** dist.get_rank()
        reduction.start(grads).wait()
        owned = reduction.owned_range(8)
        return owned, reduction.num_replicas, grads[slice(*owned)]

    total = torch.arange(8.0) * (1 + 4 + 16 + 64) / 2
    found = simulate(on_each_rank, 4)
    for (start, end), replicas, part in found:
        assert end - start == numel
        assert replicas == numel // 2
        assert torch.equal(part, total[start:end])
    starts = {"hsdp_zero1": [0, 4, 2, 6], "hsdp": [0, 4, 0, 4], "ddp": [0] * 4}
    assert [start for (start, _), _, _ in found] == starts[name]


@pytest.mark.parametrize("stages", [(), (None,), (None, "all-reduce"), ("reduce-scatter", None, "all-reduce")])
def test_a_chain_waits_for_each_of_its_collectives_before_the_next(stages: tuple[str | None, ...]) -> None:
    """One may be done already when it is started, or run on the caller's stream: there is nothing to wait for."""
    done: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            done.append(f"{self.name} ends")

    def chain() -> Iterator[Any]:
        for name in stages:
            done.append(f"{name} begins")
            yield None if name is None else Work(name)

    memory = torch.ones(1)
    flight = in_stages(chain(), (memory,))
    assert flight.tensors[0] is memory, "it stays until the chain is over"
    assert done == [f"{name} begins" for name in stages[:1]]
    for _ in range(2):  # a second wait finds it over
        flight.wait()
        assert done == [each for name in stages for each in (f"{name} begins", f"{name} ends") if each != "None ends"]


def test_context_parallel_ranks_share_the_shards_of_their_instance() -> None:
    def on_each_rank() -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "cp"))
        found = in_two_dims(mesh)
        assert found.mesh_dim_names == ("outer", "inner_cp")
        assert in_two_dims(found) is found
        return found.mesh.tolist()

    assert simulate(on_each_rank, 8) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 8
