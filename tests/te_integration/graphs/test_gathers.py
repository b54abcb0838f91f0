"""Gathers of parameters under the next forward: replays read memory by address, and wait all the same."""

import torch
from graphed import ROWS, WIDTH
from strict_gathers import strict_gathers
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import LayerNormLinear, make_graphed_callables


def train(graphed):
    torch.manual_seed(0)
    net = nn.Sequential(*(LayerNormLinear(WIDTH, WIDTH, fuse_wgrad_accumulation=True) for _ in range(3)))
    layers = list(net)
    ddp = DistributedDataParallel(
        net,
        DistributedDataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=1
        ),
    )
    optimizer = DistributedOptimizer(ddp, 0.1)
    if graphed:
        samples = [(torch.ones(ROWS, WIDTH, requires_grad=True),) for _ in layers]
        net[0], net[1], net[2] = make_graphed_callables(layers, samples)
    losses = []
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = ddp(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    return [*losses, *(param.detach().clone() for layer in layers for param in layer.parameters())]


def test_a_replay_waits_for_the_parameters_of_its_layer():
    with strict_gathers() as launched:  # what has not arrived is NaN
        results = list(zip(simulate(train, 2, False), simulate(train, 2, True), strict=True))
    assert len(launched) > 2 * 2 * 3
    for eager, graphed in results:
        assert all(map(torch.equal, eager, graphed))
        assert all(torch.isfinite(tensor).all() for tensor in graphed)
