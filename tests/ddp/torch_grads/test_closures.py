"""Optimizers that compute gradients themselves: closures, LBFGS, and steps of two halves (SAM).

Under every wrapper the result is right, or an error says why there is none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.torch_grads.optimizer import after_closure
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

RANKS = 2


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 3)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_of_all(model: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of plain PyTorch on all ranks' batches."""
    return sum(model(batch(rank)).square().mean() for rank in range(RANKS)) / RANKS


def plain_closure(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of_all(net)
        loss.backward()
        return loss

    return closure


def averaged(loss: Tensor) -> Tensor:
    """The loss averaged over ranks: it decides how often a closure is called, alike on all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / RANKS


def ddp_closure(model: Any, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], Tensor]:
    """A plain closure; without ``optimizer`` one with the calls that nobody needs."""

    def closure() -> Tensor:
        if optimizer is None:
            model.zero_grad_buffer()
        else:
            optimizer.zero_grad()
        loss = model(batch(dist.get_rank())).square().mean()
        loss.backward()
        if optimizer is None:
            model.finish_grad_sync()
            model.expose_grads()
        return averaged(loss)

    return closure


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
    "LBFGS with a search": lambda params: torch.optim.LBFGS(params, max_iter=3, line_search_fn="strong_wolfe"),
}


def plainly_trained(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
    net = make_net()
    optimizer = make(net.parameters())
    for _ in range(3):
        optimizer.step(plain_closure(net, optimizer))
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(8)
def test_a_closure_trains_as_in_plain_pytorch(name: str, keyword: bool, called: bool) -> None:
    def train() -> list[Tensor]:
        model = DistributedDataParallel(make_net(), DistributedDataParallelConfig(overlap_grad_reduce=keyword))
        optimizer = OPTIMIZERS[name](model.parameters())
        closure = ddp_closure(model, None if called else optimizer)
        for _ in range(3):
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)  # type: ignore[arg-type]
            assert loss is not None
        return [param.detach() for param in model.parameters()]

    expected = plainly_trained(OPTIMIZERS[name])
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


def test_what_is_called_around_a_closure() -> None:
    """Other arguments of ``step`` stay as they are."""
    calls: list[str] = []

    def closure() -> int:
        calls.append("closure")
        return 7

    around = partial(after_closure, then=lambda: calls.append("then"), first=lambda: calls.append("first"))
    for args, kwargs in ((("optimizer", closure, 3), {"more": 4}), (("optimizer",), {"closure": closure, "more": 4})):
        found = around(args, kwargs)
        assert found is not None
        called = found[0][1] if len(args) > 1 else found[1]["closure"]
        assert called() == 7
        assert calls == ["first", "closure", "then"]
        calls.clear()
        assert found[0][2:] == args[2:] and found[1]["more"] == 4
    assert around(("optimizer", None), {}) is None
    assert around(("optimizer",), {}) is None


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_closure_may_leave_the_last_reduction_to_the_step(name: str) -> None:
    """All its backwards are under ``no_sync``, so that ``.grad`` shows nothing when it returns."""

    def train() -> list[Tensor]:
        model = DistributedDataParallel(make_net())
        optimizer = OPTIMIZERS[name](model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            with model.no_sync():
                loss = model(batch(dist.get_rank())).square().mean()
                loss.backward()
            assert all(param.grad is None for param in model.parameters())
            return averaged(loss)

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    expected = plainly_trained(OPTIMIZERS[name])
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


def test_a_closure_may_add_to_what_backwards_under_no_sync_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step reduces the sum, once the closure has returned."""
    heard: list[int] = []

    class Watcher(iteration_ends.IterationWatcher):
        def ended(self, *_: Any) -> None: ...

        def discarded(self, *_: Any, **__: Any) -> None: ...

        def stepped(self, *_: Any) -> None:
            heard.append(dist.get_rank())

    monkeypatch.setattr(iteration_ends, "_watchers", [Watcher()])
    net = make_net()
    for _ in range(2):
        loss_of_all(net).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()

    def train() -> list[Tensor]:
        model = DistributedDataParallel(make_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            loss = model(batch(dist.get_rank())).square().mean()
            loss.backward()
            return loss.item()

        with model.no_sync():
            closure()
        optimizer.step(closure)
        return [param.detach() for param in model.parameters()]

    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, [param.detach() for param in net.parameters()])
    assert sorted(heard) == [*range(RANKS)], "one step on each rank"


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_distributed_optimizer_calls_it_before_its_step(sharded: bool, name: str) -> None:
    def train() -> list[Tensor]:
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
        model = DistributedDataParallel(make_net(), config)
        options: dict[str, Any] = {"AdamW": {"lr": 0.05}, "SGD": {"lr": 0.1, "momentum": 0.9}}[name]
        optimizer = DistributedOptimizer(model, optimizer_class=getattr(torch.optim, name), **options)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(batch(dist.get_rank())).square().mean()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(3)]
        assert all(isinstance(loss, float) for loss in losses)
        assert len(set(losses)) == 3, "what the closure returned"
        optimizer.finish_param_sync()
        return [param.detach() for param in model.parameters()]

    expected = plainly_trained(OPTIMIZERS[name])
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_closures_over_shards_train_as_in_plain_pytorch(name: str) -> None:
    def train() -> list[Tensor]:
        net = make_net()
        fully_shard(net[0])
        model: Any = fully_shard(net)
        optimizer = OPTIMIZERS[name](model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(dist.get_rank())).square().mean()
            loss.backward()
            assert model[2].weight.grad.data.norm() == model[2].weight.grad.norm(), "global within the closure"
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert all(type(value) is Tensor for state in optimizer.state.values() for value in state.values())
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    expected = plainly_trained(OPTIMIZERS[name])
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found, expected)


