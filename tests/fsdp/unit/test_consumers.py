"""Modules that write weight gradients themselves, ours and others', as units: a plain model's gradients."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from foreign import DELAYED_FORMS, ForeignDelayedLinear, ForeignLinear
from modules import ALL_FACTORIES, FEATURES, make
from sharded_twin import mean_loss, no_sync, one_backward, train_beside
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.tensors.parameter import ShardedParameter
from maingrad.te_integration import WgradQueue, delayed_wgrad

TOLERANCE = 2e-6
"""fp32 throughout: these modules' products add in another order than their plain twins'."""


def shard_children(model: nn.Module, **options: Any) -> None:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    fully_shard(model, **options)


def first_then_plain(ours: Callable[[], nn.Module], plain: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A factory that makes the model, its plain twin, the next model, and so on."""
    makers = itertools.cycle([ours, plain])
    return lambda: next(makers)()


def stack(kind: str, **options: Any) -> nn.Module:
    inner = [make(kind, seed=seed, **options) for seed in (1, 2)]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, FEATURES), inner[0], nn.Tanh(), inner[1], nn.Linear(FEATURES, 3))


def drained(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if hasattr(module, "backward_dw"):
            module.backward_dw()


def delayed_run(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Weight gradients are computed one microbatch later, and the last ones before the step."""
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        if last:
            (mean_loss(model(batch)) / len(batches)).backward()
        else:
            with no_sync(model):
                (mean_loss(model(batch)) / len(batches)).backward()
        if index:
            drained(model)
    drained(model)
    if isinstance(model, FSDPModule):
        model.finish_grad_sync()


def queue_run(model: nn.Module, batches: Sequence[Tensor]) -> None:
    queue = WgradQueue()
    for index, batch in enumerate(batches):
        with delayed_wgrad(queue):
            loss = mean_loss(model(batch)) / len(batches)
        if index == len(batches) - 1:
            loss.backward()
        else:
            with no_sync(model):
                loss.backward()
    queue.drain()
    if isinstance(model, FSDPModule):
        model.finish_grad_sync()


@pytest.mark.parametrize("how", ["now", "modules", "queue"])
@pytest.mark.parametrize("name", ALL_FACTORIES)
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "zero2"])
@pytest.mark.sampled(2)
def test_our_modules(kind: str, name: str, how: str) -> None:
    train_beside(
        kind,
        first_then_plain(lambda: stack(name, delay=how == "modules"), lambda: stack(name, fuse=False)),
        shard_children,
        {"now": one_backward, "modules": delayed_run, "queue": queue_run}[how],
        tolerance=TOLERANCE,
        dtype=None,
    )


def test_a_step_before_delayed_gradients_are_computed_is_refused() -> None:
    model = stack("Linear", delay=True)
    shard_children(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model(torch.ones(2, 5))).backward()
    with pytest.raises(
        RuntimeError, match=r"SGD.step\(\): gradients of '.*' wait for delayed weight gradients: run the"
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) while delayed weight gradients of 2 parameter"):
        model.finish_grad_sync()
    drained(model)
    optimizer.step()


@pytest.mark.parametrize("ready", [0, 1])
def test_a_step_waits_for_each_delayed_gradient_of_a_bucket(ready: int) -> None:
    model = fully_shard(stack("Linear", delay=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model(torch.ones(2, 5))).backward()
    delaying = [module for module in model.modules() if hasattr(module, "backward_dw")]
    assert len(delaying) == 2
    delaying[ready].backward_dw()
    with pytest.raises(RuntimeError, match=r"wait for delayed weight gradients"):
        optimizer.step()


# ---- Modules that are not ours. ----


def foreign_stack(make_linear: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), make_linear(6, 8), nn.LayerNorm(8), nn.Tanh(), make_linear(8, 8), nn.Linear(8, 3)
    )


def plain_stack() -> nn.Module:
    return foreign_stack(lambda features, out: nn.Linear(features, out, bias=False))


@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "zero2", "alone"])
@pytest.mark.sampled(2)
def test_foreign_modules_that_accumulate_themselves(kind: str) -> None:
    make_model = first_then_plain(
        lambda: foreign_stack(lambda features, out: ForeignLinear(features, out, bias=False)), plain_stack
    )
    train_beside(kind, make_model, shard_children, microbatches=3)


@pytest.mark.parametrize("form", DELAYED_FORMS)
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "alone"])
@pytest.mark.sampled(2)
def test_foreign_modules_that_delay(kind: str, form: str) -> None:
    options = DELAYED_FORMS[form]

    def plain(features: int, out: int) -> nn.Module:
        return nn.Linear(features, out, bias="bias_when" in options)

    make_model = first_then_plain(
        lambda: foreign_stack(lambda features, out: ForeignDelayedLinear(features, out, **options)),
        lambda: foreign_stack(plain),
    )
    train_beside(kind, make_model, shard_children, delayed_run, microbatches=3)


def test_shards_are_back_after_a_foreign_delayed_gradient_that_fails() -> None:
    model = fully_shard(ForeignDelayedLinear(5, 5, fused=True))
    mean_loss(model(torch.ones(2, 5))).backward()
    (entry,) = model.waiting
    model.waiting[:] = [(entry[0][:, :3], *entry[1:])]
    with pytest.raises(RuntimeError, match=r"size of tensor|shape"):
        model.backward_dw()
    assert isinstance(model.weight, ShardedParameter)
    model.waiting.append(entry)
    model.backward_dw()
    model.finish_grad_sync()
    assert model.weight.grad.to_local().any()


class HeldTwice(nn.Module):
    """Another module registers the layer's weight as well, before the layer that uses it."""

    def __init__(self, make_linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.wide, self.layer = nn.Linear(5, 6), make_linear(6, 6)
        self.holder.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.wide(x).tanh())


def test_a_foreign_module_that_delays_may_register_its_weight_as_the_second() -> None:
    make_model = first_then_plain(
        lambda: HeldTwice(lambda features, out: ForeignDelayedLinear(features, out, fused=False)),
        lambda: HeldTwice(lambda features, out: nn.Linear(features, out, bias=False)),
    )
    train_beside("zero3", make_model, lambda model, **options: fully_shard(model, **options), delayed_run)


class TiedToForeign(nn.Module):
    """One weight of a plain module and of a foreign module that accumulates ``main_grad`` itself."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 6)
        self.foreign = cls(6, 6, bias=False)
        self.plain = nn.Linear(6, 6, bias=False)
        self.plain.weight = self.foreign.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.foreign(self.plain(self.wide(x)).tanh())


@pytest.mark.parametrize("kind", ["zero3", "zero1"])
def test_a_weight_tied_between_foreign_and_plain_modules(kind: str) -> None:
    make_model = first_then_plain(lambda: TiedToForeign(ForeignLinear), lambda: TiedToForeign(nn.Linear))
    train_beside(kind, make_model, lambda model, **options: fully_shard(model, **options), microbatches=3)


def test_a_computed_weight_of_our_module() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    def build(fuse: bool) -> nn.Module:
        model = stack("Linear", fuse=fuse)
        parametrize.register_parametrization(model[1], "weight", Doubled())
        return model

    make_model = first_then_plain(lambda: build(True), lambda: build(False))
    train_beside("zero3", make_model, shard_children, tolerance=TOLERANCE, dtype=None)
