"""Shards of gradients by themselves: whose elements they are, their norms, and which functions write them."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maingrad.ddp.collectives.rank_grid import RankGrid
from maingrad.ddp.plan.model_slice import ModelSlice, slice_of_blocks, slice_of_copy
from maingrad.ddp.torch_grads.grad_reads import reads_nothing, writes
from maingrad.ddp.torch_grads.over_ranks import ShardInfo, everyone_of, norms, whole
from maingrad.ddp.torch_grads.sharded_grad import make_sharded_grad
from maingrad.launch import simulate

ALONE = RankGrid(None, None, None)


def info(numel: int, start: int = 0, end: int | None = None, **more: Any) -> ShardInfo:
    given: dict[str, Any] = {"grid": ALONE, "num_replicas": 1, "unit": "", "everyone": ALONE, **more}
    return ShardInfo("weight", (numel,), start, numel if end is None else end, **given)


@pytest.mark.parametrize("name", ["add_", "__iadd__", "__itruediv__", "__iand__", "__setitem__", "copy_", "clamp_"])
def test_functions_that_write_their_first_argument(name: str) -> None:
    assert writes(getattr(Tensor, name)) and not reads_nothing(getattr(Tensor, name))


@pytest.mark.parametrize(
    "name", ["add", "__add__", "__radd__", "__getitem__", "__invert__", "__index__", "__int__", "__iter__", "abs"]
)
def test_functions_that_read_values_alone(name: str) -> None:
    assert not writes(getattr(Tensor, name)) and not reads_nothing(getattr(Tensor, name))


@pytest.mark.parametrize("name", ["size", "numel", "__len__", "requires_grad_", "detach_", "new_zeros", "retain_grad"])
def test_functions_that_do_neither(name: str) -> None:
    assert reads_nothing(getattr(Tensor, name)) and not writes(getattr(Tensor, name))


def test_attributes_read_nothing_but_for_views_of_elements() -> None:
    for name in ("shape", "dtype", "device", "grad", "requires_grad", "is_sparse"):
        assert reads_nothing(getattr(Tensor, name).__get__), name
    for name in ("T", "H", "mT", "mH", "real", "imag"):
        assert not reads_nothing(getattr(Tensor, name).__get__), name
    assert reads_nothing(torch._fused_adamw_) and not reads_nothing(torch._foreach_add_)
    assert writes(torch._foreach_add_) and not writes(torch._foreach_add)


def test_a_shard_is_cut_where_other_ranks_hold_the_rest() -> None:
    def on_each_rank() -> list[bool]:
        world, rank = dist.group.WORLD, dist.get_rank()
        two = RankGrid(world, None, None)
        kinds: list[ModelSlice | None] = [
            slice_of_blocks((8,), 0, [8], world, rank),
            slice_of_blocks((8,), 0, [8], world, rank, "expert"),
            slice_of_copy((4,), world, "dense"),
            slice_of_blocks((4,), 0, [4], None, 0),
            None,
        ]
        shards = [info(4, model_slice=kind, is_slice=marked) for kind in kinds for marked in (False, True)]
        assert [each.cut_slice is not None for each in shards] == [True] * 4 + [False] * 6
        assert [each.is_cut for each in shards] == [True] * 2 + [False] * 7 + [True], "a mark, and ranks outside"
        assert not info(4, is_slice=True, everyone=two).is_cut, "all ranks are there"
        assert not info(4, is_slice=True, everyone=None).is_cut
        for each in shards[:-1]:
            assert everyone_of(each) is ALONE
        with pytest.raises(RuntimeError, match=r"slice alone: parameter 'weight' .*tensor_parallel_group"):
            everyone_of(shards[-1])
        with pytest.raises(RuntimeError, match="different numbers of parameters whose units have meshes of their own"):
            everyone_of(info(4, everyone=None))
        return [bool(torch.equal(whole(torch.full((4,), float(rank)), each), expected)) for each, expected in (
            (shards[0], torch.tensor([0.0] * 4 + [1.0] * 4)),
            (shards[4], torch.full((4,), float(rank))),
            (shards[8], torch.full((4,), float(rank))),
        )]  # fmt: skip

    assert simulate(on_each_rank, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_whole_gradient_is_joined_inside_an_instance(dtype: torch.dtype) -> None:
    """Two instances of two ranks: the other one has the same elements, which do not count twice."""
    elements = torch.tensor([3, 0, 5, 1, 0, 7, 2]).to(dtype)

    def on_each_rank() -> Tensor:
        rank = dist.get_rank()
        inner = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        outer = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
        start, end = ((0, 3), (3, 7))[rank % 2]
        grid = RankGrid(inner, outer, None)
        found = whole(elements[start:end], info(7, start, end, grid=grid, num_replicas=2))
        everywhere = whole(elements, info(7, grid=RankGrid(inner, None, None), num_replicas=2))
        assert torch.equal(everywhere, elements) and everywhere.data_ptr() != elements.data_ptr()
        return found

    for found in simulate(on_each_rank, 4):
        assert found.dtype is dtype and torch.equal(found, elements)


GRADS = [torch.tensor([3.0, -4.0, 0.5]), torch.tensor([]), torch.tensor([2.0 - 1.0j, 1.0j]), torch.tensor([-6.0])]


@pytest.mark.parametrize("ord", [0.5, 1, 2, 3, math.inf])
def test_norms_count_each_element_once(ord: float) -> None:
    replicas, copies = (1, 2, 3, 1), (1, 1, 2, 4)
    shards = [
        info(grad.numel(), num_replicas=count, copies=times)
        for grad, count, times in zip(GRADS, replicas, copies, strict=True)
    ]
    found = norms(GRADS, shards, ord, None)
    assert [each.dtype for each in found] == [torch.float32] * 4
    for each, grad, count, times in zip(found, GRADS, replicas, copies, strict=True):
        expected = torch.zeros(()).double() if not grad.numel() else grad.abs().double().norm(ord)
        expected = expected if math.isinf(ord) else expected / (count * times) ** (1 / ord)
        torch.testing.assert_close(each, expected.float())
    assert [each.dtype for each in norms(GRADS, shards, ord, torch.float64)] == [torch.float64] * 4
    mixed = norms([GRADS[0].double(), GRADS[3].bfloat16()], shards[:2], ord, None)
    assert [each.dtype for each in mixed] == [torch.float64, torch.bfloat16]
    alike = norms([GRADS[0], GRADS[0]], [shards[2], shards[2]], ord, None)
    torch.testing.assert_close(*alike)
    power = 1.0 if math.isinf(ord) else 6 ** (1 / ord)
    torch.testing.assert_close(alike[0], GRADS[0].norm(ord) / power)


@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_norms_of_gradients_without_a_whole_are_one_of_all(ord: float) -> None:
    """Ranks have two of them, and one. A norm of these norms is the norm of all, on each rank."""

    def on_each_rank() -> list[Tensor]:
        mine = ([torch.tensor([3.0, -4.0]), torch.tensor([1.0])], [torch.tensor([-7.0, 2.0, 2.0])])[dist.get_rank()]
        two = RankGrid(dist.group.WORLD, None, None)
        shards = [info(grad.numel(), grid=two, everyone=two, has_whole=False) for grad in mine]
        return norms(mine, shards, ord, None)

    expected = torch.tensor([3.0, -4.0, 1.0, -7.0, 2.0, 2.0]).norm(ord)
    first, second = simulate(on_each_rank, 2)
    assert (len(first), len(second)) == (2, 1)
    for found in (first, second):
        torch.testing.assert_close(torch.stack(found).norm(ord), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)])
@pytest.mark.parametrize("bad", [0, 1])
def test_inf_is_looked_for_over_the_ranks_of_each_gradient(order: tuple[int, ...], bad: int) -> None:
    """One gradient over both ranks, one that this rank has alone, and a plain one: all ranks hear of each."""

    def on_each_rank() -> list[float]:
        two, rank = RankGrid(dist.group.WORLD, None, None), dist.get_rank()
        found = []
        for index in range(3):
            grads: list[Tensor] = [
                make_sharded_grad(torch.ones(3), info(6, 3 * rank, 3 * rank + 3, grid=two, everyone=two)),
                make_sharded_grad(torch.ones(2), info(2)),
                torch.ones(4),
            ]
            if rank == bad:
                (grads[index] if index == 2 else grads[index].to_local()).fill_(math.inf)
            inf, scale = torch.zeros(1), torch.full((1,), 0.5)
            torch._amp_foreach_non_finite_check_and_unscale_([grads[each] for each in order], inf, scale)
            found.append(inf.item())
            expected = 0.5 if rank != bad or index != 0 else math.inf
            assert (grads[0].to_local() == expected).all()
        return found

    assert simulate(on_each_rank, 2) == [[1.0, 1.0, float(2 in order)]] * 2
