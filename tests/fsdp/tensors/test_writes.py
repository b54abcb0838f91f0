"""What a program writes to a sharded parameter itself: copies and draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    name: (lambda param, name=name, args=args: getattr(param, name)(*args))
    for name, args in {
        "bernoulli_": (),
        "cauchy_": (),
        "exponential_": (),
        "geometric_": (0.5,),
        "log_normal_": (),
        "normal_": (),
        "random_": (),
        "uniform_": (),
    }.items()
}


@torch.no_grad()
def draw_each() -> None:
    model = fully_shard(nn.Linear(4, 4))
    before = model.weight.detach().clone()
    for name, draw in DRAWS.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) on the parameter 'weight' .* while it is sharded"):
            draw(model.weight)
        assert torch.equal(model.weight, before)
        draw(model.weight.data)  # this rank's elements alone
        model.weight.data.copy_(before)


def test_draws_in_place_are_refused_among_several_ranks() -> None:
    simulate(draw_each, 2)


@pytest.mark.parametrize("name", DRAWS)
def test_one_rank_draws_as_it_does_without_fully_shard(name: str) -> None:
    model, plain = fully_shard(nn.Linear(4, 4), WORLD_OF_ONE), nn.Linear(4, 4)
    with torch.no_grad():
        for weight in (plain.weight, model.weight):
            torch.manual_seed(0)
            DRAWS[name](weight)
    assert torch.equal(model.weight.detach(), plain.weight)


@torch.no_grad()
def copy_whole() -> None:
    model = fully_shard(nn.Linear(16, 16))
    whole = torch.arange(256.0).view(16, 16)
    with pytest.raises(RuntimeError, match=r"copy_\(\) of a whole tensor \(16, 16\) to the parameter 'weight'"):
        model.weight.copy_(whole)
    model.weight.copy_(torch.ones_like(model.weight.detach()))
    model.bias.copy_(torch.ones(()))  # which torch broadcasts
    with model.unsharded():
        assert (model.weight == 1).all()
        assert (model.bias == 1).all()


def test_whole_tensors_are_not_copied_to_a_part() -> None:
    simulate(copy_whole, 2)


def test_a_part_that_is_the_whole_takes_a_whole_tensor() -> None:
    model = fully_shard(nn.Linear(4, 4), WORLD_OF_ONE)
    whole = torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        model.weight.copy_(whole)
    assert torch.equal(model.weight.detach(), whole)
