"""Zeroing gradients, in any of the ways that programs know, or forgetting to; and what finishes a reduction."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import (
    assert_same,
    ddp_backward,
    loss_of,
    main_grads,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    weights,
    wrap,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import DistributedOptimizer, clip_grad_norm
from maingrad.launch import simulate

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["before_buffer", "after_buffer", "before_backward"])
def test_optimizer_zero_grad_beside_zero_grad_buffer_changes_nothing(order: str, set_to_none: bool) -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, plain))
    for step in range(3):
        batches = make_batches(2, seed=step)
        if order == "before_backward":
            ours.zero_grad(set_to_none)
        ddp_backward(ddp, batches)
        ddp.expose_grads()
        ours.step()
        if order == "before_buffer":
            ours.zero_grad(set_to_none)
        ddp.zero_grad_buffer()
        if order == "after_buffer":
            ours.zero_grad(set_to_none)
        plain_backward(plain, batches)
        theirs.step()
        theirs.zero_grad()
    assert_same(weights(ddp), weights(plain))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("zero", ["zero_grad()", "zero_grad(False)", "no zero_grad"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(12)
def test_gradients_are_zeroed_or_go_on_as_in_plain_pytorch(ranks: int, overlap: bool, zero: str, sharded: bool) -> None:
    """Zeros in ``.grad``, or the last step's gradient, are what the next backward adds to."""

    def train(trained: Any, optimizer: torch.optim.Optimizer, among: range) -> dict[str, Tensor]:
        for step in range(3):
            for rank in among:
                (loss_of(trained, make_batches(1, torch.float64, seed=10 * step + rank)[0]) / len(among)).backward()
            optimizer.step()
            if zero == "zero_grad()":
                optimizer.zero_grad()
            elif zero == "zero_grad(False)" and not isinstance(optimizer, DistributedOptimizer):
                optimizer.zero_grad(set_to_none=False)
            elif zero == "zero_grad(False)":  # DistributedOptimizer takes no notice of set_to_none
                for param in trained.parameters():
                    param.grad.zero_()
        return weights(trained)

    def run() -> dict[str, Tensor]:
        ddp = wrap(make_model(torch.float64), overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if sharded:
            optimizer = DistributedOptimizer(ddp, lr=0.1, optimizer_class=torch.optim.SGD)
        rank = dist.get_rank()
        return train(ddp, optimizer, range(rank, rank + 1))

    plain = plain_twin(make_model(torch.float64))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(ranks))
    for found in simulate(run, ranks):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12)


