"""Functions that need rows, positions or all elements are refused on shards, and their remedy is right.

Plain PyTorch in one process, on the batches of all ranks, is the reference.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from grad_functions import COLUMN, OF_A_MATRIX, WEIGHTS, WRITES, WRITES_TO_VIEWS, Net, answer, batch
from torch import Tensor

from maingrad.ddp.torch_grads.sharded_grad import ShardedGrad
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
def test_what_needs_rows_positions_or_all_elements_names_the_whole_gradient(name: str) -> None:
    def check(expected: Any) -> None:
        found = answer(OF_A_MATRIX[name], sharded().wide.weight.grad, on_shards=name == "with a row")
        assert not isinstance(found, ShardedGrad) and isinstance(found, type(expected))
        torch.testing.assert_close(found, expected)

    for ranks in (2, 3):  # of three ranks, no border lies between rows
        simulate(check, ranks, OF_A_MATRIX[name](plain(ranks).wide.weight.grad))


@pytest.mark.parametrize("name", [*WRITES, *WRITES_TO_VIEWS])
def test_writes_that_need_other_ranks_are_refused_by_name(name: str) -> None:
    def check() -> None:
        model = sharded()
        before = model.wide.weight.grad.to_local().clone()
        with pytest.raises(RuntimeError, match=r"not defined over the shards .*'wide\.weight'.*full_tensor.*to_local"):
            (WRITES | WRITES_TO_VIEWS)[name](model.wide.weight.grad)
        assert torch.equal(model.wide.weight.grad.to_local(), before)

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
            copied.copy_(param.grad)
            written = torch.mul(param.grad, 3, out=torch.empty_like(total))
            for found, factor in ((total, 2), (copied, 1), (written, 3)):
                assert type(found) is Tensor
                torch.testing.assert_close(found, factor * mine)
        with pytest.raises(RuntimeError, match=r"add_\(\) with a tensor of \(60, 5\)"):
            torch.zeros(60, 5, dtype=torch.float64).add_(model.wide.weight.grad)

    simulate(check, 2)


def test_whole_operands_change_this_ranks_elements_in_place() -> None:
    """In place, as in ``grad.mul_(mask)``; the operands are whole, or broadcast to the whole."""
    whole = torch.arange(300.0, dtype=torch.float64).view(60, 5)

    def change(grad: Any) -> None:
        grad.mul_(whole).add_(WEIGHTS).div_(COLUMN)
        torch._foreach_add_([grad], [whole])
        grad[whole % 2 == 0] = 0.5
        grad -= COLUMN / 7

    reference = plain()
    change(reference.wide.weight.grad)

    def check() -> None:
        model = sharded()
        change(model.wide.weight.grad)
        torch.testing.assert_close(model.wide.weight.grad.full_tensor(), reference.wide.weight.grad)

    simulate(check, 2)
