"""A model has one optimizer: a second one is refused, and so is an optimizer that another has replaced."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same, ddp_backward, make_batches, make_model, weights, wrap
from torch.optim.lr_scheduler import LambdaLR

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedOptimizer,
    GradScaler,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.launch import simulate

DTYPES = [torch.float32, torch.bfloat16]
STOCK: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


# ---- A stock optimizer beside a DistributedOptimizer. ----


def both(dtype: torch.dtype, name: str, first: str, order: str) -> None:
    """first: the optimizer that is built first; order: the one that steps first."""
    ddp = wrap(make_model(dtype))
    if first == "stock":
        stock = STOCK[name](ddp.parameters())
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    if first != "stock":
        stock = STOCK[name](ddp.parameters())
    ddp_backward(ddp, make_batches(2, dtype))
    ddp.expose_grads()
    if order == "stock last":
        optimizer.step()
    before = weights(ddp)
    with pytest.raises(
        RuntimeError, match=rf"{name}\.step\(\): parameter '\S+' is updated by the DistributedOptimizer"
    ):
        stock.step()
    assert_same(weights(ddp), before)
    if order == "stock first":
        optimizer.step()
        assert not torch.equal(weights(ddp)["0.weight"], before["0.weight"]), "the other one goes on"


@pytest.mark.parametrize("order", ["stock first", "stock last"])
@pytest.mark.parametrize("first", ["stock", "ours"])
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled(4)
def test_a_stock_optimizer_beside_ours_is_refused(dtype: torch.dtype, name: str, first: str, order: str) -> None:
    simulate(both, 2, dtype, name, first, order)


def test_where_gradients_are_sharded_too() -> None:
    """The message must not name ``expose_grads``, which refuses sharded gradients."""
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    stock = torch.optim.SGD(ddp.parameters(), lr=0.1)
    DistributedOptimizer(ddp)
    ddp_backward(ddp, make_batches(1))
    with pytest.raises(RuntimeError, match="both would take a step with one gradient; step that one alone"):
        stock.step()


def test_an_optimizer_of_some_of_the_parameters_is_one_too_many() -> None:
    ddp = wrap(make_model())
    DistributedOptimizer(ddp)
    ddp_backward(ddp, make_batches(1))
    ddp.expose_grads()
    for name, param in ddp.module.named_parameters():
        stock = torch.optim.SGD([param], lr=0.1)
        with pytest.raises(
            RuntimeError, match=rf"parameter '{re.escape(name)}' is updated by the DistributedOptimizer"
        ):
            stock.step()


def test_other_models_and_wrappers_have_optimizers_of_their_own() -> None:
    """The message's remedy works: a wrapper without a DistributedOptimizer takes several stock optimizers."""
    ours = wrap(make_model())
    kept = DistributedOptimizer(ours)
    module = make_model(seed=1)
    ddp = wrap(module)
    DistributedOptimizer(ddp)
    del ddp
    again = DistributedDataParallel(module)
    named = dict(again.named_parameters())
    some = torch.optim.SGD([param for name, param in named.items() if "weight" in name], lr=0.1)
    others = torch.optim.SGD([param for name, param in named.items() if "weight" not in name], lr=0.1)
    before = weights(again)
    ddp_backward(again, make_batches(1))
    again.expose_grads()
    some.step()
    others.step()
    assert not any(torch.equal(value, before[name]) for name, value in weights(again).items())
    ddp_backward(ours, make_batches(1))
    kept.step()


# ---- A DistributedOptimizer that was replaced. ----