def test_zeros_stay_where_a_program_asks_for_them() -> None:
    ddp = wrap(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        loss_of(ddp, make_batches(1, seed=step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(param.grad is not None and not param.grad.any() for param in ddp.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in ddp.parameters())


def test_one_optimizer_over_two_wrappers_serves_both() -> None:
    models = [make_model(), make_model()]
    plain = [plain_twin(model) for model in models]
    wrapped = [wrap(model) for model in models]
    for pair in (wrapped, plain):
        optimizer = torch.optim.SGD([param for model in pair for param in model.parameters()], lr=0.1)
        for step in range(3):
            for seed, model in enumerate(pair):
                loss_of(model, make_batches(1, seed=10 * step + seed)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            for model in wrapped if pair is wrapped and step == 1 else ():
                with model.no_sync():
                    loss_of(model, make_batches(1)[0]).backward()
            optimizer.zero_grad()
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert_same(weights(ours), weights(theirs))
    DistributedOptimizer(wrapped[1])
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\): parameter '\S+' is updated by the DistributedOptimizer"):
        torch.optim.SGD([param for model in wrapped for param in model.parameters()], lr=0.1).step()


def test_a_zero_grad_of_the_programs_own_stays() -> None:
    ddp = wrap(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    calls: list[int] = []
    optimizer.zero_grad = lambda set_to_none=True: calls.append(1)  # type: ignore[method-assign]
    for step in range(2):
        loss_of(ddp, make_batches(1, seed=step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.zero_grad()
    assert calls == [1, 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(12)
def test_zero_grad_after_a_backward_for_something_else_discards_it(name: str, ranks: int, overlap: bool) -> None:
    """An adversarial example needs the input's gradient alone: the parameters' are not wanted."""

    def train(trained: nn.Module, mine: list[Tensor]) -> dict[str, Tensor]:
        optimizer = OPTIMIZERS[name](trained.parameters())
        for batch in mine:
            inputs = batch.clone().requires_grad_()
            loss_of(trained, inputs).backward()
            assert inputs.grad is not None
            optimizer.zero_grad()
            loss_of(trained, inputs.detach() + 0.1 * inputs.grad.sign()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(trained)

    steps = [make_batches(ranks, torch.float64, seed=step) for step in range(3)]
    expected = train(plain_twin(make_model(torch.float64)), [torch.cat(step) for step in steps])

    def run() -> dict[str, Tensor]:
        ddp = wrap(make_model(torch.float64), overlap_grad_reduce=overlap)
        return train(ddp, [step[dist.get_rank()] for step in steps])

    for found in simulate(run, ranks):
        for key, weight in expected.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(6)
def test_optimizer_zero_grad_between_microbatches_discards(name: str, set_to_none: bool) -> None:
    """After a backward under ``no_sync`` gradients are in main_grad alone, and ``.grad`` is None already."""
    ddp = wrap(make_model())
    plain = plain_twin(ddp.module)
    for model in (ddp, plain):
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for step in range(3):
            optimizer.zero_grad()
            plain_backward(model, make_batches(2, seed=step))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step != 1)
        with ddp.no_sync():
            loss_of(model, make_batches(1)[0]).backward()
        optimizer.zero_grad(set_to_none)
        loss_of(model, make_batches(2)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights(ddp), weights(plain))
    reference = weakref.ref(optimizer)
    del optimizer, schedule
    assert reference() is None, "no cycle"


def test_an_optimizer_of_some_parameters_cannot_discard_between_microbatches() -> None:
    ddp = wrap(make_model())
    optimizer = torch.optim.SGD(list(ddp.parameters())[:1], lr=0.1)
    plain_backward(ddp, make_batches(1))
    optimizer.step()
    ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, make_batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"has not all of the model's parameters.*call model.zero_grad\(\)"):
        optimizer.zero_grad()


def test_an_optimizer_of_some_parameters_discards_if_the_others_have_nothing() -> None:
    """The discriminator's optimizer, after a backward of the discriminator alone."""
    ddp = wrap(nn.ModuleDict({"generator": nn.Linear(3, 3), "discriminator": nn.Linear(3, 1)}))
    parts = ddp.module
    optimizer = torch.optim.SGD(parts["discriminator"].parameters(), lr=0.1)
    for step in range(2):
        if step == 1:
            with ddp.no_sync():
                parts["discriminator"](torch.full((2, 3), 7.0)).sum().backward()
            optimizer.zero_grad()
        parts["discriminator"](torch.ones(2, 3)).sum().backward()
        assert torch.equal(parts["discriminator"].weight.grad.clone(), torch.full((1, 3), 2.0))
        optimizer.step()
        ddp.zero_grad()


def test_zero_grad_of_the_wrapper_discards_what_was_accumulated() -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    first, second = make_batches(2)
    for trained in (ddp, plain):
        loss_of(trained, first).backward()
        trained.zero_grad()
    ddp_backward(ddp, [second])
    plain_backward(plain, [second])
    assert_same(main_grads(ddp), plain_grads(plain))


def test_zero_grad_of_the_wrapper_clears_what_was_put_there_by_hand() -> None:
    ddp = wrap(make_model())
    first, second = make_batches(2)
    with ddp.no_sync():
        loss_of(ddp, first).backward()
    weight = next(ddp.parameters())
    weight.grad = torch.ones_like(weight)
    ddp.zero_grad()
    assert weight.grad is None
    ddp_backward(ddp, [second])


@pytest.mark.parametrize("overlap", [False, True])
def test_what_needs_reduced_gradients_finishes_their_reduction(overlap: bool) -> None:
    (batch,) = make_batches(1)
    plain = plain_twin(make_model())
    loss_of(plain, batch).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    for use in (lambda ddp: ddp.expose_grads(), lambda ddp: clip_grad_norm(ddp, 1e9)):
        ddp = wrap(make_model(), overlap_grad_reduce=overlap)
        loss_of(ddp, batch).backward()
        found = use(ddp)
        assert found is None or torch.allclose(found, norm)
        assert ddp.is_reduced
        assert_same(plain_grads(ddp.module), plain_grads(plain))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(4)
def test_buckets_in_flight_are_scaled_or_zeroed_when_they_arrive(ranks: int, sharded: bool) -> None:
    batches = make_batches(2 * ranks, torch.float64)

    def run() -> tuple[Tensor, list[Tensor]]:
        mine = batches[dist.get_rank() :: ranks]
        ddp = wrap(make_model(torch.float64), overlap_grad_reduce=True, use_distributed_optimizer=sharded)
        loss_of(ddp, mine[0]).backward()
        ddp.zero_grad_buffer()
        assert all(param.grad is None for param in ddp.parameters())
        loss_of(ddp, mine[1]).backward()
        ddp.scale_gradients(2.0)
        return torch.stack([p.grad.norm() for p in ddp.parameters()]), [p.grad.norm(1) for p in ddp.parameters()]

    plain = plain_twin(make_model(torch.float64))
    for batch in batches[ranks:]:
        (2 * loss_of(plain, batch) / ranks).backward()
    norms, sums = torch.stack([p.grad.norm() for p in plain.parameters()]), [p.grad.norm(1) for p in plain.parameters()]
    for found in simulate(run, ranks):
        torch.testing.assert_close(found, (norms, sums), rtol=1e-12, atol=1e-12)


def test_a_skipped_step_leaves_no_trace() -> None:
    model = make_model()
    ddp = wrap(model)
    plain = plain_twin(model)
    bad, good = make_batches(1, seed=5), make_batches(2)
    bad[0].fill_(torch.nan)
    ddp_backward(ddp, bad)
    ddp.zero_grad_buffer()
    ddp_backward(ddp, good)
    plain_backward(plain, good)
    assert_same(main_grads(ddp), plain_grads(plain))


class TwoEnds(nn.Module):
    """A batch goes through one of two layers."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ends = nn.ModuleList(nn.Linear(8, 4, bias=bias) for _ in range(2))

    def forward(self, x: Tensor, end: int) -> Tensor:
        return self.ends[end](x)  # type: ignore[no-any-return]


def discard_one(net: Any, end: int) -> None:
    for param in net.ends[end].parameters():
        param.grad = None


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(4)
def test_one_layers_gradients_are_discarded_after_a_read_and_the_others_go_on(overlap: bool, reads: bool) -> None:
    """Or before one, when their reduction may be under way."""
    net = TwoEnds()
    twin = plain_twin(net)
    ddp = wrap(net, overlap_grad_reduce=overlap, bucket_size=1)
    first, second = make_batches(2)
    for model, own in ((ddp, net), (twin, twin)):
        (model(first, 0) + model(first, 1)).square().mean().backward()
        if reads:
            torch.nn.utils.clip_grad_norm_(own.parameters(), 1e3)
        discard_one(own, 0)
        (model(second, 0) + model(second, 1)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1e3)
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
    for model in (ddp, twin):  # the next iteration discards nothing
        model.zero_grad()
        (model(first, 0) + model(first, 1)).square().mean().backward()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.norm() > 0
        torch.testing.assert_close(mine.grad, plain.grad)


def test_gradients_that_were_discarded_stay_away_in_a_backward_that_does_not_reach_them() -> None:
    """AdamW passes over parameters whose ``.grad`` is None: no decay, no step by its moments."""
    net = TwoEnds()
    twin = plain_twin(net)
    ddp = wrap(net)
    for model, own in ((ddp, net), (twin, twin)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for batch in make_batches(2):
            model(batch, 0).square().mean().backward()
        discard_one(own, 0)
        model(make_batches(1)[0], 1).square().mean().backward()
        assert all(param.grad is None for param in own.ends[0].parameters())
        optimizer.step()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


def test_a_parameter_without_a_use_has_zeros() -> None:
    """Another rank may have used it. A frozen one has none."""
    net = TwoEnds()
    net.ends[1].bias.requires_grad_(False)
    ddp = wrap(net)
    ddp(make_batches(1)[0], 0).square().mean().backward()
    assert net.ends[1].weight.grad is not None and net.ends[1].bias.grad is None
    assert not net.ends[1].weight.grad.any()


def test_what_was_put_there_by_hand_where_backward_brings_nothing_is_refused() -> None:
    """And not replaced by the gradient that is shown: it would be lost."""
    net = TwoEnds()
    ddp = wrap(net)
    net.ends[1].weight.grad = torch.ones(4, 8)
    ddp(make_batches(1)[0], 0).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"'ends\.1\.weight' was put into \.grad by hand.*add_grad\(param, grad\)"):
        nn.utils.clip_grad_norm_([net.ends[0].weight], 1.0)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_of_one_parameter_goes_on_after_a_read(sharded: bool) -> None:
    """In the hook its ``.grad`` is taken for a moment, which discards nothing."""
    net = nn.Linear(8, 4, bias=False)
    twin = plain_twin(net)
    ddp = wrap(net, use_distributed_optimizer=sharded)
    for batch in make_batches(3):
        for model, own in ((ddp, net), (twin, twin)):
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 1e3)
        assert net.weight.grad is not None and twin.weight.grad is not None
        torch.testing.assert_close(net.weight.grad.norm(), twin.weight.grad.norm())


def test_the_last_gradient_that_is_not_discarded_goes_on() -> None:
    net = TwoEnds(bias=False)
    twin = plain_twin(net)
    ddp = wrap(net)
    first, second = make_batches(2)
    for model, own in ((ddp, net), (twin, twin)):
        (model(first, 0) + model(first, 1)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1e3)
        discard_one(own, 1)
        model(second, 0).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1e3)
        assert own.ends[1].weight.grad is None
    torch.testing.assert_close(net.ends[0].weight.grad, twin.ends[0].weight.grad)


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("reads", [None, "first", "last"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(24)
def test_a_later_backward_adds_to_a_tensor_that_was_put_in_the_gradients_place(
    overlap: bool, sharded: bool, reads: str | None, reached: bool
) -> None:
    """Also where no gradient was read before, or those of others alone: the gradient of before is gone."""
    net = TwoEnds()
    twin = plain_twin(net)
    first, second = make_batches(2)

    def run(model: Any, own: Any) -> list[Tensor]:
        model(first, 0).square().mean().backward()
        own.ends[0].weight.grad = torch.full((4, 8), 3.0)
        if reads is not None:
            assert own.ends[0].get_parameter("weight" if reads == "first" else "bias").grad.norm() > 0
        model(second, 0 if reached else 1).square().mean().backward()
        return [param.grad.norm() for param in own.ends[0].parameters()]

    ddp = wrap(net, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded, bucket_size=1)
    for found, expected in zip(run(ddp, net), run(twin, twin), strict=True):
        torch.testing.assert_close(found, expected)


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("read", ["shown", "exposed"])
@pytest.mark.sampled(16)
def test_a_gradient_that_the_program_keeps_has_memory_of_its_own(
    read: str, kept: bool, sharded: bool, dtype: torch.dtype
) -> None:
    """``shown``: it is taken before its first read; ``exposed``: behind it. Nothing else is copied."""
    ddp = wrap(make_model(dtype), use_distributed_optimizer=sharded)
    first, second = make_batches(2, dtype)
    weight = ddp.module[0].weight
    loss_of(ddp, first).backward()
    if read == "exposed":
        assert weight.grad.norm() > 0
    grad: Any = weight.grad
    before = grad.norm().item()
    if not kept:
        del grad
    with Copies() as copies:
        ddp.zero_grad()
    own = dtype is torch.bfloat16 and not sharded  # already: a copy in the parameter's dtype
    assert copies.count == int(kept and not own)
    loss_of(ddp, second).backward()
    after = weight.grad.norm().item()
    assert after != before
    if kept:
        assert grad.norm().item() == before


@pytest.mark.parametrize("sharded", [False, True])
def test_what_changes_a_gradient_in_place_returns_it(sharded: bool) -> None:
    ddp = wrap(make_model(), use_distributed_optimizer=sharded)
    loss_of(ddp, make_batches(1)[0]).backward()
    for param in ddp.parameters():
        assert param.grad.norm() >= 0
        grad = param.grad
        assert grad.mul_(2.0) is grad
        assert grad.add_(1.0) is param.grad


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, with_head: bool = True, fails: bool = False) -> Tensor:
        y = self.body(x)
        if fails:
            y.register_hook(lambda _: 1 / 0)
        return self.head(y) if with_head else y


def test_what_came_in_a_backward_that_raised_is_not_shown_in_a_later_iteration() -> None:
    model, x = wrap(TwoHeads()), torch.ones(2, 4)
    model(x).sum().backward()
    with pytest.raises(ZeroDivisionError):
        model(x, fails=True).sum().backward()
    model(x).sum().backward()  # begins a new iteration
    model.module.head.weight.grad = None
    model(x, with_head=False).sum().backward()
    assert model.module.head.weight.grad is None
    assert model.module.body.weight.grad.norm() > 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("microbatch", [False, True])
@pytest.mark.sampled(16)
def test_gradients_may_be_cleared_between_a_forward_and_its_backward(
    microbatch: bool, overlap: bool, reads: bool, sharded: bool
) -> None:
    """As loops do that call ``optimizer.zero_grad()`` right before ``backward()``, here without a step between."""
    model = wrap(nn.Linear(4, 2), overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
    number, params = model.iteration, [*model.parameters()]
    model(torch.full((1, 4), 5.0)).sum().backward()
    if reads:
        assert params[0].grad.norm() > 0
    loss = model(torch.ones(1, 4)).sum()
    for param in params:
        param.grad = None
    if microbatch:
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()
    model.finish_grad_sync()
    assert model.iteration == number + 1
    assert torch.equal(params[0].main_grad, torch.ones(2, 4))


@pytest.mark.parametrize("clear", ["zero_grad", "zero_grad_buffer"])
def test_what_a_program_has_put_into_main_grad_is_zeroed_too(clear: str) -> None:
    """Before any backward of the iteration."""
    model, (batch,) = wrap(make_model()), make_batches(1)
    twin = plain_twin(model.module)
    for param in model.parameters():
        param.main_grad.fill_(1.0)
    getattr(model, clear)()
    assert not any(param.main_grad.any() for param in model.parameters())
    ddp_backward(model, [batch])
    plain_backward(twin, [batch])
    assert_same(main_grads(model), plain_grads(twin))


def test_a_forward_behind_cleared_gradients_begins_an_iteration() -> None:
    """Before it runs: modules may write gradients in their forward, and unused parameters are found there."""
    model = wrap(nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    model.module.weight.grad = model.module.bias.grad = None
    seen = []
    model.module.register_forward_hook(lambda *_: seen.append((model.iteration, model.is_clear)))
    model(torch.ones(1, 4))
    assert seen == [(1, True)]
