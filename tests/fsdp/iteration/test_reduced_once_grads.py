"""``.grad`` of shards while whole gradients are kept for an iteration's last microbatch, and what may be done to it."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sharded_twin import (
    Net,
    assert_same_grads,
    assert_same_weights,
    batches_of,
    both,
    mean_loss,
    no_sync,
    options_of,
    plain_grads,
    rank_and_size,
    ranks_of,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from maingrad.ddp.torch_grads.sharded_grad import PlaceholderGrad, ShardedGrad
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

TOO_EARLY = r"\.grad of parameter '.*' was changed in the middle of an iteration"
KINDS = ("zero3, once", "hsdp, once", "alone, once")

Batches = Sequence[Tensor]


def a_microbatch(model: Any, batch: Tensor) -> None:
    with no_sync(model):
        mean_loss(model(batch)).backward()


def the_last(model: Any, batch: Tensor) -> None:
    mean_loss(model(batch)).backward()


def two(model: nn.Module, batches: Batches) -> None:
    a_microbatch(model, batches[0])
    the_last(model, batches[1])


def on_each(kind: str, check: Callable[[Any, nn.Module, Batches, list[Batches]], None]) -> None:
    """``check(model, twin, batches, everyones)`` on the ranks of a kind; ``everyones``: batches of all ranks."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Net, lambda model: shard_blocks(model, **options_of(kind)))
        check(model, twin, batches_of(rank, 2), [batches_of(other, 2) for other in range(size)])

    ranks = ranks_of(kind)
    simulate(on_each_rank, ranks) if ranks else on_each_rank()


# ---- What it is. ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_it_is_zeros_until_the_last_microbatch(kind: str) -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        assert all(param.grad is None for param in model.parameters())
        a_microbatch(model, batches[0])
        shown = [param.grad for param in model.parameters()]
        for param, grad in zip(model.parameters(), shown, strict=True):
            assert type(grad) is PlaceholderGrad and grad.shard is param.shard
            assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
            assert torch.equal(grad.to_local(), torch.zeros(param.shape, dtype=param.dtype))
            assert grad.untyped_storage().nbytes() == grad.element_size()
            assert grad.norm() == 0 and torch.linalg.vector_norm(grad, float("inf")) == 0
        assert get_total_norm(shown) == 0
        a_microbatch(model, batches[0])
        assert all(param.grad is grad for param, grad in zip(model.parameters(), shown, strict=True))
        the_last(model, batches[1])
        assert all(type(param.grad) is ShardedGrad for param in model.parameters())
        assert_same_grads(model, plain_grads(twin, two_of_the_first, everyones))
        assert get_total_norm([param.grad for param in model.parameters()]) > 0

    def two_of_the_first(model: nn.Module, batches: Batches) -> None:
        for index in (0, 0, 1):
            the_last(model, batches[index])

    on_each(kind, check)


def test_it_is_copied_and_shown() -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        a_microbatch(model, batches[0])
        grad = model.stem.weight.grad
        copied = copy.deepcopy(grad)
        assert copied.shard is grad.shard and not copied.to_local().any()
        assert "of 'stem.weight' (7, 5)" in repr(grad)
        copied.add_(1.0)
        grad.clone().add_(1.0)
        (grad + 1).mul_(2)
        kept = torch.zeros(grad.shape, dtype=grad.dtype)
        kept.add_(grad).copy_(grad)  # who reads it may
        torch._foreach_add_([kept], [grad])
        assert not kept.any()
        assert not grad.to_local().any() and copied.to_local().eq(1).all()
        the_last(model, batches[1])
        assert_same_grads(model, plain_grads(twin, two, everyones))

    on_each("zero3, once", check)


# ---- What changes it. ----


