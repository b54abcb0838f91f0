"""Small pipelines for tests of schedules: chunks of linear layers, and the plain order to compare with."""

import random

import orders
import torch
from delaying import DelayingLinear
from hypothesis import strategies as st
from torch import nn

from maingrad.te_integration import Linear

WIDTH = 8
ROWS = 3


def stand_in(delay):
    return DelayingLinear(WIDTH, WIDTH, delay=delay)


def unfused(delay):
    return Linear(WIDTH, WIDTH, delay_wgrad_compute=delay)


def fused(delay):
    return Linear(WIDTH, WIDTH, delay_wgrad_compute=delay, fuse_wgrad_accumulation=True)


def make_chunks(make_linear, delays):
    """One chunk per entry: linear layers that delay or not, each between a norm and an activation."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(*(layer for delay in chunk for layer in (nn.LayerNorm(WIDTH), make_linear(delay), nn.GELU())))
        for chunk in delays
    )


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def loss_of(y, microbatch):
    return (y * (microbatch + 1)).square().mean()


def plain_losses(chunks, inputs):
    """The plain order: one microbatch after the other through the whole model."""
    losses = []
    for k, x in enumerate(inputs):
        for chunk in chunks:
            x = chunk(x)
        loss = loss_of(x, k)
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients(chunks):
    return {
        name: param.main_grad if hasattr(param, "main_grad") else param.grad
        for name, param in chunks.named_parameters()
    }


@st.composite
def scheduled(draw):
    """A random order of a pipeline, and which layers of its chunks delay: some, where wgrads are written down."""
    rules = draw(orders.rules(max_chunks=3, max_microbatches=4, connected=True))
    delays = []
    for chunk in range(1, rules.num_chunks + 1):
        layers = draw(st.lists(st.booleans(), min_size=1, max_size=3))
        delays.append(layers if chunk not in rules.delayed or any(layers) else [True, *layers])
    order = orders.draw_order(rules, random.Random(draw(st.integers(0, 2**32))))
    return order, delays
