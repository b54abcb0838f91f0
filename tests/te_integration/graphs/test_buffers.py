"""Microbatches share static memory exactly where the order allows it."""

import pytest
import torch
from graphed import ROWS, WIDTH
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear, make_graphed_callables


def memory(order, microbatches, layers=1, delayed=True):
    """Bytes of the static buffers, in units of one input of a layer."""
    made = [
        Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed, bias=False)
        for _ in range(layers)
    ]
    ddp = DistributedDataParallel(nn.ModuleList(made))
    samples = [(torch.ones(ROWS, WIDTH, requires_grad=True),) for _ in range(microbatches * layers)]
    callables = make_graphed_callables(made, samples, order=order, num_layers_per_chunk=[layers])
    assert ddp.is_clear
    return callables[0]._graphs._order.buffers.nbytes / (ROWS * WIDTH * 4)


def in_turn(count):
    return [1, -1, -1.5] * count


def at_the_end(count):
    return [1, -1] * count + [-1.5] * count


def test_microbatches_one_after_the_other_need_the_memory_of_one():
    # x, y, dy and dx of one microbatch
    assert memory(in_turn(2), 2) == memory(in_turn(4), 4) == 4


def test_a_single_microbatch_shares_with_nobody_and_copies_nothing():
    assert memory(in_turn(1), 1) == 2  # x and dy: y and dx stay where they are computed


@pytest.mark.parametrize("count", [2, 4])
def test_delayed_gradients_keep_their_operands(count):
    # x and dy of each microbatch until its W; what a D gives to autograd is used up, and y too
    assert memory(at_the_end(count), count) == 2 * count + 2


def test_without_a_delay_dgrads_free_their_operands():
    # One after the other: as above. All forwards first: x and y of each, dy and dx of one.
    assert memory([1, -1] * 4, 4, delayed=False) == 4
    assert memory([1] * 4 + [-1] * 4, 4, delayed=False) == 2 * 4 + 2
