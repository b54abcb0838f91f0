"""Every collective of simulated ranks against its result, computed directly."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError

WORLD_SIZES = [1, 2, 3, 4, 8]
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "AVG": lambda stacked: stacked.sum(0) / stacked.shape[0],
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
}

# The names before torch 2.13 (torch 2.13 warns of them), and the new names where they exist.
ALL_GATHER = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
REDUCE_SCATTER = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def brought(rank: int, *shape: int, key: int = 0) -> Tensor:
    """The tensor of ``rank``: small integers in fp32, so that sums in any order are exact."""
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


def all_brought(world_size: int, *shape: int, key: int = 0) -> Tensor:
    return torch.stack([brought(rank, *shape, key=key) for rank in range(world_size)])


def on_ranks(world_size: int, fn: Callable[[int], Any]) -> list[Any]:
    """``fn(rank)`` on every simulated rank. Three orders of ranks must give the same results."""
    results = [simulate(lambda: fn(dist.get_rank()), world_size, seed=seed) for seed in range(3)]
    first = tree_leaves(results[0])
    for other in results[1:]:
        for a, b in zip(tree_leaves(other), first, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
    return results[0]


def test_what_a_rank_brings_may_lie_in_memory_of_what_it_gets() -> None:
    """As over gloo, which reads before it writes: each rank brings the tensor in which it gets another rank's."""

    def run(rank: int) -> list[Tensor]:
        places = [torch.full((2,), 10.0 * rank + place) for place in range(3)]
        dist.all_gather(places, places[(rank + 1) % 3])
        parts = [torch.full((2,), float(place)) for place in range(3)]
        mine = parts[2] if rank == 0 else torch.empty(2)
        dist.scatter(mine, parts if rank == 0 else None)
        gathered = [torch.full((2,), 10.0 * rank + place) for place in range(3)]
        dist.gather(gathered[1], gathered if rank == 2 else None, 2)
        return [*places, mine, *gathered]

    for rank, found in enumerate(on_ranks(3, run)):
        *places, mine, first, second, third = ([*set(place.tolist())] for place in found)
        assert places == [[1.0], [12.0], [20.0]] and mine == [float(rank)]
        assert rank < 2 or (first, second, third) == ([1.0], [11.0], [21.0])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("op", OPS)
