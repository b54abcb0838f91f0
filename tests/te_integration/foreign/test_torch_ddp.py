"""Our modules under ``torch.nn.parallel.DistributedDataParallel``, which reduces ``.grad`` within backward."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from modules import ALL_FACTORIES, FEATURES
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import LayerNormLinear, Linear, WgradQueue, delayed_wgrad

MODULES = {
    "Linear": lambda **options: Linear(6, 4, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(6, 4, **options),
}


def wrapped(name: str, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(MODULES[name](fuse_wgrad_accumulation=False, **options))


def loss(model: nn.Module) -> Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(x).square().mean()


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_reduced(name: str) -> None:
    def run() -> list[Tensor]:
        model = wrapped(name)
        loss(model).backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    first, second = simulate(run, 2)
    assert len(first) > 1
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", ["module", "queue"])
def test_a_delayed_gradient_is_refused(name: str, how: str) -> None:
    """It would be added to ``.grad`` after the reduction, and differ between ranks."""

    def run() -> None:
        model = wrapped(name, delay_wgrad_compute=how == "module")
        with delayed_wgrad(WgradQueue()) if how == "queue" else nullcontext():
            with pytest.raises(RuntimeError, match=r"delayed weight gradient under torch\.nn\.parallel"):
                loss(model)

    simulate(run, 2)


# ---- What was true in an earlier forward. ----


def warmed_up(kind: str, how: str) -> None:
    """The module has run once before torch's wrapper is made, so it has chosen where its gradients go."""
    module = ALL_FACTORIES[kind](fuse_wgrad_accumulation=False, delay_wgrad_compute=how == "module")
    queue = WgradQueue()
    x = torch.randn(4, FEATURES)
    with delayed_wgrad(queue) if how == "queue" else nullcontext():
        module(x).sum().backward()
        queue.drain()
        module.backward_dw()
        module.zero_grad()
        wrapper = nn.parallel.DistributedDataParallel(module)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"delayed weight gradient under torch\.nn\.parallel"):
                wrapper(x)
        module(x)  # outside of it nobody reduces


@pytest.mark.parametrize("how", ["module", "queue"])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_a_delayed_gradient_is_refused_where_the_module_ran_before_it_was_wrapped(kind: str, how: str) -> None:
    simulate(warmed_up, 2, kind, how)


class Recomputed(nn.Module):
    """Runs its module without grad mode first, and again in backward, where no wrapper's forward is running."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=True))


def recomputed(kind: str, training: bool) -> None:
    module = ALL_FACTORIES[kind](fuse_wgrad_accumulation=False, delay_wgrad_compute=True)
    x = torch.randn(4, FEATURES, requires_grad=True)
    alone = Recomputed(module)
    alone(x).sum().backward()
    module.backward_dw()
    alone.zero_grad()
    wrapper = nn.parallel.DistributedDataParallel(alone).train(training)
    with pytest.raises(RuntimeError, match=r"delayed weight gradient under torch\.nn\.parallel"):
        wrapper(x).sum().backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_a_delayed_gradient_is_refused_in_reentrant_recompute(kind: str, training: bool) -> None:
    """Programs train in eval() as well: without dropout, or because a model was loaded so."""
    simulate(recomputed, 2, kind, training)


def ignored() -> list[float]:
    """torch's wrapper ignores the module's parameters, so it does not reduce their gradients."""
    module = Linear(2, 2, fuse_wgrad_accumulation=False, delay_wgrad_compute=True)
    model = nn.Sequential(module, nn.Linear(2, 2))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
    module.backward_dw()
    return module.weight.grad.tolist()


def test_a_module_that_is_ignored_may_delay() -> None:
    simulate(ignored, 2)


def test_an_evaluation_is_not_refused() -> None:
    def evaluate() -> None:
        model = wrapped("Linear", delay_wgrad_compute=True)
        with torch.no_grad():
            loss(model)

    simulate(evaluate, 2)


@pytest.mark.parametrize("how", ["module", "queue"])
def test_a_delayed_gradient_is_refused_where_fsdp2_came_after_the_first_forward(how: str) -> None:
    def run() -> None:
        module = MODULES["Linear"](fuse_wgrad_accumulation=False, delay_wgrad_compute=how == "module")
        queue = WgradQueue()
        with delayed_wgrad(queue) if how == "queue" else nullcontext():
            loss(module).backward()
            queue.drain()
            module.backward_dw()
            module.zero_grad()
            with pytest.raises(RuntimeError, match=r"delayed weight gradient under torch.distributed.fsdp"):
                loss(shard_by_torch(module))

    simulate(run, 2)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_a_module_that_ran_before_is_reduced_by_our_wrapper(kind: str, fuse: bool) -> None:
    """In its first forward the module had no main_grad; our wrapper gives it one afterwards."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        module = ALL_FACTORIES[kind](fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True)
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
        module(x)
        ddp = DistributedDataParallel(module)
        ddp(x).square().mean().backward()
        module.backward_dw()
        ddp.finish_grad_sync()
        return [param.main_grad.clone() for param in module.parameters()]

    first, second = simulate(run, 2)
    assert sum(bool(grad.any()) for grad in first) >= min(len(first), 2)  # one expert of three has no rows
    torch.testing.assert_close(first, second, rtol=0, atol=0)