def scaler_unscales(model: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def each(change: Callable[[Tensor], Any]) -> Callable[[Any, torch.optim.Optimizer], None]:
    def all_of_them(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            change(param.grad)

    return all_of_them


def all_at_once(change: Callable[[list[Tensor]], Any]) -> Callable[[Any, torch.optim.Optimizer], None]:
    return lambda model, optimizer: change([param.grad for param in model.parameters()])


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "zero_grad, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "the module's zero_grad, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "clip_grad_norm_": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_, foreach": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "GradScaler.unscale_": scaler_unscales,
    "zero_": each(lambda grad: grad.zero_()),
    "mul_": each(lambda grad: grad.mul_(0.5)),
    "div_": each(lambda grad: grad.div_(2)),
    "*=": each(lambda grad: grad.__imul__(0.5)),
    "copy_": each(lambda grad: grad.copy_(torch.ones(grad.shape))),
    "torch._foreach_mul_": all_at_once(lambda grads: torch._foreach_mul_(grads, 0.5)),
    "torch._foreach_zero_": all_at_once(torch._foreach_zero_),
    "torch._foreach_copy_": all_at_once(lambda grads: torch._foreach_copy_(grads, [g.clone() for g in grads])),
}


@pytest.mark.parametrize("kind", ["zero3, once", "hsdp, once"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(2)
def test_a_change_in_place_is_refused_and_does_no_harm(change: str, kind: str) -> None:
    """A clip or scale between microbatches would have no effect, and is refused. The iteration goes on."""

    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        a_microbatch(model, batches[0])
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            CHANGES[change](model, optimizer)
        assert not any(param.grad.to_local().any() for param in model.parameters())
        the_last(model, batches[1])
        assert_same_grads(model, plain_grads(twin, two, everyones))
        CHANGES[change](model, optimizer)  # now it may

    on_each(kind, check)


BEHIND: dict[str, Callable[[Any], Any]] = {
    "a view": lambda model: model.stem.weight.grad.to_local().view(-1)[:1].fill_(1.0),
    "one element": lambda model: model.stem.weight.grad.to_local()[0].fill_(1.0),
    "the only element": lambda model: model.scale.grad.to_local().__setitem__((), 1.0),
    "detached": lambda model: model.scale.grad.to_local().add_(1.0),
    "out": lambda model: torch.add(torch.ones((), dtype=torch.float64), 1.0, out=model.scale.grad),
    "replaced": lambda model: setattr(model.stem.weight, "grad", model.stem.weight.grad.clone()),
    "cleared alone": lambda model: setattr(model.stem.weight, "grad", None),
}


@pytest.mark.parametrize("kind", ["alone, once"])
@pytest.mark.parametrize("change", BEHIND)
def test_what_cannot_be_refused_is_noticed_by_the_last_microbatch(change: str, kind: str) -> None:
    """The last microbatch raises. The next iteration is right."""

    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        a_microbatch(model, batches[0])
        with torch.no_grad():
            BEHIND[change](model)
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            the_last(model, batches[1])
        model.zero_grad()
        two(model, batches)
        assert_same_grads(model, plain_grads(twin, two, everyones))

    on_each(kind, check)


@pytest.mark.parametrize("change", BEHIND)
@pytest.mark.sampled(4)
def test_finish_grad_sync_notices_it_as_well(change: str) -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        a_microbatch(model, batches[0])
        with torch.no_grad():
            BEHIND[change](model)
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            model.finish_grad_sync()
        model.zero_grad()
        two(model, batches)
        assert_same_grads(model, plain_grads(twin, two, everyones))

    on_each("alone, once", check)


# ---- Clearing it. ----


@pytest.mark.parametrize("next_one", ["two microbatches", "the last one"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_clearing_all_gives_the_iteration_up(kind: str, next_one: str) -> None:
    run = two if next_one == "two microbatches" else (lambda model, batches: the_last(model, batches[1]))

    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for clear in (optimizer.zero_grad, model.zero_grad):
            for _ in range(2):
                a_microbatch(model, batches[0] * 100)
            clear()
            run(model, batches)
            assert_same_grads(model, plain_grads(twin, run, everyones))
            optimizer.zero_grad()

    on_each(kind, check)


def test_clearing_all_and_finishing_leaves_zeros() -> None:
    """A rank that has not set ``.grad`` to None gets its gradients, because all ranks reduce."""

    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        a_microbatch(model, batches[0])
        model.zero_grad()
        model.finish_grad_sync()
        assert not any(param.grad.to_local().any() for param in model.parameters())
        assert root_of(model).grads.meter.held_nbytes == 0
        two(model, batches)
        assert_same_grads(model, plain_grads(twin, two, everyones))

    on_each("zero3, once", check)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_a_step_in_the_middle_is_refused(kind: str) -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        mine, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin))
        for _ in range(2):
            for batch in batches:
                a_microbatch(model, batch)
                with pytest.raises(
                    RuntimeError,
                    match=r"SGD\.step\(\): gradients of '.*' are not reduced yet: run the last microbatch's backward "
                    r"outside no_sync\(\), or call model\.finish_grad_sync\(\)",
                ):
                    mine.step()
            model.finish_grad_sync()
            assert_same_grads(model, plain_grads(twin, two, everyones))
            mine.step()
            plain.step()
            assert_same_weights(model, twin)
            mine.zero_grad()

    on_each(kind, check)


# ---- What was there before. ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_a_gradient_that_nobody_cleared_is_added_to(kind: str) -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        two(model, batches)
        first = [param.grad for param in model.parameters()]
        values = [grad.to_local().clone() for grad in first]
        a_microbatch(model, batches[1])
        for param, grad, value in zip(model.parameters(), first, values, strict=True):
            assert param.grad is grad and torch.equal(grad.to_local(), value), "until the last one"
        the_last(model, batches[0])
        expected = {
            name: None if grad is None else 2 * grad for name, grad in plain_grads(twin, two, everyones).items()
        }
        assert_same_grads(model, expected)

    on_each(kind, check)


def test_a_gradient_that_nobody_cleared_is_not_changed_in_the_middle() -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        two(model, batches)
        a_microbatch(model, batches[1])
        model.head.weight.grad.mul_(0.5)  # nobody can refuse it
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            the_last(model, batches[0])

    on_each("zero3, once", check)


def test_a_gradient_of_the_users_is_added_to() -> None:
    def check(model: Any, twin: nn.Module, batches: Batches, everyones: list[Batches]) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.grad = torch.full_like(param, 3.0)
        two(model, batches)
        expected = {
            name: None if grad is None else grad + 3 for name, grad in plain_grads(twin, two, everyones).items()
        }
        assert_same_grads(model, expected)

    on_each("zero3, once", check)


# ---- Units that some microbatches leave out. ----


class Picks(Net):
    """Runs the blocks that its arguments name."""

    blocks_used: Sequence[int] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.blocks_used:
            x = self.blocks[index](x)
        return self.head(x * self.scale)


USED: dict[str, tuple[tuple[int, ...], ...]] = {
    "not in the last": ((0, 1, 2), (0, 1, 2), (0, 2)),
    "not in the first": ((0, 2), (0, 1, 2), (0, 1, 2)),
    "in the first alone": ((0, 1, 2), (0, 2), (2,)),
    "in the last alone": ((2,), (2,), (2, 1, 0)),
    "in the middle alone": ((0,), (0, 1, 1, 2), (0,)),
    "in none": ((0, 2), (2, 0), (0, 2)),
    "another in each": ((0,), (1,), (2,)),
}


@pytest.mark.parametrize("finish", [False, True], ids=["", "finished by hand"])
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("kind", ["zero3, once", "zero2, once", "hsdp_zero1, once"])
@pytest.mark.sampled(1)
def test_units_that_some_microbatches_leave_out(kind: str, used: str, finish: bool) -> None:
    def run(model: Any, batches: Batches) -> None:
        for index, (batch, blocks) in enumerate(zip(batches, USED[used], strict=True)):
            model.blocks_used = blocks
            with nullcontext() if index == len(batches) - 1 and not finish else no_sync(model):
                the_last(model, batch)
        if finish and hasattr(model, "finish_grad_sync"):
            model.finish_grad_sync()

    train_beside(kind, Picks, run=run, microbatches=3)
