"""``ShardedAdamW`` where state, groups or masters change between steps; counters of a scalar's state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.fsdp import ShardedAdamW, fully_shard, translate_state_dicts
from maingrad.launch import simulate

HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def make(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)))


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def groups_later(place: str | None) -> list[Tensor]:
    model = make()
    params = list(model.parameters())
    optimizer = ShardedAdamW(params[:1], **HYPER, offload_state=place)
    for seed in range(2):
        step(model, optimizer, seed)
    optimizer.add_param_group({"params": params[1:]})
    for seed in range(2, 5):
        step(model, optimizer, seed)
    return list(optimizer.masters().values())


def test_a_group_that_comes_after_steps_with_state_on_the_host() -> None:
    """Its members have other places in the memory on the device, and so have those of before."""
    assert all(map(torch.equal, groups_later("host"), groups_later(None)))


def test_a_parameter_that_moves_to_another_group_has_that_ones_options() -> None:
    model = make(torch.float32)
    first, *rest = model.parameters()
    optimizer = ShardedAdamW([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.0}], weight_decay=0.0)
    step(model, optimizer, 0)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    before = first.detach().clone()
    step(model, optimizer, 1)
    assert torch.equal(first.detach(), before)


def test_a_write_between_two_loads_that_change_nothing_is_a_master() -> None:
    """Loads of the values that a parameter has keep its 16 bits of remainder, and a write forgets them."""
    model = make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    for seed in range(3):
        step(model, optimizer, seed)
    param = model[0].weight
    assert not torch.equal(optimizer.masters()[param], param.detach().float().view(-1))
    model.load_state_dict(model.state_dict())
    assert not torch.equal(optimizer.masters()[param], param.detach().float().view(-1))
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        param.mul_(1.0)
    model.load_state_dict(model.state_dict())
    assert torch.equal(optimizer.masters()[param], param.detach().float().view(-1))


class Scale(nn.Module):
    """One parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_counters_of_a_scalar_are_saved_as_numbers(cls: type[torch.optim.Optimizer]) -> None:
    """Its moments have no dims either: names tell which are DTensors, and every rank has the counters."""

    def on_each_rank() -> dict[str, bool]:
        from torch.distributed.tensor import DTensor

        model = fully_shard(Scale())
        optimizer = cls(model.parameters(), lr=0.1)
        translate_state_dicts(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        (state,) = optimizer.state_dict()["state"].values()
        return {key: isinstance(value, DTensor) for key, value in state.items() if isinstance(value, Tensor)}

    for found in simulate(on_each_rank, 2):
        assert {key for key, is_sharded in found.items() if not is_sharded} == found.keys() & {
            "step",
            "mu_product",
            "mu",
            "eta",
        }
