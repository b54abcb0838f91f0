"""The user's optimizers, averages and schedules over shards do what they do over whole parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sharded_twin import (
    KINDS,
    Net,
    assert_same_grads,
    assert_same_weights,
    batches_of,
    both,
    mean_loss,
    one_backward,
    options_of,
    plain_grads,
    rank_and_size,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

Optimizer = torch.optim.Optimizer


def groups_by_name(model: nn.Module) -> list[dict[str, Any]]:
    """No weight decay for norms, biases and scalars, by number of dims; another rate for the head, by name."""
    named = dict(model.named_parameters())
    head = [param for name, param in named.items() if name.startswith("head")]
    rest = [param for name, param in named.items() if not name.startswith("head")]
    return [
        {"params": [param for param in rest if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in rest if param.dim() < 2], "weight_decay": 0.0},
        {"params": head, "lr": 3e-3},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamW, one by one": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "AdamW, groups": lambda model: torch.optim.AdamW(groups_by_name(model), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD, Nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "SGD, fused": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["zero3", "hsdp_zero1", "zero1"])
@pytest.mark.sampled(1)
def test_optimizers_of_torch(kind: str, name: str) -> None:
    """Adam divides by the root of squares, so that gradients that cancel lose more bits."""
    train_beside(kind, optimizer=OPTIMIZERS[name], steps=3, tolerance=1e-7)


def loop(kind: str, body: Callable[[Any, Any, Callable[[int], None]], None], make: Any = Net, **options: Any) -> None:
    """``body(model, twin, iterate)`` on each rank; ``iterate(step)`` leaves equal gradients in both."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(make, lambda model: shard_blocks(model, **options_of(kind), **options))

        def iterate(step: int) -> None:
            one_backward(model, batches_of(rank, 2, step=step))
            carried = {name: param.grad for name, param in twin.named_parameters()}
            everyones = [batches_of(other, 2, step=step) for other in range(size)]
            plain_grads(twin, one_backward, everyones)
            for name, param in twin.named_parameters():
                if carried[name] is not None:
                    param.grad += carried[name]
            assert_same_grads(model, {name: param.grad for name, param in twin.named_parameters()})

        body(model, twin, iterate)

    simulate(on_each_rank, KINDS[kind])


some_kinds = pytest.mark.parametrize("kind", ["zero3", "zero1", pytest.param("hsdp_zero1", marks=pytest.mark.slow)])


@pytest.mark.in_turn
@some_kinds
@pytest.mark.sampled(1)
def test_two_optimizers_of_which_one_is_zeroed(kind: str) -> None:
    """The gradients of the other optimizer go on accumulating."""

    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        pairs = []
        for each in (model, twin):
            first = [param for name, param in each.named_parameters() if "weight" in name]
            second = [param for name, param in each.named_parameters() if "weight" not in name]
            pairs.append((torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)))
        for step in range(4):
            iterate(step)
            for first, second in pairs:
                first.step()
                first.zero_grad()
                if step % 2:
                    second.step()
                    second.zero_grad()
            assert_same_weights(model, twin)

    loop(kind, body)


@some_kinds
@pytest.mark.sampled(1)
def test_zero_grad_that_keeps_the_tensors(kind: str) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
        before = None
        for step in range(3):
            iterate(step)
            assert before is None or before is model.head.weight.grad
            before = model.head.weight.grad
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            assert not before.to_local().any()
            assert_same_weights(model, twin)

    loop(kind, body)


@some_kinds
@pytest.mark.sampled(1)
def test_gradients_that_are_scaled_clipped_or_replaced_and_then_added_to(kind: str) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        iterate(0)
        for each in (model, twin):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        iterate(1)
        for each in (model, twin):
            each.head.weight.grad = each.head.weight.grad * 0.5
            each.stem.weight.grad = None
            torch.nn.utils.clip_grad_value_(each.blocks[0].parameters(), 1e-3)
        iterate(2)

    loop(kind, body)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5).add_(0.125)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def all_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_([param.detach() for param in model.parameters()], 0.5)


@pytest.mark.in_turn
@some_kinds
@pytest.mark.parametrize("change", [in_place, through_data, all_at_once])
@pytest.mark.sampled(1)
def test_weights_changed_between_steps_are_gathered_anew(kind: str, change: Callable[[nn.Module], None]) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        for step in range(3):
            iterate(step)
            for each in (model, twin):
                each.zero_grad()
                change(each)
            assert_same_weights(model, twin)
            with torch.no_grad():
                torch.testing.assert_close(model(batches_of(9, 1)[0]), twin(batches_of(9, 1)[0]))

    loop(kind, body)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "hsdp_zero1"])
