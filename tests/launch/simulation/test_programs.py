"""Random programs of collectives on simulated ranks, against a reference implementation without ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maingrad.ddp.graphs.recorded import RecordedGraph
from maingrad.ddp.torch_internals.distributed import start_all_gather, start_reduce_scatter
from maingrad.launch import simulate


def brought(rank: int, *shape: int, key: int) -> Tensor:
    """The tensor of ``rank`` in step ``key``: small integers in fp32, so that sums in any order are exact."""
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


collectives = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]),
        st.integers(0, 3),  # which group
        st.booleans(),  # wait at once, or at the end
    ),
    max_size=12,
)


@given(program=collectives, world_size=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 2**32))
def test_random_programs_compute_the_same_as_no_ranks_at_all(program: Any, world_size: int, seed: int):
    """The reference implementation keeps all ranks' state in one list and applies each collective to all members."""
    subsets = [list(range(world_size)), [0], list(range(0, world_size, 2)), list(range(world_size // 2, world_size))]

    def run() -> list[Tensor]:
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in subsets]
        states, works = [], []
        for step, (name, which, at_once) in enumerate(program):
            ranks, group = subsets[which], groups[which]
            if rank not in ranks:
                continue
            size = len(ranks)
            x, out = brought(rank, size, 2, key=step), torch.full((size, 2), math.nan)
            if name == "all_reduce":
                work = dist.all_reduce(x, group=group, async_op=True)
                out = x
            elif name == "reduce_scatter":
                out = out[0]
                work = start_reduce_scatter(out, x, dist.ReduceOp.SUM, group)
            elif name == "all_gather":
                work = start_all_gather(out, x[0].clone(), group)
            elif name == "broadcast":
                work = dist.broadcast(x, ranks[-1], group=group, async_op=True)
                out = x
            else:
                work = dist.all_to_all_single(out, x, group=group, async_op=True)
            if at_once:
                work.wait()
            works.append(work)
            states.append(out)
        for work in works:
            work.wait()
        return states

    results = simulate(run, world_size, seed=seed)
    remaining = [list(states) for states in results]
    for step, (name, which, _) in enumerate(program):
        ranks = subsets[which]
        inputs = torch.stack([brought(rank, len(ranks), 2, key=step) for rank in ranks])
        for position, rank in enumerate(ranks):
            expected = {
                "all_reduce": inputs.sum(0),
                "reduce_scatter": inputs.sum(0)[position],
                "all_gather": inputs[:, 0],
                "broadcast": inputs[-1],
                "all_to_all": inputs[:, position],
            }[name]
            assert torch.equal(remaining[rank].pop(0), expected), (step, name, rank)
    assert not any(remaining)


def test_what_a_recorded_block_communicates_its_replays_communicate() -> None:
    """As layers in a graph do: they wait where the block has waited, and messages keep their tags."""

    def run() -> list[tuple[float, list[float]]]:
        rank, graph, found = dist.get_rank(), RecordedGraph(), list[tuple[float, list[float]]]()
        total, sent, received = torch.full((1,), rank + 1.0), torch.zeros(2, 1), torch.zeros(2, 1)
        with graph.recording():
            dist.all_reduce(total, async_op=True).wait()
            total.add_(1.0)
            if rank == 0:
                works = [dist.isend(sent[tag], 1, tag=tag) for tag in (0, 1)]
                for work in works:
                    work.wait()
            else:
                for tag in (1, 0):
                    dist.recv(received[tag], 0, tag=tag)
        for step in (1.0, 2.0):
            sent.copy_(torch.tensor([[step], [10 * step]]))
            graph.replay()
            found.append((float(total), received.flatten().tolist()))
        return found

    for seed in range(4):
        first, second = simulate(run, 2, seed=seed)
        assert first == [(9.0, [0.0, 0.0]), (19.0, [0.0, 0.0])]
        assert second == [(9.0, [1.0, 10.0]), (19.0, [2.0, 20.0])]
