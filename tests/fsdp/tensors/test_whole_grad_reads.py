"""Functions that need rows, positions or all elements run on whole gradients; their writes are refused.

Plain PyTorch in one process, on the batches of all ranks, is the reference.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from grad_functions import COLUMN, OF_A_MATRIX, WEIGHTS, WRITES, WRITES_TO_VIEWS, Net, batch
from torch import Tensor

from maingrad.ddp import WORLD_OF_ONE
from maingrad.ddp.stock.sharded_grad import ShardedGrad
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


def plain(ranks: int = 2) -> Any:
    model = Net()
    (sum(model(batch(rank)).square().mean() for rank in range(ranks)) / ranks).backward()
    return model


def backward(model: Any) -> None:
    model(batch(dist.get_rank())).square().mean().backward()


def sharded() -> Any:
    model: Any = fully_shard(Net())
    backward(model)
    return model


@pytest.mark.parametrize("name", OF_A_MATRIX)
@pytest.mark.sampled(6)
def test_what_needs_rows_positions_or_all_elements_is_that_of_the_whole_gradient(name: str) -> None:
    def check(expected: Any) -> None:
        found = OF_A_MATRIX[name](sharded().wide.weight.grad)
        assert not isinstance(found, ShardedGrad) and isinstance(found, type(expected))
        torch.testing.assert_close(found, expected)

    for ranks in (2, 3):  # of three ranks, no border lies between rows
        simulate(check, ranks, OF_A_MATRIX[name](plain(ranks).wide.weight.grad))


def test_a_number_of_one_element_is_every_ranks() -> None:
    expected = plain().scale.grad

    def check() -> None:
        model = sharded()
        grad = model.scale.grad
        assert float(grad) == grad.item() == grad.tolist() == pytest.approx(expected.item())
        assert bool(grad) and int(grad * 100) == int(expected * 100)
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            model.wide.weight.grad.item()

    simulate(check, 2)


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_need_other_ranks_are_refused_by_name(name: str) -> None:
    def check() -> None:
        model = sharded()
        before = model.wide.weight.grad.clone()
        with pytest.raises(
            RuntimeError, match=r"\(\) is not defined over the shards .*'wide\.weight'.*full_tensor.*to_local"
        ):
            WRITES[name](model.wide.weight.grad)
        assert torch.equal(model.wide.weight.grad, before)

    simulate(check, 2)


@pytest.mark.parametrize("name", WRITES_TO_VIEWS)
def test_writes_to_what_was_gathered_are_refused_and_not_lost(name: str) -> None:
    def check() -> None:
        model = sharded()
        with pytest.raises(RuntimeError, match=r"\(\) would change a copy: .* of a sharded gradient.*full_tensor"):
            WRITES_TO_VIEWS[name](model.wide.weight.grad)

    simulate(check, 2)


def test_a_view_in_sizes_of_this_rank_has_norms_and_no_rows() -> None:
    """A program's ``grad.size(0)`` is this rank's, and no number of rows of the whole."""
    reference = plain()

    def check() -> None:
        model = sharded()
        grad = model.wide.weight.grad
        viewed = grad.view(grad.numel() // 2, 2)
        torch.testing.assert_close((viewed * 2).norm(), 2 * reference.wide.weight.grad.norm())
        with pytest.raises(RuntimeError, match=r"this rank's elements alone.*'wide\.weight'"):
            viewed.sum(0)

    simulate(check, 2)


def test_plain_tensors_that_take_shards_take_this_ranks_elements() -> None:
    reference = plain()

    def check() -> None:
        model = sharded()
        for name, param in model.named_parameters():
            whole, shard = reference.get_parameter(name).grad, param.shard
            mine = whole.reshape(-1)[shard.start : shard.end].view(param.shape)
            total, copied = torch.zeros_like(param.detach()), torch.empty_like(param.detach())
            total.add_(param.grad)
            torch._foreach_add_([total], [param.grad])
            if param.dim():
                copied[:] = param.grad
            else:
                copied.copy_(param.grad)
            written = torch.mul(param.grad, 3, out=torch.empty_like(total))
            assert torch.equal(param.grad, param.grad.to_local().clone())
            assert torch.allclose(mine, param.grad, rtol=1e-9) and torch.allclose(param.grad, whole, rtol=1e-9)
            changed = param.grad.to_local() + (dist.get_rank() == shard.grid.size - 1)
            if name == "wide.weight":  # the last rank's elements differ, and all ranks see it
                assert not torch.equal(param.grad, changed) and not torch.allclose(param.grad, changed)
            torch.testing.assert_close(torch.dot(param.grad.view(-1), mine.view(-1)), whole.square().sum())
            for found, factor in ((total, 2), (copied, 1), (written, 3)):
                assert type(found) is Tensor
                torch.testing.assert_close(found, factor * mine)
        with pytest.raises(RuntimeError, match=r"add_\(\) of a tensor of another shape, \(60, 5\)"):
            torch.zeros(60, 5, dtype=torch.float64).add_(model.wide.weight.grad)

    simulate(check, 2)


def test_whole_operands_change_this_ranks_elements_in_place() -> None:
    """In place, as in ``grad.mul_(mask)``; the operands are whole, or broadcast to the whole."""
    whole = torch.arange(300.0, dtype=torch.float64).view(60, 5)

    def change(grad: Any) -> None:
        grad.mul_(whole).add_(WEIGHTS).div_(COLUMN)
        torch._foreach_add_([grad], [whole])
        grad[whole % 2 == 0] = 0.5
        grad -= grad.mean(dim=1, keepdim=True)

    reference = plain()
    change(reference.wide.weight.grad)

    def check() -> None:
        model = sharded()
        change(model.wide.weight.grad)
        torch.testing.assert_close(model.wide.weight.grad.full_tensor(), reference.wide.weight.grad)

    simulate(check, 2)


def test_gradients_of_several_meshes_are_gathered_one_after_the_other() -> None:
    reference = plain()

    def check() -> None:
        model: Any = Net()
        fully_shard(model.head, mesh=WORLD_OF_ONE)
        fully_shard(model)
        backward(model)
        both = torch.cat([model.wide.weight.grad.flatten(), model.head.weight.grad.flatten()])
        expected = torch.cat([reference.wide.weight.grad.flatten(), model.head.weight.grad.to_local().flatten()])
        torch.testing.assert_close(both, expected)

    simulate(check, 2)
