"""What the ranks of a layer that is cut add up, and in which dtype."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import LayerNormMLP, Linear

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


def microbatches_of_recomputed_blocks(kind: str) -> list[int]:
    """Of the weight gradients that wait behind one backward through two blocks, each a reentrant checkpoint."""
    given: Any = {"tp_group": dist.group.WORLD, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
    layer: Any = (
        LayerNormMLP(4, 8, set_parallel_mode=True, **given)
        if kind == "both"
        else Linear(4, 4, parallel_mode=kind, **given)
    )
    wrapped = alone(layer)
    x = torch.ones(2, 2 if kind == "row" else 4, requires_grad=True)
    sum(checkpoint(wrapped, x, use_reentrant=True).sum() for _ in range(2)).backward()
    assert len(layer.wgrad_queue) == (4 if kind == "both" else 2)
    pending: list[int] = layer.wgrad_queue.pending_microbatches
    layer.wgrad_queue.drain()
    return pending


@pytest.mark.parametrize("kind", ["column", "row", "both"])
def test_uses_in_two_recomputed_blocks_are_one_microbatch(kind: str) -> None:
    assert simulate(microbatches_of_recomputed_blocks, 2, kind) == [[0], [0]]


def shared(fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the input that goes on, and the input's gradient, where each rank has another weight."""
    layer = Linear(4, 4, bias=False, fuse_wgrad_accumulation=fused)
    kept = alone(layer)
    torch.nn.init.constant_(layer.weight, 1.0 + dist.get_rank())
    x, group = torch.ones(2, 4, requires_grad=True), dist.group.WORLD
    assert group is not None
    y, others = layer.multiply_columns(x, None, group.group_name, 2, dist.get_rank(), shares=True)
    (y.sum() + 10 * others.sum()).backward()
    kept.finish_grad_sync()
    assert x.grad is not None and layer.weight.main_grad.eq(2).all()
    return y.detach(), others.detach(), x.grad


@pytest.mark.parametrize("fused", [False, True])
def test_what_other_products_add_to_the_inputs_gradient_is_summed_too(fused: bool) -> None:
    for rank, (output, others, grad) in enumerate(simulate(shared, 2, fused)):
        assert output.eq(4.0 * (1 + rank)).all() and others.eq(1).all()
        assert grad.eq(4 * 1 + 4 * 2 + 2 * 10).all(), "of both ranks' weights, and of both ranks' other products"