def test_over_shards_a_closure_without_a_last_backward_is_refused_and_so_is_lbfgs() -> None:
    def refuse() -> None:
        model: Any = fully_shard(make_net())

        def closure() -> Tensor:
            with model.no_sync():
                loss = model(batch(dist.get_rank())).square().mean()
                loss.backward()
            return loss

        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): gradients of .* not reduced yet.*no_sync"):
            torch.optim.AdamW(model.parameters()).step(closure)
        with pytest.raises(RuntimeError, match=r"LBFGS cannot update sharded parameters.*elementwise"):
            torch.optim.LBFGS(model.parameters()).step(closure)

    simulate(refuse, RANKS)


# ---- Two halves. ----


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), as programs write it: two backwards for one step."""

    def __init__(self, params: Any, base: Callable[[Any], torch.optim.Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def climb(self) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        norm = torch.norm(torch.stack([grad.norm(p=2) for grad in grads]), p=2)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["before"] = param.detach().clone()
                param.add_(param.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param]["before"])
        self.base.step()


def sam(params: Any) -> SAM:
    return SAM(params, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))


def test_a_step_of_two_halves_is_plain_pytorchs_under_both_wrappers() -> None:
    net = make_net()
    optimizer = sam(net.parameters())
    for _ in range(3):
        for half in (optimizer.climb, optimizer.descend):
            optimizer.zero_grad()
            loss_of_all(net).backward()
            half()
    expected = [param.detach() for param in net.parameters()]

    def train_whole() -> list[Tensor]:
        model = DistributedDataParallel(make_net())
        optimizer = sam(model.parameters())
        for _ in range(3):
            for half in (optimizer.climb, optimizer.descend):
                ddp_closure(model, optimizer)()
                half()
        return [param.detach() for param in model.parameters()]

    def train_sharded() -> list[Tensor]:
        model: Any = fully_shard(make_net())
        optimizer = sam(model.parameters())
        for _ in range(3):
            for half in (optimizer.climb, optimizer.descend):
                optimizer.zero_grad()
                model(batch(dist.get_rank())).square().mean().backward()
                half()
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for train in (train_whole, train_sharded):
        for found in simulate(train, RANKS):
            torch.testing.assert_close(found, expected)


# ---- .grad of whole parameters, between backward and step. ----


def none(param: Any) -> None:
    param.grad = None


def other(param: Any) -> None:
    param.grad = torch.ones_like(param)


def through_data(param: Any) -> None:
    param.grad.data = param.grad.data * 0.5


def data_of_its_own(param: Any) -> None:
    param.grad.data = torch.full_like(param, 0.25)


@pytest.mark.parametrize("plainly", [True, False])
@pytest.mark.parametrize("change", [none, other, through_data, data_of_its_own])
@pytest.mark.sampled(8)
def test_what_is_done_to_a_gradient_is_stepped_and_gone_in_the_next_iteration(
    change: Callable[[Any], None], plainly: bool
) -> None:
    def steps(model: Any, params: list[Any], optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
        for step in range(3):
            closure()
            if step == 1:
                change(params[0])
            optimizer.step()

    net = make_net()
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    steps(net, list(net.parameters()), plain, plain_closure(net, plain))

    def train() -> list[Tensor]:
        model = DistributedDataParallel(make_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        steps(model, list(model.parameters()), optimizer, ddp_closure(model, optimizer if plainly else None))
        return [param.detach() for param in model.parameters()]

    def train_sharded() -> list[Tensor]:
        model: Any = fully_shard(make_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(dist.get_rank())).square().mean()
            loss.backward()
            return loss

        steps(model, list(model.parameters()), optimizer, closure)
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for program in (train, train_sharded):
        for found in simulate(program, RANKS):
            torch.testing.assert_close(found, [param.detach() for param in net.parameters()])
