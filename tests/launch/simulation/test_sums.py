"""Simulated ranks add in the order of the documented tree; two ranks give the same bits as gloo."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor

from maingrad.ddp.torch_internals.distributed import start_reduce_scatter
from maingrad.launch import simulate


@pytest.mark.parametrize(
    ("world_size", "tree"),
    [
        (3, lambda r: (r[0] + r[1]) + r[2]),
        (4, lambda r: (r[0] + r[1]) + (r[2] + r[3])),
        (5, lambda r: ((r[0] + r[1]) + (r[2] + r[3])) + r[4]),
        (6, lambda r: ((r[0] + r[1]) + (r[2] + r[3])) + (r[4] + r[5])),
        (7, lambda r: ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + r[6])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_documented_tree(world_size: int, tree: Callable[[Sequence[Tensor]], Tensor], dtype: torch.dtype):
    def value(rank: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def run() -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        whole, part = value(rank), torch.empty(64, dtype=dtype)
        dist.all_reduce(whole)
        start_reduce_scatter(part, value(rank).repeat(world_size), dist.ReduceOp.SUM, dist.group.WORLD).wait()
        return whole, part

    expected = tree([value(rank) for rank in range(world_size)])
    for whole, part in simulate(run, world_size):
        assert torch.equal(whole, expected)
        assert torch.equal(part, expected)


def sums_of_random_values() -> list[Tensor]:
    """On one rank of two: sums in three dtypes, by all-reduce and reduce-scatter."""
    rank, results = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        value = torch.randn(4096, generator=torch.Generator().manual_seed(rank)).to(dtype)
        part = torch.empty(2048, dtype=dtype)
        start_reduce_scatter(part, value, dist.ReduceOp.SUM, dist.group.WORLD).wait()
        dist.all_reduce(value)
        results += [value, part]
    return results


def test_sums_of_two_ranks_equal_gloo_bitwise():
    for simulated, real in zip(simulate(sums_of_random_values, 2), run_ranks(sums_of_random_values, 2), strict=True):
        assert len(simulated) == 6
        assert all(torch.equal(ours, gloos) for ours, gloos in zip(simulated, real, strict=True))
