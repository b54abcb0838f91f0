"""Layers of many kinds as graphed callables: what they return, what they keep, and what they tell a wrapper."""

from contextlib import nullcontext

import pytest
import torch
from graphed import ROWS, WIDTH
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear, make_graphed_callables

FUSED = {"fuse_wgrad_accumulation": True}


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Tokens(nn.Module):
    """An embedding of integers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.out = Linear(WIDTH, WIDTH, **FUSED)

    def forward(self, x):
        return self.out(self.embedding((x.detach().abs() * 3).long().clamp(max=9)).sum(1)) + x


class Unused(nn.Module):
    """One of its weights gets no gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Linear(WIDTH, WIDTH, **FUSED), Linear(WIDTH, WIDTH, **FUSED)

    def forward(self, x):
        return self.used(x)


class TiedInside(nn.Module):
    """A fused and a plain use of one weight, and two fused ones of another."""

    def __init__(self):
        super().__init__()
        self.fused, self.again = Linear(WIDTH, WIDTH, **FUSED), Linear(WIDTH, WIDTH, **FUSED)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.plain.weight = self.fused.weight

    def forward(self, x):
        return self.plain(self.again(self.fused(self.again(x))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = LayerNormMLP(WIDTH, 16, **FUSED)
        self.mlp.fc1_weight.requires_grad_(False)

    def forward(self, x):
        return self.mlp(x)


LAYERS = {
    "with its bias apart": lambda: Linear(WIDTH, WIDTH, return_bias=True, **FUSED),
    "with its norm": lambda: LayerNormMLP(WIDTH, 16, return_layernorm_output=True, return_bias=True, **FUSED),
    "zero centered": lambda: LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", zero_centered_gamma=True, **FUSED),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "batch norm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "identity": nn.Identity,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "tokens": Tokens,
    "unused": Unused,
    "tied inside": TiedInside,
    "frozen": Frozen,
}


def train(make, graphed, autocast):
    """Outputs, gradients and state of three steps of two microbatches."""
    torch.manual_seed(0)
    layer, head = make(), nn.Linear(WIDTH, 1)
    ddp = DistributedDataParallel(nn.ModuleList([layer, head]), DistributedDataParallelConfig(overlap_grad_reduce=True))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    calls = [layer, layer]
    around = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext
    with around():
        if graphed:
            calls = make_graphed_callables([layer], [(batch(),)] * 2, order=[1, 1, -1, -1])
    found = []
    for step in range(3):
        inputs = [batch(10 * step + k) for k in range(2)]
        losses = []
        for call, x in zip(calls, inputs, strict=True):
            with around():
                outputs = call(x)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                losses.append(sum((head(output) * (i + 1)).square().mean() for i, output in enumerate(outputs)))
            found += [output.detach().clone() for output in outputs]
        for k, loss in enumerate(losses):
            with ddp.no_sync() if k == 0 else nullcontext():
                loss.backward()
        found += [x.grad for x in inputs]
        ddp.finish_grad_sync()
        ddp.expose_grads()
        found += [param.grad.clone() for param in ddp.parameters() if param.requires_grad]
        optimizer.step()
        ddp.zero_grad_buffer()
    return [*found, *(tensor.clone() for tensor in layer.state_dict().values())]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(14)
def test_a_layer_of_this_kind(kind, autocast):
    eager, graphed = (train(LAYERS[kind], each, autocast) for each in (False, True))
    assert len(eager) == len(graphed)
    for number, (one, other) in enumerate(zip(eager, graphed, strict=True)):
        assert torch.equal(one, other), number


def launches(graphed):
    """For each backward of an iteration: which buckets were launched when it had ended."""
    torch.manual_seed(0)
    layers = nn.ModuleList(LayerNormLinear(WIDTH, WIDTH, delay_wgrad_compute=k == 1, **FUSED) for k in range(3))
    ddp = DistributedDataParallel(layers, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    calls = list(layers) * 2
    if graphed:
        order = [1, 1, -1, -1, -1.5, -1.5]
        calls = make_graphed_callables(list(layers), [(batch(),)] * 6, order=order, num_layers_per_chunk=[3])
    seen = []

    def look():
        seen.append([bucket.phase.value for bucket in ddp.buckets])

    outputs = []
    for k in range(2):
        x = batch(k)
        for call in calls[3 * k : 3 * k + 3]:
            x = call(x)
        outputs.append(x.sum())
    with ddp.no_sync():
        outputs[0].backward()
    look()
    outputs[1].backward()
    look()
    for call in (calls[1], calls[4]):
        call.backward_dw()
        look()
    ddp.finish_grad_sync()
    return seen


def test_buckets_are_launched_when_an_eager_backward_launches_them():
    eager, graphed = simulate(launches, 2, False), simulate(launches, 2, True)
    assert eager == graphed
    phases = eager[0]
    assert set(phases[0]) == {"accumulating"}
    assert "reducing" in phases[1] and "accumulating" in phases[1]
    assert set(phases[3]) == {"reducing"}
