"""Hooks on sharded parameters: those that come when a gradient is complete are called, others are refused by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

RANKS = 2
WIDE = 300  # where ranks cut parameters


def make_model(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def steps_in_backward(params: Any) -> dict[Any, torch.optim.Optimizer]:
    """An optimizer for each parameter, which steps as soon as there is a gradient, and clears it."""
    optimizers = {param: torch.optim.AdamW([param], lr=0.1) for param in params}

    def step(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    return optimizers


def whole(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("placements", ["zero3", "zero2", "zero1"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.sampled(3)
def test_an_optimizer_in_backward_trains_as_in_plain_pytorch(placements: str, microbatches: int) -> None:
    def train() -> dict[str, Tensor]:
        model = make_model()
        fully_shard(model[2], placements=placements)
        sharded: Any = fully_shard(model, placements=placements)
        steps_in_backward(model.parameters())
        for step in range(3):
            for index in range(microbatches):
                loss = sharded(batch(2 * step + index, dist.get_rank())).square().mean() / microbatches
                if index < microbatches - 1:
                    with sharded.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            assert all(param.grad is None for param in model.parameters()), "each hook has cleared its own"
        return whole(sharded)

    plain = make_model()
    steps_in_backward(plain.parameters())
    for step in range(3):
        losses = [
            plain(batch(2 * step + index, rank)).square().mean() for index in range(microbatches) for rank in (0, 1)
        ]
        (sum(losses) / len(losses)).backward()
    for found in simulate(train, RANKS):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach())


def test_a_hook_is_called_once_an_iteration_until_it_is_removed() -> None:
    def count() -> list[int]:
        model: Any = fully_shard(make_model())
        called: list[Any] = []
        handle = model[0].weight.register_post_accumulate_grad_hook(called.append)
        counts = []
        for step in range(3):
            if step == 2:
                handle.remove()
            with model.no_sync():
                model(batch(step, dist.get_rank())).sum().backward()
            counts.append(len(called))
            model(batch(step, dist.get_rank())).sum().backward()
            counts.append(len(called))
            model.zero_grad()
        assert all(each is model[0].weight for each in called)
        return counts

    assert simulate(count, RANKS) == [[0, 1, 1, 2, 2, 2]] * RANKS


def test_hooks_that_no_backward_would_call_are_refused() -> None:
    def refuse() -> None:
        model = fully_shard(make_model())
        with pytest.raises(RuntimeError, match=r"'0\.weight'.*use register_post_accumulate_grad_hook"):
            model[0].weight.register_hook(lambda grad: grad)

    simulate(refuse, RANKS)


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by the norms of the whole parameter and of its step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    grad = param.grad.detach()
                    param.sub_(grad * (param.detach().norm() / (grad.norm() + 1e-6)), alpha=group["lr"])


def test_sums_over_a_parameter_are_refused_on_all_ranks_alike_and_right_over_whole_ones() -> None:
    """All ranks raise, whether their own shards are cut or not, because the plan decides."""

    class Declared(Lamb):
        per_parameter = True

    def train() -> dict[str, Tensor]:
        model: Any = fully_shard(make_model(WIDE))
        model(batch(0, dist.get_rank())).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"Lamb is not known to be elementwise.*Lamb\.per_parameter = True"):
            Lamb(model.parameters()).step()
        with pytest.raises(RuntimeError, match=r"Declared updates whole parameters.*shard_atoms=\"whole\""):
            Declared(model.parameters()).step()
        kept: Any = fully_shard(make_model(WIDE), shard_atoms="whole")
        kept(batch(0, dist.get_rank())).square().mean().backward()
        Declared(kept.parameters()).step()
        return whole(kept)

    plain = make_model(WIDE)
    (sum(plain(batch(0, rank)).square().mean() for rank in range(RANKS)) / RANKS).backward()
    Lamb(plain.parameters()).step()
    for found in simulate(train, RANKS):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach())


def test_a_hook_may_remove_itself_and_add_another() -> None:
    """Those that are there when the gradient is complete are called, and those of the next iteration in the next."""

    def train() -> list[str]:
        model: Any = fully_shard(make_model())
        param, called = model[0].weight, []

        def once(_: Any) -> None:
            called.append("once")
            handle.remove()
            param.register_post_accumulate_grad_hook(lambda _: called.append("added"))

        handle = param.register_post_accumulate_grad_hook(once)
        param.register_post_accumulate_grad_hook(lambda _: called.append("other"))
        for step in range(2):
            model(batch(step, dist.get_rank())).sum().backward()
            model.zero_grad()
        return called

    assert simulate(train, RANKS) == [["once", "other", "other", "added"]] * RANKS


@pytest.mark.parametrize("placements", ["zero3", "zero1"])
def test_a_hook_is_called_where_no_backward_has_come(placements: str) -> None:
    """``.grad`` is complete there too, and zeros."""

    def train() -> list[str]:
        model: Any = make_model()
        for module in (model[0], model[2], model):
            fully_shard(module, placements=placements)
        called: list[str] = []

        def note(param: Any) -> None:
            called.append(param.shard.name)
            assert bool(param.grad.full_tensor().any()) is param.shard.name.startswith("0")
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(note)
        for step in range(2):
            model(batch(step, dist.get_rank()))
            model[0](batch(step, dist.get_rank())).sum().backward()
            model.finish_grad_sync()
        return sorted(called)

    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert simulate(train, RANKS) == [sorted(names * 2)] * RANKS