@pytest.mark.parametrize("bucket_size", [None, 1])
@pytest.mark.sampled(4)
def test_a_change_of_one_parameter_is_gathered(kind: str, bucket_size: int | None) -> None:
    """The other one was written more often before, and its bucket has not changed since the last gather."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        for module in (model[0], model):
            fully_shard(module, bucket_size=bucket_size, **options_of(kind))
        model.set_reshard_after_forward(False)
        x = torch.ones(1, 5)
        with torch.no_grad():
            for _ in range(3):
                for layer in model:
                    layer.weight.mul_(1.0)
            with model.unsharded():
                rows = model[1].weight.sum(1)
            before = model(x)
            for index in (1, 0):
                model[index].bias.add_(1.0)
                after = model(x)
                moved = 1.0 if index else rows
                torch.testing.assert_close(after, before + moved)
                before = after

    simulate(on_each_rank, KINDS[kind])


def test_each_of_two_fused_steps_reaches_whole_parameters_at_rest() -> None:
    """They raise no version. After the first an evaluation has gathered all units."""

    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=True) for each in (model, twin)]
        iterate(0)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(batches_of(9, 1)[0]), twin(batches_of(9, 1)[0]))

    loop("zero1", body, bucket_size=1)


@pytest.mark.in_turn
@some_kinds
@pytest.mark.sampled(1)
def test_an_average_of_weights_that_is_swapped_in(kind: str) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        averages = [[param.detach().clone() for param in each.parameters()] for each in (model, twin)]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
        for step in range(2):
            iterate(step)
            for each, average, optimizer in zip((model, twin), averages, optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    torch._foreach_lerp_(average, list(each.parameters()), 0.25)
        for each, average in zip((model, twin), averages, strict=True):
            with torch.no_grad():
                for param, mean in zip(each.parameters(), average, strict=True):
                    param.copy_(mean)
        assert_same_weights(model, twin, 1e-7)
        iterate(3)

    loop(kind, body)


@pytest.mark.in_turn
def test_schedules_of_the_learning_rate() -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
        schedules = [torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.2, total_steps=5) for one in optimizers]
        for step in range(4):
            iterate(step)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            assert_same_weights(model, twin)

    loop("zero3", body)


@pytest.mark.in_turn
@some_kinds
@pytest.mark.sampled(1)
def test_a_grad_scaler_skips_on_all_ranks_alike(kind: str) -> None:
    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Net, lambda model: shard_blocks(model, **options_of(kind)))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1) for _ in range(2)]
        for step, overflows in enumerate((False, True, False)):

            def run(each: nn.Module, batches: Sequence[Tensor], step: int = step, overflows: bool = overflows) -> None:
                loss = scalers[each is twin].scale(mean_loss(each(batches[0])))
                (
                    loss * torch.inf if overflows and torch.equal(batches[0], batches_of(0, 1, step=step)[0]) else loss
                ).backward()

            run(model, batches_of(rank, 1, step=step))
            plain_grads(twin, run, [batches_of(other, 1, step=step) for other in range(size)])
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert_same_weights(model, twin)
        assert scalers[0].get_scale() == 2.0**11

    simulate(on_each_rank, KINDS[kind])


# ---- Whole parameters. ----


@some_kinds
@pytest.mark.sampled(1)
def test_whole_parameters_are_read_and_written(kind: str) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        for writeback in (False, True, False):
            with model.unsharded(writeback=writeback), torch.no_grad():
                for (name, whole), plain in zip(model.named_parameters(), twin.parameters(), strict=True):
                    assert torch.equal(whole, plain), name
                    whole.add_(0.5)
                    if writeback:
                        plain.add_(0.5)
            assert_same_weights(model, twin)
            iterate(0)
            for each in (model, twin):
                each.zero_grad()

    loop(kind, body)


def test_whole_parameters_at_rest_follow_shards_and_their_own_writes_are_lost() -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        for step in range(2):
            iterate(step)
            for each in (model, twin):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
            with model.unsharded(), torch.no_grad():
                for param, plain in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(param, plain)
                    param.zero_()

    loop("zero1", body)


@some_kinds
@pytest.mark.sampled(1)
def test_units_unsharded_by_hand_and_inside_each_other(kind: str) -> None:
    def body(model: Any, twin: Any, iterate: Callable[[int], None]) -> None:
        block = model.blocks[1]
        block.unshard()
        assert torch.equal(block.linear.weight, twin.blocks[1].linear.weight)
        with model.unsharded():
            iterate(0)
            assert torch.equal(block.linear.weight, twin.blocks[1].linear.weight)
        block.reshard()
        with pytest.raises(RuntimeError, match=r"uses the parameter 'blocks.1.linear.weight' outside"):
            block.linear.weight * 2
        model.zero_grad()
        twin.zero_grad()
        iterate(1)

    # Gradients belong to shards: assert_same_grads reads them where nothing is whole.
    def on_each_rank() -> None:
        model, twin = both(Net, lambda model: shard_blocks(model, **options_of(kind)))
        rank, size = rank_and_size()

        def iterate(step: int) -> None:
            one_backward(model, batches_of(rank, 1, step=step))
            plain_grads(twin, one_backward, [batches_of(other, 1, step=step) for other in range(size)])
            for pair in [pair for unit in model.units for pair in unit.pairs]:
                info = pair.sharded.shard
                wanted = dict(twin.named_parameters())[info.name].grad.reshape(-1)[info.start : info.end]
                torch.testing.assert_close(pair.sharded.grad.to_local().reshape(-1), wanted)

        body(model, twin, iterate)

    simulate(on_each_rank, KINDS[kind])


# ---- Schedules of gathers. ----


@pytest.mark.parametrize("lists", ["next", "all", "none", "wrong"])
@pytest.mark.sampled(2)
def test_explicit_prefetch_lists_change_no_number(lists: str) -> None:
    def shard(model: Any, **options: Any) -> None:
        shard_blocks(model, **options)
        blocks = list(model.blocks)
        chosen = {
            "next": lambda i: blocks[i + 1 : i + 2],
            "all": lambda i: blocks,
            "none": lambda i: [],
            "wrong": lambda i: [model, *blocks[:i]],
        }[lists]
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(chosen(index))
            block.set_modules_to_backward_prefetch(list(reversed(chosen(index))))

    train_beside("zero3", shard=shard)


def test_resharding_that_is_changed_on_the_way() -> None:
    def run(model: Any, batches: Sequence[Tensor]) -> None:
        for index, batch in enumerate(batches):
            if hasattr(model, "set_reshard_after_forward"):
                model.set_reshard_after_forward(index % 2 == 0)
                model.blocks[1].set_reshard_after_forward(index % 2 == 1, recurse=False)
            mean_loss(model(batch)).backward()

    train_beside("zero3", run=run, microbatches=3)
