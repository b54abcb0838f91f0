"""What a program writes to a sharded parameter itself: copies, draws and new data; and what it may ask of one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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
def draw_alike() -> None:
    """Ranks of two instances of one rank each have the same elements."""
    model = fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2, 1)), "hsdp")
    torch.manual_seed(0)
    expected = torch.empty(4, 4).normal_()
    torch.manual_seed(0)
    assert torch.equal(model.weight.normal_().detach(), expected)


def test_ranks_that_share_no_parameter_draw_alike() -> None:
    simulate(draw_alike, 2)


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


@pytest.mark.parametrize(
    "other",
    [lambda data: data.view(torch.int32), lambda data: data.view(8, 2), lambda data: data[:2], lambda data: data.t()],
    ids=["dtype", "shape", "rows", "strides"],
)
def test_data_that_shows_the_memory_in_another_way_is_refused(other: Callable[[Tensor], Tensor]) -> None:
    param = fully_shard(nn.Linear(4, 4), WORLD_OF_ONE).weight
    before = param.data
    with pytest.raises(RuntimeError, match=r"a sharded parameter stays in the memory of its unit"):
        param.data = other(before)
    param.data = before.view(4, 4)  # shows it as it is
    assert param.data.dtype is torch.float32 and param.data.shape == (4, 4) and param.data.is_contiguous()


def test_a_gradient_that_is_deleted_is_gone() -> None:
    model = fully_shard(nn.Linear(4, 4), WORLD_OF_ONE)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    del model.weight.grad
    assert model.weight.grad is None and model.bias.grad is not None


ASKS: dict[str, Callable[[Tensor], Any]] = {
    **{name: getattr(torch, name) for name in ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")},
    "full_like": lambda param: torch.full_like(param, 2.0),
    "randint_like": lambda param: torch.randint_like(param, 5),
    "result_type": lambda param: torch.result_type(param, 1.0),
    "is_set_to": lambda param: param.is_set_to(param),
    "is_shared": lambda param: param.is_shared(),
    "is_pinned": lambda param: param.is_pinned(),
    "new_tensor": lambda param: param.new_tensor([1.0]),
    "format": lambda param: f"{param}"[:9],
}
LEADS_TO_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "storage": lambda param: param.untyped_storage().nbytes() >= 64,
    "typed storage": lambda param: type(param._typed_storage()),
    "dlpack": lambda param: param.__dlpack_device__(),
    "init.normal_": nn.init.normal_,
    "init.constant_": lambda param: nn.init.constant_(param, 1.0),
}


@pytest.mark.parametrize("name", [*ASKS, *LEADS_TO_VALUES])
def test_what_reads_no_values_is_answered(name: str) -> None:
    """With grad mode, and, but for addresses, in the forward of a function of autograd."""
    ask = {**ASKS, **LEADS_TO_VALUES}[name]
    answers: list[Any] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
            answers.append(ask(param))
            return x * 1

    param, plain = fully_shard(nn.Linear(4, 4), WORLD_OF_ONE).weight, nn.Linear(4, 4).weight
    answers.append(ask(param))
    if name in ASKS:
        Asks.apply(torch.ones(1), param)
    expected = ask(plain)
    for answer in answers:
        assert type(answer) is (Tensor if name.endswith(("_like", "new_tensor")) else type(answer))
        assert isinstance(expected, (Tensor, str)) or answer == expected
        assert not isinstance(expected, Tensor) or (answer.shape, answer.dtype) == (expected.shape, expected.dtype)
