"""Products over tensor-parallel ranks, beside the same products whole: eagerly, and what a compiler traces of them."""

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import Float8CurrentScaling, Linear, autocast
from maingrad.te_integration.dense.tensor_parallel import multiply_over_ranks, ranks_of

K, F, SHAPE = 6, 8, (4, 2, 6)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fused(out_features: int, weight: Tensor, *, bias: bool) -> Linear:
    layer = Linear(weight.shape[1], out_features, bias=bias, dtype=torch.float64, fuse_wgrad_accumulation=True)
    layer.weight.data.copy_(weight)
    return layer


def over_ranks(sequence_dim: int | None, shares: bool) -> list[Tensor]:
    """A column-parallel product, perhaps another one of the same input, and a row-parallel product of both."""
    rank, ranks = dist.get_rank(), ranks_of(dist.group.WORLD, sequence_dim)  # type: ignore[arg-type]
    up, beside, down = random(1, F, K), random(2, F, K), random(3, K, F)
    first, other = (fused(F // 2, each.chunk(2)[rank], bias=True) for each in (up, beside))
    last = fused(K, down.chunk(2, 1)[rank], bias=False)
    for layer in (first, other):
        layer.bias.data.fill_(0.25)
    model = DistributedDataParallel(nn.ModuleList([first, other, last]), process_group=WORLD_OF_ONE)

    def mine(whole: Tensor) -> Tensor:
        return whole if sequence_dim is None else whole.chunk(2, sequence_dim)[rank]

    x, of_output = random(4, *SHAPE).requires_grad_(), random(5, *SHAPE)
    given = mine(x.detach()).clone().requires_grad_()
    if shares:
        arguments: Any = first, "column", ranks, given, (first.weight,), first.bias, None
        hidden, handed_on = multiply_over_ranks(*arguments, shares=True)
        hidden = hidden.sin() * other.multiply(handed_on, (other.weight,), other.bias, None)
    else:
        hidden = multiply_over_ranks(first, "column", ranks, given, (first.weight,), first.bias, None).sin()
    output = multiply_over_ranks(last, "row", ranks, hidden, (last.weight,), None, None)
    (output * mine(of_output)).sum().backward()
    model.finish_grad_sync()

    weights = [each.requires_grad_() for each in (up, beside, down)]
    inside = (x @ up.T + 0.25).sin() * (x @ beside.T + 0.25 if shares else 1.0)
    expected = inside @ down.T
    (expected * of_output).sum().backward()
    pairs = [(output, mine(expected)), (given.grad, mine(x.grad))]  # type: ignore[arg-type]
    for layer, weight, dim in zip((first, other, last), weights, (0, 0, 1), strict=True):
        pairs.append(
            (layer.weight.main_grad, torch.zeros(()) if weight.grad is None else weight.grad.chunk(2, dim)[rank])
        )
    return [(found - wanted).detach().abs().max() for found, wanted in pairs]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("sequence_dim", "shares"), [*itertools.product((None, 0, 1), (False,)), (None, True)], ids=str
)
@pytest.mark.sampled(8)
def test_products_are_those_of_one_process(
    sequence_dim: int | None, shares: bool, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)
    for errors in simulate(over_ranks, 2, sequence_dim, shares):
        assert max(errors) < 1e-12


class _Traced(threading.local):
    """Whether this thread, a rank, runs what a compiler traces."""

    now = False


def quantised(mode: Any, traces: bool) -> list[Tensor]:
    rank, ranks = dist.get_rank(), ranks_of(dist.group.WORLD, 0)  # type: ignore[arg-type]
    layer = Linear(16, 16, bias=False, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.data.copy_(random(1, 32, 16).chunk(2)[rank])
    model = DistributedDataParallel(layer, process_group=WORLD_OF_ONE)
    x = random(2, 2, 16).add(rank).bfloat16().requires_grad_()
    with autocast(recipe=Float8CurrentScaling()):
        mode.now = traces
        y = multiply_over_ranks(layer, "column", ranks, x, (layer.weight,), None, None)
        mode.now = False
    y.float().square().sum().backward()
    model.finish_grad_sync()
    assert x.grad is not None
    return [y.detach(), x.grad, layer.weight.main_grad.clone()]


def test_a_quantised_product_of_a_gathered_input(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = _Traced()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: mode.now)
    found, expected = (simulate(quantised, 2, mode, traces) for traces in (True, False))
    for mine, eager in zip(found, expected, strict=True):
        assert mine[0].shape == (4, 16)
        assert all(map(torch.equal, mine, eager))
