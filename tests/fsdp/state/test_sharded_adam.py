"""Optimizer state where groups, options or masters change between steps, and the counters of a scalar's state."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import MixedPrecisionPolicy, ShardedAdam, ShardedAdamW, fully_shard, translate_state_dicts
from maingrad.kernels.optimizer.reference import split_master
from maingrad.launch import simulate

HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def make(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)))


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def groups_later(place: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, width, dtype=torch.bfloat16) for width in (8, 24)))
    for module in (*model, model):
        fully_shard(module)
    params = list(model.parameters())
    optimizer = ShardedAdamW(params[:2], **HYPER, offload_state=place)
    for seed in range(2):
        step(optimizer, seed)
    optimizer.add_param_group({"params": params[2:]})  # of a larger bucket
    for seed in range(2, 5):
        step(optimizer, seed)
    return list(optimizer.masters().values())


def test_a_group_that_comes_after_steps_with_state_on_the_host() -> None:
    """Its members have other places in the memory on the device, and so have those of before."""
    assert all(map(torch.equal, groups_later("host"), groups_later(None)))


@pytest.mark.parametrize("cls", [ShardedAdam, ShardedAdamW])
def test_a_step_calls_its_closure(cls: Any) -> None:
    """With gradients enabled, and before the update; a step without gradients changes nothing."""
    model, other = make(), make()
    optimizer, beside = (cls(each.parameters(), **HYPER) for each in (model, other))
    x = torch.ones(2, 8, dtype=torch.bfloat16)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    assert beside.step() is None
    for _ in range(2):
        loss = other(x).square().mean()
        loss.backward()
        assert optimizer.step(closure) == float(loss.detach())
        beside.step()
        beside.zero_grad()
    assert all(map(torch.equal, optimizer.masters().values(), beside.masters().values()))


@pytest.mark.parametrize("cls", [ShardedAdam, ShardedAdamW])
def test_a_learning_rate_of_zero_is_no_default(cls: Any) -> None:
    """As a warm-up begins with."""
    model = make()
    optimizer = cls(model.parameters(), lr=0.0)
    before = optimizer.masters()
    step(optimizer, 0)
    assert all(torch.equal(before[param], master) for param, master in optimizer.masters().items())
    stock = cls.optimizer_class([nn.Parameter(torch.zeros(1))])
    assert cls(make().parameters()).param_groups[0]["lr"] == stock.param_groups[0]["lr"]


def test_the_options_of_torchs_class_count() -> None:
    """Parameters with names, a rate that is a tensor, and no option with its default."""
    options: dict[str, Any] = {"lr": torch.tensor(0.1), "betas": (0.5, 0.6), "eps": 0.3, "weight_decay": 0.2}
    model, other = make(torch.float32), make(torch.float32)
    optimizer = ShardedAdamW(model.named_parameters(), **options, moment_dtype=torch.float32)
    stock = torch.optim.AdamW(other.named_parameters(), **options, fused=True)
    for seed in range(3):
        step(optimizer, seed)
        step(stock, seed)
        with torch.no_grad():  # fp32 shards are their own masters, also when a program has written them
            torch._foreach_mul_([*model.parameters(), *other.parameters()], 0.5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


def test_groups_that_all_maximize_by_now_go_up() -> None:
    model = make(torch.float32)
    optimizer = ShardedAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["maximize"] = True
    before = model[0].weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    optimizer.step()
    assert (model[0].weight.detach() > before).all()


def test_a_parameter_that_moves_to_another_group_has_that_ones_options() -> None:
    model = make(torch.float32)
    first, *rest = model.parameters()
    optimizer = ShardedAdamW([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.0}], weight_decay=0.0)
    step(optimizer, 0)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())  # in the same order
    before = first.detach().clone()
    step(optimizer, 1)
    assert torch.equal(first.detach(), before)


def test_a_write_between_two_loads_that_change_nothing_is_a_master() -> None:
    """Loads of the values that a parameter has keep its 16 bits of remainder, and a write forgets them."""
    model = make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    for seed in range(3):
        step(optimizer, seed)
    param = model[0].weight
    assert not torch.equal(optimizer.masters()[param], param.detach().float().view(-1))
    for _ in range(2):
        model.load_state_dict(model.state_dict())
    assert not torch.equal(optimizer.masters()[param], param.detach().float().view(-1))
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        param.mul_(1.0)
    model.load_state_dict(model.state_dict())
    assert torch.equal(optimizer.masters()[param], param.detach().float().view(-1))


def test_a_master_that_a_program_assigns_is_taken() -> None:
    """Beside the state that is there: the parameter and its remainder follow."""
    model = make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    step(optimizer, 0)
    param = model[0].weight
    master = torch.linspace(-1, 1, param.numel())
    optimizer.state[param]["master"] = master.view(param.shape)
    assert torch.equal(optimizer.masters()[param], master)
    assert "master" not in optimizer.state[param]
    assert torch.equal(param.detach().view(-1), split_master(master)[0])


@pytest.mark.parametrize("place", [None, "host"])
def test_state_that_a_program_removes_begins_anew(place: str | None) -> None:
    """Of one parameter here: its next update is a first one, and the others go on. So is its master the parameter."""
    model, other = make(), make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER, offload_state=place)
    step(optimizer, 0)
    del optimizer.state[model[0].weight]
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.copy_(mine)
    assert torch.equal(optimizer.masters()[model[0].weight], model[0].weight.detach().float().view(-1))
    step(optimizer, 1)
    fresh = ShardedAdamW(other.parameters(), **HYPER)
    step(fresh, 1)
    begun, expected = (each.full_state() for each in (optimizer, fresh))
    for key, value in expected[other[0].weight].items():
        assert torch.equal(begun[model[0].weight][key], value), key
    assert begun[model[1].weight]["step"] == 2


def test_a_write_before_a_replay_is_a_master() -> None:
    """A graphed step replays the kernel alone: what ``step`` looks up comes before."""
    model = make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    step(optimizer, 0)
    remainder = optimizer.state[model[1].weight]["remainder"]
    assert remainder.any()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    assert optimizer.written_since() == [model[1].weight]
    optimizer.prepare_replay()
    assert not remainder.any() and optimizer.state[model[0].weight]["remainder"].any()


def test_a_load_lets_go_of_what_it_was_given() -> None:
    """A state dict is as large as the state."""
    model = make()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    step(optimizer, 0)
    given = optimizer.state_dict()
    refs = [weakref.ref(value) for state in given["state"].values() for value in state.values()]
    optimizer.load_state_dict(given)
    del given
    gc.collect()
    assert len(refs) == 16 and not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("cls", [ShardedAdam, ShardedAdamW])
def test_a_checkpoint_of_bf16_and_fp32_shards_has_masters_and_moments(cls: Any, tmp_path: Path) -> None:
    """Masters of bf16 shards are taken behind the moments of all parameters, which stay."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8)))
        optimizer = cls(model.parameters(), **HYPER)
        step(optimizer, seed)
        made.append((model, optimizer))
    (model, optimizer), (other, loaded) = made
    save_checkpoint(tmp_path / "c", model, optimizer)
    load_checkpoint(tmp_path / "c", other, loaded)
    found, expected = loaded.full_state(), optimizer.full_state()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert expected[mine].keys() == found[theirs].keys()
        assert all(torch.equal(found[theirs][key], value) for key, value in expected[mine].items())
        assert torch.equal(mine.detach(), theirs.detach())
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    fully_shard(plain[0], mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(plain)
    stock = cls.optimizer_class(plain.parameters())
    load_checkpoint(tmp_path / "c", plain, stock)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(expected[mine].get("master", mine.detach()), theirs.detach())
        assert torch.equal(expected[mine]["exp_avg"], stock.state[theirs]["exp_avg"])


def test_fp64_shards_are_saved_as_they_are(tmp_path: Path) -> None:
    """Also if the model computes in bf16, in which a file has the weights of fp32 shards beside their masters."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model: Any = nn.Linear(8, 8, dtype=torch.float64)
        made.append(fully_shard(model, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    save_checkpoint(tmp_path / "c", made[0])
    load_checkpoint(tmp_path / "c", made[1])
    assert made[0].weight.dtype is torch.float64
    for mine, theirs in zip(*(model.parameters() for model in made), strict=True):
        assert torch.equal(mine.detach(), theirs.detach())


def test_gradients_may_have_another_dtype_in_each_step() -> None:
    """A program puts them into ``.grad``, which takes any."""
    model, other = make(), make()
    optimizer, expected = (ShardedAdamW(each.parameters(), **HYPER) for each in (model, other))
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.grad = torch.randn(mine.shape, generator=generator).bfloat16().float()
            mine.grad = theirs.grad.detach().to(dtype)
        optimizer.step()
        expected.step()
    assert all(map(torch.equal, optimizer.masters().values(), expected.masters().values()))


def test_flattened_state_is_refused_where_fp32_shards_come_first() -> None:
    """They have no remainder, by whose name such a state dict is known."""
    model: Any = fully_shard(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, dtype=torch.bfloat16)))
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    step(optimizer, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    given = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict=True: leave that option out"):
        set_optimizer_state_dict(model, optimizer, given, options=options)


def test_state_of_a_model_that_is_frozen_meanwhile_is_saved(tmp_path: Path) -> None:
    """As a discriminator is, while another model trains."""
    model, other = make(torch.float32), make(torch.float32)
    optimizer, loaded = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    step(optimizer, 0)
    model.requires_grad_(False)
    save_checkpoint(tmp_path / "c", model, optimizer)
    load_checkpoint(tmp_path / "c", other, loaded)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], loaded.state[theirs]["exp_avg"])
        assert loaded.state[theirs]["exp_avg"].any()


def test_compact_state_of_frozen_parameters_is_saved_and_none_is_made(tmp_path: Path) -> None:
    """One is frozen after a step, and has a master; the other was never trained, and is its own."""
    model, other = make(), make()
    optimizers = []
    for seed, each in enumerate((model, other)):
        each[1].weight.requires_grad_(False)
        optimizers.append(ShardedAdamW(each.parameters(), **HYPER))
        for param in (each[0].weight, each[0].bias, each[1].bias):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        optimizers[-1].step()
        each[0].weight.requires_grad_(False)
    save_checkpoint(tmp_path / "c", model, optimizers[0])
    load_checkpoint(tmp_path / "c", other, optimizers[1])
    expected, found = (each.masters() for each in optimizers)
    assert torch.equal(found[other[0].weight], expected[model[0].weight])
    assert not torch.equal(expected[model[0].weight], model[0].weight.detach().float().view(-1))
    assert other[1].weight not in optimizers[1].full_state()
    fresh = make()
    fresh[1].weight.requires_grad_(False)
    begun = ShardedAdamW(fresh.parameters(), **HYPER)
    load_checkpoint(tmp_path / "c", fresh, begun)
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(begun.masters()[theirs], expected[mine])


def rounded_on_ranks(moment_dtype: torch.dtype | None) -> list[Tensor]:
    """Whole masters and moments after steps with gradients that are alike whole, however they are cut."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(40, 24, dtype=torch.bfloat16))
    assert 0 < model.weight.shard.numel < 960 or not dist.is_initialized(), "each rank has a part"
    optimizer = ShardedAdamW(model.parameters(), **HYPER, moment_dtype=moment_dtype)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for param in model.parameters():
            whole = torch.randn(param.shard.shape, generator=generator).view(-1)
            param.grad = whole[param.shard.start : param.shard.end].view(param.shape)
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    return [getattr(state[key], "full_tensor", state[key].clone)() for state in states for key in sorted(state)]


@pytest.mark.parametrize("moment_dtype", [None, torch.float32])
def test_bits_do_not_depend_on_the_number_of_ranks(moment_dtype: torch.dtype | None) -> None:
    """The random bits that round an element follow from its place in the whole parameter."""
    wanted = rounded_on_ranks(moment_dtype)
    for size in (2, 3):
        for found in simulate(rounded_on_ranks, size, moment_dtype):
            assert all(map(torch.equal, found, wanted))


def test_a_state_dict_does_not_follow_training() -> None:
    for options in ({}, {"moment_dtype": torch.float32}, {"state": "full", "offload_state": "host"}):
        model = make(torch.float32 if "state" in options else torch.bfloat16)
        optimizer = ShardedAdamW(model.parameters(), **HYPER, **options)
        step(optimizer, 0)
        for saved in (optimizer.state_dict()["state"], optimizer.full_state()):
            before = {key: copy.deepcopy(state) for key, state in saved.items()}
            step(optimizer, 1)
            for index, state in before.items():
                assert state.keys() == saved[index].keys() >= {"step", "exp_avg", "exp_avg_sq"}
                for key, value in state.items():
                    assert torch.equal(saved[index][key], value), key


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