def stepped(ddp: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    ddp_backward(ddp, make_batches(2, ddp.module[0].weight.dtype))
    optimizer.step()
    ddp.zero_grad_buffer()


def scale_and_step(ddp: DistributedDataParallel, old: DistributedOptimizer, folder: Path) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(ddp(make_batches(1, torch.bfloat16)[0]).sum()).backward()
    ddp.finish_grad_sync()
    scaler.step(old)


def unscale(ddp: DistributedDataParallel, old: DistributedOptimizer, folder: Path) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(ddp(make_batches(1, torch.bfloat16)[0]).sum()).backward()
    scaler.unscale_(old)


def step(ddp: DistributedDataParallel, old: DistributedOptimizer, folder: Path) -> None:
    ddp_backward(ddp, make_batches(2, torch.bfloat16))
    old.step()


def step_before_reduction(ddp: DistributedDataParallel, old: DistributedOptimizer, folder: Path) -> None:
    old.step()


VERBS: dict[str, Callable[[DistributedDataParallel, DistributedOptimizer, Path], Any]] = {
    "step": step,
    "step before the reduction": step_before_reduction,
    "scaled step": scale_and_step,
    "unscale": unscale,
    "state_dict": lambda ddp, old, folder: old.state_dict(),
    "load_state_dict": lambda ddp, old, folder: old.load_state_dict({}),
    "save_checkpoint": lambda ddp, old, folder: save_checkpoint(folder / "other", ddp, old),
    "load_checkpoint": lambda ddp, old, folder: load_checkpoint(folder / "c", ddp, old),
    "mark_loaded": lambda ddp, old, folder: old.mark_loaded(),
}


def replaced(verb: str, config: dict[str, Any], folder: Path) -> None:
    ddp = wrap(make_model(torch.bfloat16), **config)
    old = DistributedOptimizer(ddp, lr=0.1)
    stepped(ddp, old)
    save_checkpoint(folder / "c", ddp, old)
    new = DistributedOptimizer(ddp, lr=0.1)
    stepped(ddp, new)
    before = weights(ddp)
    with pytest.raises(RuntimeError, match="this DistributedOptimizer was replaced: another one was built over its"):
        VERBS[verb](ddp, old, folder)
    assert_same(weights(ddp), before)
    ddp.zero_grad_buffer()
    stepped(ddp, new)
    assert not torch.equal(weights(ddp)["0.weight"], before["0.weight"]), "the new one goes on"


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}], ids=["all-reduced", "ZeRO-1"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_optimizer_that_was_replaced_does_nothing_more(verb: str, config: dict[str, Any], tmp_path: Path) -> None:
    """It would update, save and load memory that no parameter uses any more."""
    simulate(replaced, 2, verb, config, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.9, 1.5)},
        {"unknown": 1},
        {"param_groups": [{"params": "nothing"}]},
        {"optimizer_class": torch.optim.LBFGS},
    ],
    ids=str,
)
def test_one_that_was_never_built_replaces_nothing(options: dict[str, Any]) -> None:
    """Its constructor refuses everything before parameters move."""
    ddp = wrap(make_model(torch.bfloat16), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    with pytest.raises((ValueError, TypeError)):
        DistributedOptimizer(ddp, **options)
    before = weights(ddp)
    stepped(ddp, optimizer)
    assert not torch.equal(weights(ddp)["0.weight"], before["0.weight"])


def test_schedulers_of_the_new_one_work() -> None:
    ddp = wrap(make_model())
    DistributedOptimizer(ddp, lr=0.1)
    new = DistributedOptimizer(ddp, lr=0.1)
    schedule = LambdaLR(new, lambda step: 0.0 if step else 1.0)
    stepped(ddp, new)
    schedule.step()
    before = weights(ddp)
    stepped(ddp, new)
    assert_same(weights(ddp), before)


# ---- Parameters that have moved. ----


def test_a_state_dict_has_what_was_loaded_into_the_model() -> None:
    """Masters follow changed parameters before a save, as before a step."""
    ddp, other = wrap(make_model(torch.bfloat16)), make_model(torch.bfloat16, seed=1)
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    ddp.module.load_state_dict(other.state_dict())
    state = optimizer.state_dict()
    again = wrap(make_model(torch.bfloat16))
    DistributedOptimizer(again, lr=0.1).load_state_dict(state)
    assert_same(weights(again), weights(other))


def test_a_parameter_that_was_given_other_memory_is_not_saved_as_it_was(tmp_path: Path) -> None:
    ddp = wrap(make_model())
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    weight = ddp.module[0].weight
    weight.data = weight.data * 2
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was given other storage"):
        optimizer.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was given other storage"):
        save_checkpoint(tmp_path / "c", ddp, optimizer)
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was given other storage"):
        optimizer.state_dict()
