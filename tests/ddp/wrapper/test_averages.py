"""Averages of weights: torch's ``AveragedModel``, and EMA by hand, beside every wrapper; and copies of fused models."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear, convert_linears

RANKS = 2
STEPS = 3
AVERAGES = {"SWA": None, "EMA": get_ema_multi_avg_fn(0.9)}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def plainly(average: Callable[[nn.Module], Any], update: Callable[[Any, nn.Module], None]) -> list[Tensor]:
    net = make_net()
    optimizer, averaged = adamw(net.parameters()), average(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(net(batch(step, rank)).square().mean() for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
        update(averaged, net)
    return [param.detach() for param in averaged.parameters()]


def with_average_model(name: str) -> list[Tensor]:
    return plainly(lambda net: AveragedModel(net, multi_avg_fn=AVERAGES[name]), AveragedModel.update_parameters)


def lerp(averaged: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, param in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 0.1)


def lerp_data(averaged: nn.Module, model: nn.Module) -> None:
    for mean, param in zip(averaged.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(param.data, 0.1)


def train_wrapped(averaged_of: Callable[[Any], Any], update: Callable[[Any, Any], None], config: Any) -> list[Tensor]:
    model = DistributedDataParallel(make_net(), config)
    sharded = config.use_distributed_optimizer
    optimizer: Any = DistributedOptimizer(model, lr=0.1) if sharded else adamw(model.parameters())
    averaged = averaged_of(model)
    for step in range(STEPS):
        model(batch(step, dist.get_rank())).square().mean().backward()
        model.finish_grad_sync()
        if not sharded:
            model.expose_grads()
        optimizer.step()
        model.zero_grad_buffer()
        update(averaged, model)
    averaged(batch(0, 0)).sum().backward()  # a plain model
    return [param.detach() for param in averaged.parameters()]


CONFIGS = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_averaged_model_follows_a_wrapped_model(config: Any, name: str) -> None:
    def train() -> list[Tensor]:
        of = lambda model: AveragedModel(model, multi_avg_fn=AVERAGES[name])  # noqa: E731
        return train_wrapped(of, AveragedModel.update_parameters, config)

    expected = with_average_model(name)
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("update", [lerp, lerp_data])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_average_by_hand_of_a_copy(config: Any, update: Callable[[Any, Any], None]) -> None:
    expected = plainly(copy.deepcopy, update)
    for found in simulate(lambda: train_wrapped(copy.deepcopy, update, config), RANKS):
        torch.testing.assert_close(found, expected)


# ---- Beside a sharded model. ----


def shard(net: Any) -> Any:
    fully_shard(net[0])
    return fully_shard(net)


def train_sharded(averaged: Any, update: Callable[[Any, Any], None], model: Any) -> None:
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update(averaged, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel])
def test_a_copy_of_a_sharded_model_is_refused_with_what_averages_do_instead(copied: Callable[[Any], Any]) -> None:
    def refuse() -> None:
        with pytest.raises(TypeError, match=r"is not copied.*another model.*sharded alike.*mean\.lerp_\(param"):
            copied(shard(make_net()))

    simulate(refuse, RANKS)


@pytest.mark.parametrize("update", [lerp, lerp_data])
def test_the_remedy_averages_shards_and_evaluates_them(update: Callable[[Any, Any], None]) -> None:
    expected = plainly(copy.deepcopy, update)
    reference = make_net()
    for mine, value in zip(reference.parameters(), expected, strict=True):
        mine.data.copy_(value)

    def train() -> list[Tensor]:
        model, averaged = shard(make_net()), shard(make_net())
        averaged.load_state_dict(model.state_dict())
        train_sharded(averaged, update, model)
        with torch.no_grad():
            torch.testing.assert_close(averaged(batch(0, 0)), reference(batch(0, 0)))
        with averaged.unsharded():
            return [param.detach().clone() for param in averaged.parameters()]

    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


def test_a_list_of_shards_is_averaged_and_swapped_in() -> None:
    """``ema = [p.detach().clone() ...]``, each rank its own elements."""
    expected = plainly(copy.deepcopy, lerp)

    def train() -> list[Tensor]:
        model = shard(make_net())
        averaged = nn.ParameterList([param.detach().clone() for param in model.parameters()])
        train_sharded(averaged, lerp, model)
        with torch.no_grad():
            for param, mean in zip(model.parameters(), averaged, strict=True):
                param.copy_(mean)
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_model_of_before_follows_within_unsharded(name: str) -> None:
    def train() -> list[Tensor]:
        net = make_net()
        averaged = AveragedModel(net, multi_avg_fn=AVERAGES[name])

        def update(averaged: AveragedModel, model: Any) -> None:
            with model.unsharded():
                averaged.update_parameters(model)

        train_sharded(averaged, update, shard(net))
        return [param.detach() for param in averaged.parameters()]

    expected = with_average_model(name)
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


# ---- Copies of fused models. ----


def fused(delayed: bool) -> nn.Sequential:
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
    return nn.Sequential(Linear(5, 8, **options), nn.Tanh(), Linear(8, 3, **options))


def converted() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    convert_linears(net)
    return net


@pytest.mark.parametrize("when", ["before wrapping", "wrapped", "the module", "unwrapped"])
@pytest.mark.parametrize(
    "make", [lambda: fused(False), lambda: fused(True), converted], ids=["fused", "late", "converted"]
)
def test_a_copy_of_a_fused_model_evaluates_and_can_be_wrapped(make: Callable[[], nn.Sequential], when: str) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))

    def train(model: Any) -> None:
        model(x).square().mean().backward()
        for layer in model.module:
            if getattr(layer, "need_backward_dw", bool)():
                layer.backward_dw()
        model.finish_grad_sync()
        model.expose_grads()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad_buffer()

    net = make()
    copied = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    train(model)
    if when == "before wrapping":
        copied.load_state_dict(net.state_dict())
    else:
        copied = copy.deepcopy({"wrapped": model, "the module": net}[when] if when != "unwrapped" else model.unwrap())
    with torch.no_grad():
        torch.testing.assert_close(copied(x), net(x))
    with pytest.raises(RuntimeError, match=r"nobody provided it; wrap the model"):
        copied(x).sum().backward()
    copied = copy.deepcopy(copied)
    second = DistributedDataParallel(copied)
    train(second)
    assert not torch.equal(copied[0].weight, net[0].weight)
