"""What a load takes of the saved parameter groups, and what stays the program's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import build, take_steps
from reachable import nbytes_of, reachable_tensors
from torch import nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate


def sharded(named: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = fully_shard(nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.named_parameters() if named else model.parameters(), **options)


@pytest.mark.parametrize("option", ["fused", "foreach", "capturable", "differentiable"])
def test_how_a_step_is_computed_is_the_programs_own(tmp_path: Path, option: str) -> None:
    """The machine that loads may have no kernels for it."""
    save_checkpoint(tmp_path / "c", *sharded(**{option: True}, lr=0.25))
    model, optimizer = sharded(**{option: False}, lr=0.5)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert (optimizer.param_groups[0][option], optimizer.param_groups[0]["lr"]) == (False, 0.25)


@pytest.mark.parametrize("here", [True, False])
def test_a_group_keeps_the_names_that_the_program_gave(tmp_path: Path, here: bool) -> None:
    save_checkpoint(tmp_path / "c", *sharded(not here, lr=0.25))
    model, optimizer = sharded(here, lr=0.5)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0].get("param_names") == (["weight", "bias"] if here else None)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_tensor_that_the_program_has_not_yet_comes_as_a_tensor(tmp_path: Path) -> None:
    """A schedule adds ``initial_lr`` when it is made, which may be after the load."""
    model, optimizer = build(optimizer={"lr": torch.tensor(0.25)})
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.1, dtype=torch.float64)
    save_checkpoint(tmp_path / "c", model, optimizer)
    model, optimizer = build(optimizer={"lr": torch.tensor(1.0)})
    load_checkpoint(tmp_path / "c", model, optimizer)
    first = optimizer.param_groups[0]["initial_lr"]
    assert isinstance(first, torch.Tensor) and first.dtype is torch.float64 and first.item() == 0.1


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_that_the_program_has_added_keeps_its_own(tmp_path: Path, place: int) -> None:
    """It has no parameters yet, and none of the saved groups is in its place."""
    save_checkpoint(tmp_path / "c", *sharded(lr=0.25))
    model: Any = fully_shard(nn.Linear(4, 4))
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()], "lr": 0.5}]
    groups.insert(place, {"params": [], "lr": 0.125})
    optimizer = torch.optim.AdamW(groups)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == ([0.125, 0.25] if place == 0 else [0.25, 0.125])


def test_groups_of_two_classes_are_known_by_their_parameters(tmp_path: Path) -> None:
    """A program has sorted its groups otherwise."""
    biases = {"params": "*.bias", "optimizer": torch.optim.SGD, "momentum": 0.9, "lr": 0.25}
    others = {"params": lambda name, param: not name.endswith(".bias"), "optimizer": torch.optim.Adam, "lr": 0.5}

    def make(*groups: Any) -> Any:
        model, optimizer = build(optimizer={"param_groups": [*groups]}, use_distributed_optimizer=True)
        take_steps(model, optimizer, range(1), 0)
        return model, optimizer

    save_checkpoint(tmp_path / "c", *make(biases, others))
    model, optimizer = make(others | {"lr": 1.0}, biases | {"lr": 1.0})
    load_checkpoint(tmp_path / "c", model, optimizer)
    rates = {
        cls.__name__: group["lr"]
        for cls, group in zip(optimizer.classes_of_groups, optimizer.param_groups, strict=True)
        if group["params"]
    }
    assert rates == {"SGD": 0.25, "Adam": 0.5}
    for named, cls in (("Adam", torch.optim.AdamW), ("SGD", torch.optim.RMSprop)):
        groups = [
            group | {"optimizer": cls} if group["optimizer"].__name__ == named else group for group in (others, biases)
        ]
        with pytest.raises(ValueError, match=f"has the state of {named}, and this optimizer is {cls.__name__}, which"):
            load_checkpoint(tmp_path / "c", *make(*groups))


def test_groups_of_one_class_beside_another_keep_their_options(tmp_path: Path) -> None:
    def make(*rates: float) -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        classes = {"*.bias": torch.optim.SGD, "0.weight": torch.optim.Adam, "1.weight": torch.optim.Adam}
        groups = [
            {"params": names, "optimizer": cls, "lr": lr}
            for (names, cls), lr in zip(classes.items(), rates, strict=True)
        ]
        wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(use_distributed_optimizer=True))
        return wrapped, DistributedOptimizer(wrapped, param_groups=groups)

    save_checkpoint(tmp_path / "c", *make(0.5, 0.25, 0.125))
    model, optimizer = make(1.0, 1.0, 1.0)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups if group["params"]] == [0.5, 0.25, 0.125]


def test_options_keep_their_kinds_and_rates_their_memory(tmp_path: Path) -> None:
    """Captured graphs and schedulers hold the tensor of a rate."""

    def made(lr: Any, betas: Any) -> Any:
        model: Any = fully_shard(nn.Linear(4, 4))
        groups = [
            {"params": [param], "lr": lr[place], "betas": betas} for place, param in enumerate(model.parameters())
        ]
        return model, torch.optim.AdamW(groups)

    save_checkpoint(tmp_path / "c", *made([0.25, 0.125], (0.5, 0.75)))
    rates = [torch.tensor(1.0), torch.tensor(1.0)]
    model, optimizer = made(rates, (0.9, 0.99))
    optimizer.param_groups[1]["betas"] = [0.9, 0.99]
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [float(rate) for rate in rates] == [0.25, 0.125]
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert list(optimizer.param_groups[0]["betas"]) == [0.5, 0.75]
    assert optimizer.param_groups[1]["betas"] == [0.5, 0.75], "a list, as the program has given it"


def test_the_first_rank_says_what_the_options_are(tmp_path: Path) -> None:
    def save() -> None:
        model, optimizer = build(use_distributed_optimizer=True)
        optimizer.param_groups[0]["lr"] = 0.5 ** (1 + dist.get_rank())
        save_checkpoint(tmp_path / "c", model, optimizer)

    simulate(save, 3)
    optimizer = Manifest.read(tmp_path / "c").optimizer
    assert optimizer is not None and optimizer.groups[0]["lr"] == 0.5


@pytest.mark.parametrize("placeholder", [torch.sum, torch.Tensor.half])
def test_state_of_another_shape_or_dtype_is_made_anew(tmp_path: Path, placeholder: Any) -> None:
    """An optimizer may hold a placeholder until its first step."""
    model, optimizer = sharded(lr=0.25)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer)
    other, its = sharded(lr=0.25)
    for param in other.parameters():
        its.state[param]["exp_avg"] = placeholder(param.detach())
    load_checkpoint(tmp_path / "c", other, its)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], its.state[theirs]["exp_avg"])


class WithMatrices(torch.optim.SGD):
    """Keeps a matrix beside the momentum of each parameter of a group that says so."""

    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"] if group["matrices"] else ():
                self.state[param]["matrix"] = torch.full((2, 2), 7.0, dtype=torch.float64)
        return super().step(closure)


def test_a_parameter_without_elements_steps_on_beside_a_group_with_state_of_other_shapes(tmp_path: Path) -> None:
    """Of that group alone it is not known what state such a parameter has."""

    def trained(steps: int, loads: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        linear = nn.Linear(4, 3)
        linear.nothing = nn.Parameter(torch.empty(0, 4))
        model: Any = fully_shard(linear, shard_atoms="whole")
        weight, *others = model.parameters()
        optimizer = WithMatrices(
            [{"params": [weight], "matrices": True}, {"params": others, "matrices": False}],
            lr=0.1,
            momentum=0.9,
            fused=True,
        )
        if loads:
            load_checkpoint(tmp_path / "c", model, optimizer)
            assert optimizer.state[weight]["matrix"].dtype is torch.float64
        for _ in range(steps):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not loads:
            save_checkpoint(tmp_path / "c", model, optimizer)
        assert optimizer.state[weight]["matrix"].sum() == 28
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    trained(1, False)
    resumed = trained(1, True)
    assert all(map(torch.equal, resumed, trained(2, False)))


def test_a_save_leaves_no_copies_of_compact_state_behind(tmp_path: Path) -> None:
    """It is saved as masters and moments in fp32, which are made for the save."""
    model, optimizer = build(torch.bfloat16, optimizer={"state": "compact"}, use_distributed_optimizer=True)
    take_steps(model, optimizer, range(1), 0)
    before = nbytes_of(reachable_tensors(model, optimizer))
    save_checkpoint(tmp_path / "c", model, optimizer)
    assert nbytes_of(reachable_tensors(model, optimizer)) == before


@pytest.mark.parametrize("saved_under", ["ddp", "fsdp"])
def test_weights_alone_bring_the_masters_that_are_parameters(tmp_path: Path, saved_under: str) -> None:
    """A sharded parameter is the fp32 master. A ``DistributedOptimizer`` has its own, which follow the weights."""

    def masters_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return torch.cat([each.detach().reshape(-1) for each in optimizer.param_groups[0]["params"]]).clone()

    def loaded() -> Iterator[torch.Tensor]:
        model, optimizer = replicated() if saved_under == "ddp" else in_bf16()
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(tmp_path / "c", model, optimizer)
        for with_optimizer in (True, False):
            sharded_model, shards = in_bf16()
            load_checkpoint(tmp_path / "c", sharded_model, shards if with_optimizer else None)
            yield masters_of(shards)
            wrapped, own = replicated()
            load_checkpoint(tmp_path / "c", wrapped, own if with_optimizer else None)
            own.param_groups[0]["lr"] = 0.0
            wrapped.finish_grad_sync()
            own.step()  # which notices that the weights have changed
            yield masters_of(own)

    shards, own, shards_alone, own_alone = simulate(lambda: list(loaded()), 1)[0]
    for masters in (shards, own):
        assert not torch.equal(masters, masters.bfloat16().float()), "masters say more than the weights"
    assert torch.equal(shards_alone, shards)
    assert torch.equal(own_alone, own.bfloat16().float())


def in_bf16() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def replicated() -> tuple[DistributedDataParallel, DistributedOptimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4).bfloat16())
    return model, DistributedOptimizer(model, lr=1e-3)