def test_reductions(op: str, world_size: int):
    expected = OPS[op](all_brought(world_size, 3, 2))
    reduce_op = getattr(dist.ReduceOp, op)

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        everywhere, at_root = brought(rank, 3, 2), brought(rank, 3, 2)
        dist.all_reduce(everywhere, op=reduce_op)
        dist.reduce(at_root, world_size - 1, op=reduce_op)
        scattered, listed = torch.full((2, 2), math.nan), torch.full((2, 2), math.nan)
        chunks = brought(rank, world_size, 2, 2, key=1)
        dist.reduce_scatter(listed, list(chunks.clone()), op=reduce_op)
        for name in REDUCE_SCATTER:
            for whole in (chunks, chunks.view(2 * world_size, 2)):
                getattr(dist, name)(scattered.fill_(math.nan), whole.clone(), op=reduce_op)
        return everywhere, at_root, scattered, listed

    chunks = OPS[op](all_brought(world_size, world_size, 2, 2, key=1))
    for rank, (everywhere, at_root, scattered, listed) in enumerate(on_ranks(world_size, run)):
        torch.testing.assert_close(everywhere, expected)
        assert torch.equal(at_root, everywhere if rank == world_size - 1 else brought(rank, 3, 2))
        torch.testing.assert_close(scattered, chunks[rank])
        assert torch.equal(listed, scattered)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathers(world_size: int):
    def run(rank: int) -> list[Tensor]:
        mine, everyone = brought(rank, 2, 3), all_brought(world_size, 2, 3)
        places = [torch.empty(2, 3) for _ in range(world_size)]
        dist.all_gather(places, mine)
        assert torch.equal(torch.stack(places), everyone)
        for name in ALL_GATHER:
            for shape in ((world_size, 2, 3), (2 * world_size, 3)):
                whole = torch.full(shape, math.nan)
                getattr(dist, name)(whole, mine)
                assert torch.equal(whole.view(world_size, 2, 3), everyone)
        uneven = [torch.empty(peer + 1) for peer in range(world_size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [place.tolist() for place in uneven] == [[float(peer)] * (peer + 1) for peer in range(world_size)]
        root = world_size - 1
        at_root = [torch.empty(2, 3) for _ in range(world_size)] if rank == root else None
        dist.gather(mine, at_root, dst=root)
        assert at_root is None or torch.equal(torch.stack(at_root), everyone)
        if hasattr(dist, "gather_single"):
            for to in {0, root}:
                whole = torch.empty(world_size, 2, 3) if rank == to else None
                dist.gather_single(mine, whole, dst=to)
                assert whole is None or torch.equal(whole, everyone)
        return places

    on_ranks(world_size, run)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_from_one_rank(world_size: int):
    root = world_size // 2

    def run(rank: int) -> tuple[Tensor, Tensor]:
        copied, part = brought(rank, 4), torch.empty(5)
        dist.broadcast(copied, root)
        dist.scatter(part, list(brought(rank, world_size, 5)) if rank == root else None, src=root)
        return copied, part

    for rank, (copied, part) in enumerate(on_ranks(world_size, run)):
        assert torch.equal(copied, brought(root, 4))
        assert torch.equal(part, brought(root, world_size, 5)[rank])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all(world_size: int):
    def run(rank: int) -> None:
        places = [torch.empty(2) for _ in range(world_size)]
        dist.all_to_all(places, list(brought(rank, world_size, 2)))
        even = torch.empty(world_size, 2)
        dist.all_to_all_single(even, brought(rank, world_size, 2))
        expected = all_brought(world_size, world_size, 2)[:, rank]
        assert torch.equal(torch.stack(places), expected)
        assert torch.equal(even, expected)
        # Rank s sends t + 1 rows of value s to rank t.
        sent = torch.full((sum(range(world_size + 1)), 2), float(rank))
        received = torch.empty(world_size * (rank + 1), 2)
        dist.all_to_all_single(received, sent, [rank + 1] * world_size, [peer + 1 for peer in range(world_size)])
        assert torch.equal(received[:, 0], torch.arange(world_size).repeat_interleave(rank + 1).float())

    on_ranks(world_size, run)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_objects(world_size: int):
    root = world_size - 1

    def run(rank: int) -> tuple[Any, ...]:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
        sent = [(rank, "sent")]
        dist.broadcast_object_list(sent, src=root)
        at_root: list[Any] | None = [None] * world_size if rank == root else None
        dist.gather_object(rank, at_root, dst=root)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [10 * peer for peer in range(world_size)] if rank == 0 else None, src=0)
        return everyone, sent[0], at_root, part[0]

    for rank, (everyone, sent, at_root, part) in enumerate(on_ranks(world_size, run)):
        assert everyone == [{"rank": peer, "text": "x" * peer} for peer in range(world_size)]
        assert sent == (root, "sent")
        assert at_root == (list(range(world_size)) if rank == root else None)
        assert part == 10 * rank


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_point_to_point(world_size: int):
    def run(rank: int) -> list[int]:
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        received = torch.empty(2)
        ring = [dist.P2POp(dist.isend, brought(rank, 2), after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        assert torch.equal(received, brought(before, 2))
        # Two messages in flight, told apart by their tags, are received in reverse order.
        works = [dist.isend(torch.full((1,), float(tag)), after, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            dist.recv(received[:1], before, tag=tag)
            assert received[0] == tag
        for work in works:
            work.wait()
        # A receive from one rank, although other ranks may have sent before.
        if rank == 0:
            for peer in range(world_size - 1, 0, -1):
                dist.recv(received, peer)
                assert received.tolist() == [float(peer)] * 2
        else:
            dist.send(torch.full((2,), float(rank)), 0)
        if rank != 0:
            dist.send(torch.full((2,), float(rank)), 0)
            return []
        senders = []
        for _ in range(world_size - 1):
            senders.append(dist.recv(received))
            assert received.tolist() == [float(senders[-1])] * 2
        return sorted(senders)

    assert on_ranks(world_size, run)[0] == list(range(1, world_size))


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_reductions(op: str):
    values = [0b1100, 0b1010, 0b0110]
    expected = {"BAND": 0b0000, "BOR": 0b1110, "BXOR": 0b1100 ^ 0b1010 ^ 0b0110}[op]

    def run(rank: int) -> int:
        tensor = torch.tensor([values[rank]])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return int(tensor)

    assert on_ranks(3, run) == [expected] * 3


def test_integers_and_complex():
    def run(rank: int) -> tuple[int, complex]:
        integer, number = torch.tensor([rank + 3]), torch.tensor([rank + 1j])
        dist.all_reduce(integer, op=dist.ReduceOp.AVG)
        dist.all_reduce(number)
        return int(integer), complex(number)

    assert on_ranks(4, run) == [(4, 6 + 4j)] * 4


def test_premultiplied():
    """Newer torch exposes the factor. Older torch hides it, and the reduction is refused by name."""

    def run(rank: int) -> float:
        scaled = torch.tensor([float(rank)])
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
        return float(scaled)

    if hasattr(dist._make_nccl_premul_sum(0.5), "factor"):
        assert on_ranks(4, run) == [3.0] * 4
    else:
        with pytest.raises(SimulatedRankError, match="cannot reduce with PREMUL_SUM"):
            on_ranks(4, run)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coalesced(world_size: int):
    total = world_size * (world_size - 1) / 2

    def run(rank: int) -> None:
        tensors = [torch.full((size,), float(rank)) for size in (1, 2, 3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert [tensor.tolist() for tensor in tensors] == [[total] * size for size in (1, 2, 3)]
        dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.AVG)
        assert tensors[2].tolist() == [total] * 3
        wholes = [torch.empty(world_size, size) for size in (1, 2)]
        with dist.distributed_c10d._coalescing_manager():
            for whole in wholes:
                getattr(dist, ALL_GATHER[0])(whole, torch.full((whole.shape[1],), float(rank)))
        assert wholes[1][:, 0].tolist() == list(range(world_size))
        parts = [torch.empty(size) for size in (1, 2)]
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            for part, whole in zip(parts, wholes, strict=True):
                getattr(dist, REDUCE_SCATTER[0])(part, whole)
        assert parts[1].tolist() == [float(rank * world_size)] * 2
        lists = [[torch.empty(size) for size in (1, 2)] for _ in range(world_size)]
        dist.all_gather_coalesced(lists, [torch.full((size,), float(rank)) for size in (1, 2)])
        assert [float(one[1][1]) for one in lists] == list(range(world_size))

    on_ranks(world_size, run)


def test_functional_collectives_go_through_cpp():
    def run(rank: int) -> list[Tensor]:
        x, group = torch.full((4,), float(rank)), dist.group.WORLD
        gathered = functional.all_gather_tensor(x, 0, group)
        return [
            functional.all_reduce(x, "sum", group) + 0,
            gathered + 0,
            functional.reduce_scatter_tensor(gathered, "sum", 0, group) + 0,
            functional.broadcast(x, 1, group) + 0,
            functional.all_to_all_single(x, None, None, group) + 0,
        ]

    ranks = torch.arange(4.0)
    for rank, (reduced, gathered, scattered, copied, exchanged) in enumerate(on_ranks(4, run)):
        assert torch.equal(reduced, torch.full((4,), 6.0))
        assert torch.equal(gathered, ranks.repeat_interleave(4))
        assert torch.equal(scattered, torch.full((4,), 4.0 * rank))
        assert torch.equal(copied, torch.ones(4))
        assert torch.equal(exchanged, ranks)


def test_functional_collectives_find_a_group_by_its_ranks():
    """As torch finds real ones: by the tag that it gives to a group that a program made without a tag."""

    def run(rank: int) -> list[Any]:
        group = dist.new_group([1, 2])
        found = [float(functional.all_reduce(torch.full((1,), float(rank)), "sum", [0, 1, 2]) + 0)]
        if rank > 0:
            found.append(float(functional.all_reduce(torch.full((1,), float(rank)), "sum", [1, 2]) + 0))
            assert dist.distributed_c10d._get_group_tag(group) == f"ptd:{group.group_name}"
        return found

    assert on_ranks(3, run) == [[3.0], [3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_output_and_input_may_share_memory(world_size: int):
    def run(rank: int) -> None:
        grads = brought(rank, world_size, 3)
        shard = grads[rank]  # reduce-scatter into my slice of the input
        getattr(dist, REDUCE_SCATTER[0])(shard, grads)
        assert torch.equal(shard, all_brought(world_size, world_size, 3).sum(0)[rank])
        grads[:rank], grads[rank + 1 :] = math.nan, math.nan
        getattr(dist, ALL_GATHER[0])(grads, shard)  # all-gather from my slice of the output
        assert torch.equal(grads, all_brought(world_size, world_size, 3).sum(0))
        rows = list(brought(rank, world_size, 3).unbind(0))
        dist.all_to_all(rows, rows)
        assert torch.equal(torch.stack(rows), all_brought(world_size, world_size, 3)[:, rank])

    on_ranks(world_size, run)


def test_autograd_and_version_counters_do_not_see_the_writes():
    def run(rank: int) -> None:
        weight = torch.ones(2, requires_grad=True)
        squared = (weight * weight).sum()  # saves weight
        dist.broadcast(weight, 0)
        dist.all_reduce(weight)
        squared.backward()
        assert weight._version == 0
        assert weight.is_leaf

    on_ranks(2, run)


class SeenByDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


seen: list[str] = []


@pytest.mark.parametrize("mode", [SeenByDispatch, SeenByFunction])
def test_modes_of_the_rank_that_arrives_last_do_not_matter(mode: Callable[[], Any]):
    def run(rank: int) -> Tensor:
        x = torch.full((2,), 1.0 + rank * 2**-12)  # not representable in bf16
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode(rank == 1):
            with mode():
                dist.group.WORLD.allreduce([x]).wait()  # not through dist, which disables function modes itself
                dist.all_to_all([x[:1], x[1:]], [x[:1], x[1:]])
        return x.clone()

    seen.clear()
    assert torch.equal(on_ranks(2, run)[0], torch.full((2,), 2.0 + 2**-12))
    assert not [op for op in seen if any(word in op for word in ("add", "copy", "clone"))]


def test_a_future_of_coalesced_operations_comes_when_all_have_run():
    def run(rank: int) -> list[float]:
        tensors = [torch.full((1,), float(rank + k)) for k in range(2)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        seen: list[float] = []
        manager.works[-1].get_future().then(lambda _: seen.extend(float(tensor) for tensor in tensors)).wait()
        return seen

    assert on_ranks(2, run) == [[1.0, 3.0]] * 2


def test_one_handle_of_coalesced_operations_is_done_when_all_of_them_are():
    def run(asks: bool) -> list[float]:
        first, second = (torch.full((1,), 10.0 * dist.get_rank() + k) for k in range(2))
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for tensor in (first, second):
                dist.broadcast(tensor, 1, async_op=True)
        (work,) = manager.works
        while asks and not work.is_completed():
            assert not work.is_success()
        assert asks or work.wait()
        assert work.is_success()
        return [float(first), float(second)]

    for seed in range(6):
        for asks in (False, True):
            assert simulate(run, 2, asks, seed=seed) == [[10.0, 11.0]] * 2


def test_a_future_of_one_handle_comes_when_all_of_its_operations_have_run():
    def run() -> list[float]:
        first, second = (torch.full((1,), 10.0 * dist.get_rank() + k) for k in range(2))
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for tensor in (first, second):
                dist.broadcast(tensor, 1, async_op=True)
        (work,) = manager.works
        found: list[float] = []
        work.get_future().then(lambda _: found.extend([float(first), float(second)])).wait()
        return found

    for seed in range(8):
        assert simulate(run, 2, seed=seed) == [[10.0, 11.0]] * 2


def test_coalesced_reductions_have_their_operator():
    def run(rank: int) -> list[float]:
        wholes = [torch.arange(2.0) + 10 * rank + size for size in (1, 2)]
        parts = [torch.empty(1) for _ in wholes]
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            for part, whole in zip(parts, wholes, strict=True):
                getattr(dist, REDUCE_SCATTER[0])(part, whole, op=dist.ReduceOp.MAX)
        return [float(part) for part in parts]

    assert on_ranks(2, run) == [[11.0, 12.0], [12.0, 13.0]]


def test_nothing_is_kept_of_what_was_sent_after_coalesced_operations():
    def run(rank: int) -> bool:
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(torch.ones(1))
        tensor = torch.full((2,), float(rank))
        known = weakref.ref(tensor)
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
        del tensor
        gc.collect()
        return known() is None

    assert on_ranks(2, run) == [True, True]


def test_a_message_goes_to_its_receiver_though_another_waits_for_the_same_sender():
    def run(rank: int) -> float:
        received = torch.zeros(1)
        if rank == 0:
            works = [dist.isend(torch.full((1,), float(peer)), peer) for peer in (2, 1)]
            for work in works:
                work.wait()
        else:
            dist.recv(received, 0)
        return float(received)

    assert on_ranks(3, run) == [0.0, 1.0, 2.0]


def test_a_message_from_anyone_has_its_tag_and_its_sender():
    def run(rank: int) -> list[int]:
        group, found = dist.group.WORLD, []
        if rank != 2:
            works = [dist.isend(torch.full((1,), float(10 * rank + tag)), 2, tag=tag) for tag in (3, 4)]
            for sent in works:
                sent.wait()
            return []
        for tag in (4, 3):
            for _ in range(2):
                tensor = torch.zeros(1)
                work = group.recv_anysource([tensor], tag)
                work.wait()
                assert float(tensor) == 10 * work.source_rank() + tag
                found.append(work.source_rank())
        return sorted(found)

    assert on_ranks(3, run)[2] == [0, 0, 1, 1]


def test_groups_have_descriptions_and_are_found_by_their_ranks():
    def run(rank: int) -> tuple[str, float]:
        group: Any = dist.new_group([0, 1], group_desc="a pair")
        return group.group_desc, float(functional.all_reduce(torch.ones(1), "sum", [0, 1]) + 0)

    assert on_ranks(2, run) == [("a pair", 2.0)] * 2


def test_two_groups_of_the_same_ranks_are_apart():
    """Their collectives may come in another order on each rank."""

    def run(rank: int) -> list[float]:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [torch.full((size,), float(rank + size)) for size in (1, 2)]
        order = (0, 1) if rank == 0 else (1, 0)
        works = [dist.all_reduce(tensors[at], group=groups[at], async_op=True) for at in order]
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    assert on_ranks(2, run) == [[3.0, 5.0]] * 2


def test_subgroups_and_mesh():
    def run(rank: int) -> tuple[Any, ...]:
        groups = [dist.new_group(ranks) for ranks in ([0, 2, 5], [1, 3], [4])]
        mine = next(i for i, ranks in enumerate(([0, 2, 5], [1, 3], [4])) if rank in ranks)
        assert [group is dist.GroupMember.NON_GROUP_MEMBER for group in groups] == [i != mine for i in range(3)]
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=groups[mine])
        members = dist.get_process_group_ranks(groups[mine])
        assert (groups[mine].rank(), groups[mine].size()) == (members.index(rank), len(members))
        copied = torch.tensor([float(rank)])
        dist.broadcast(copied, members[-1], group=groups[mine])
        reordered = dist.new_group([3, 1, 0], backend="gloo")  # whatever backend is asked for
        everyone: list[Any] = [None] * 3
        if rank in (0, 1, 3):
            dist.all_gather_object(everyone, rank, group=reordered)
            assert everyone == [0, 1, 3]
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        row, column = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        dist.all_reduce(row, group=mesh.get_group("tp"))
        dist.all_reduce(column, group=mesh["dp"].get_group())
        return float(total), float(copied), float(row), float(column), mesh.get_coordinate(), dist.get_backend()

    for rank, (total, copied, row, column, coordinate, backend) in enumerate(on_ranks(6, run)):
        assert total == {0: 7, 2: 7, 5: 7, 1: 4, 3: 4, 4: 4}[rank]
        assert copied == {0: 5, 2: 5, 5: 5, 1: 3, 3: 3, 4: 4}[rank]
        assert (row, column) == ((3, 12)[rank // 3], (3, 5, 7)[rank % 3])
        assert list(coordinate) == [rank // 3, rank % 3]
        assert backend == "simulated"
