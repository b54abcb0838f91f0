"""What the ranks of a layer that is cut add up, and in which dtype."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import Linear

F = 4


def alone(layer: Any) -> DistributedDataParallel:
    return DistributedDataParallel(layer, process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()])


def grad_of_input(original: bool, sequence_parallel: bool) -> Tensor:
    """Of a column-parallel layer under autocast, whose ranks have 256 and 1 in every element."""
    given: Any = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "save_original_input": original}
    layer = Linear(2, 2, bias=False, parallel_mode="column", fuse_wgrad_accumulation=True, **given)
    wrapped = alone(layer)
    torch.nn.init.constant_(layer.weight, (256.0, 1.0)[dist.get_rank()])
    x = torch.ones(F // 2 if sequence_parallel else F, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = wrapped(x)
    output.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    return x.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_ranks_sum_the_gradient_in_the_dtype_of_the_input_that_is_saved(
    original: bool, sequence_parallel: bool
) -> None:
    """257 has 9 bits, and bf16 has 8: a sum of what autocast has cast rounds."""
    for grad in simulate(grad_of_input, 2, original, sequence_parallel):
        assert set(grad.flatten().tolist()) == {257.0 if original else 256.0}
