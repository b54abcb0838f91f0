"""In whatever order forwards and backwards come, and wherever an iteration breaks off: a plain model's gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sharded_twin import (
    Block,
    Net,
    assert_same_grads,
    batches_of,
    both,
    mean_loss,
    no_sync,
    one_backward,
    options_of,
    plain_grads,
    rank_and_size,
    ranks_of,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import FSDPModule
from maingrad.fsdp.tensors.parameter import ShardedParameter
from maingrad.launch import simulate

Batches = Sequence[Tensor]

# ---- Orders of forward and backward. Each is run on the model and on its twin. ----


def first_then_second(model: nn.Module, batches: Batches) -> None:
    losses = [mean_loss(model(batch)) for batch in batches]
    with no_sync(model):
        losses[0].backward()
    losses[1].backward()


def second_then_first(model: nn.Module, batches: Batches) -> None:
    losses = [mean_loss(model(batch)) for batch in batches]
    with no_sync(model):
        losses[1].backward()
    losses[0].backward()


def both_final(model: nn.Module, batches: Batches) -> None:
    losses = [mean_loss(model(batch)) for batch in batches]
    for loss in losses:
        loss.backward()


def one_backward_of_the_sum(model: nn.Module, batches: Batches) -> None:
    (mean_loss(model(batches[0])) * mean_loss(model(batches[1]))).backward()


def every_backward_final(model: nn.Module, batches: Batches) -> None:
    for batch in batches:
        mean_loss(model(batch)).backward()


def none_final(model: nn.Module, batches: Batches) -> None:
    with no_sync(model):
        every_backward_final(model, batches)
    if isinstance(model, FSDPModule):
        model.finish_grad_sync()
        model.finish_grad_sync()


def a_forward_in_vain(model: nn.Module, batches: Batches) -> None:
    model(batches[1])
    one_backward(model, batches[:1])
    model(batches[1])


def a_forward_in_vain_whose_graph_stays(model: nn.Module, batches: Batches) -> None:
    before = mean_loss(model(batches[1]))
    loss = mean_loss(model(batches[0]))
    after = mean_loss(model(batches[1]))
    loss.backward()
    assert before.grad_fn is not None and after.grad_fn is not None


def twice_over_one_graph(model: nn.Module, batches: Batches) -> None:
    loss = mean_loss(model(batches[0]))
    with no_sync(model):
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    loss.backward()


def twice_over_one_graph_both_final(model: nn.Module, batches: Batches) -> None:
    loss = mean_loss(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()


def forward_under_no_sync_backward_outside(model: nn.Module, batches: Batches) -> None:
    with no_sync(model):
        loss = mean_loss(model(batches[0]))
    loss.backward()


def input_gradients_on_the_side(model: nn.Module, batches: Batches) -> None:
    x = batches[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x)), x)
    assert grad.any()
    one_backward(model, [batches[1] + grad])


def input_gradients_of_the_same_graph(model: nn.Module, batches: Batches) -> None:
    x = batches[0].clone().requires_grad_()
    loss = mean_loss(model(x))
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, grad)


def evaluation_between_forward_and_backward(model: nn.Module, batches: Batches) -> None:
    loss = mean_loss(model(batches[0]))
    with torch.no_grad():
        model(batches[1])
    with torch.inference_mode():
        model(batches[1])
    loss.backward()


def evaluation_between_microbatches(model: nn.Module, batches: Batches) -> None:
    with no_sync(model):
        mean_loss(model(batches[0])).backward()
    with torch.inference_mode():
        model.eval()
        model(batches[1])
        model.train()
    mean_loss(model(batches[1])).backward()
    with torch.no_grad():
        model(batches[1])


def inputs_that_want_a_gradient(model: nn.Module, batches: Batches) -> None:
    for batch in batches:
        x = (batch * 2).requires_grad_()
        mean_loss(model(x * 0.5)).backward()
        assert x.grad.any()


def a_backward_of_backward(model: nn.Module, batches: Batches) -> None:
    """A loss of the gradient of the input."""
    x = batches[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x)), x, create_graph=True)
    grad.square().mean().backward()


ORDERS = [
    first_then_second,
    second_then_first,
    both_final,
    one_backward_of_the_sum,
    every_backward_final,
    none_final,
    a_forward_in_vain,
    a_forward_in_vain_whose_graph_stays,
    twice_over_one_graph,
    twice_over_one_graph_both_final,
    forward_under_no_sync_backward_outside,
    input_gradients_on_the_side,
    input_gradients_of_the_same_graph,
    evaluation_between_forward_and_backward,
    evaluation_between_microbatches,
    inputs_that_want_a_gradient,
    a_backward_of_backward,
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "alone", "zero2", "zero3, once", "hsdp, once"])
@pytest.mark.sampled(1)
def test_orders_of_forward_and_backward(kind: str, order: Callable[[nn.Module, Batches], None]) -> None:
    train_beside(kind, run=order)


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.sampled(1)
def test_resharding_every_unit_or_none(reshard: bool) -> None:
    for order in (one_backward, second_then_first, twice_over_one_graph):

        def shard(model: nn.Module, **options: Any) -> None:
            shard_blocks(model, reshard_after_forward=reshard, **options)

        train_beside("zero3", shard=shard, run=order)


# ---- Models that go their own ways. ----


class Loop(Net):
    """Blocks run in a circle, and one of them again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(x * self.scale)


class Skips(Net):
    """Each microbatch skips another block."""

    left_out = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index != self.left_out:
                x = block(x)
        self.left_out = (self.left_out + 1) % 3
        return self.head(x * self.scale)


class AuxiliaryBlock(Block):
    """Stores a loss on the module, computed before the output."""

    auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.linear(x).square().mean()
        return super().forward(x)


class Auxiliary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AuxiliaryBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, sum(block.auxiliary for block in self.blocks)


class Half(Net):
    """The second half of the last block's parameters is never used."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        return self.head(self.blocks[1](x))


class Detaches(Net):
    """No gradient reaches the first block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x)).detach()
        return self.head(self.blocks[2](self.blocks[1](x)) * self.scale)


class Branches(Net):
    """Blocks side by side over one input, which is used again afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a, b = self.blocks[0](x), self.blocks[1](x)
        return self.head(self.blocks[2](a * b + x) + a * self.scale)


@pytest.mark.parametrize("make", [Loop, Skips, Auxiliary, Half, Detaches, Branches])
@pytest.mark.parametrize(
    "kind", ["zero3", *[pytest.param(kind, marks=pytest.mark.slow) for kind in ("hsdp_zero1", "zero1", "zero3, once")]]
)
@pytest.mark.sampled(1)
def test_models_that_go_their_own_ways(kind: str, make: Callable[[], nn.Module]) -> None:
    train_beside(kind, make, steps=2, microbatches=3)


# ---- Recompute. ----


class Recomputes(Net):
    """what: "blocks", "pairs" of blocks, "inside" a block, "all" of them at once."""

    def __init__(self, what: str, reentrant: bool) -> None:
        super().__init__(4)
        self.what = what
        self.reentrant = reentrant
        if what == "inside":
            for block in self.blocks:
                block.linear.register_forward_pre_hook(lambda *_: None)
                block.forward = lambda x, block=block: x + self._again(lambda y: block.linear(block.norm(y)).tanh(), x)

    def _again(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a, b, c, d = self.blocks
        if self.what == "blocks":
            for block in self.blocks:
                x = self._again(block, x)
        elif self.what == "pairs":
            x = self._again(lambda y: b(a(y)), x)
            x = self._again(lambda y: d(c(y)), x)
        elif self.what == "all":
            x = self._again(lambda y: d(c(b(a(y)))), x)
        else:
            x = d(c(b(a(x))))
        return self.head(x * self.scale)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["blocks", "pairs", "inside", "all"])
@pytest.mark.parametrize("kind", ["zero3", "hsdp_zero1", "zero1", "zero3, once"])
@pytest.mark.sampled(1)
def test_recompute(kind: str, what: str, reentrant: bool) -> None:
    train_beside(kind, lambda: Recomputes(what, reentrant))


@pytest.mark.in_turn
def test_recompute_of_the_whole_model() -> None:
    def run(model: nn.Module, batches: Batches) -> None:
        for reentrant in (False, True):
            x = batches[0].clone().requires_grad_()
            mean_loss(checkpoint(model, x, use_reentrant=reentrant)).backward()

    for kind in ("zero3", "zero1"):
        train_beside(kind, run=run)


# ---- Iterations that break off. ----


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("the model's own mistake")


class Fragile(Net):
    """Fails in the middle on demand: where = "forward" or "backward"."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self._fail)

    def _fail(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if self.where == "forward":
            raise ArithmeticError("the model's own mistake")
        return _Fails.apply(output) if self.where == "backward" else None


def fail_in_forward(model: Any, batch: Tensor) -> None:
    model.where = "forward"
    with pytest.raises(ArithmeticError, match="own mistake"):
        model(batch)


def fail_between(model: Any, batch: Tensor) -> None:
    mean_loss(model(batch))


def fail_in_backward(model: Any, batch: Tensor) -> None:
    model.where = "backward"
    with pytest.raises(ArithmeticError, match="own mistake"):
        mean_loss(model(batch)).backward()


def fail_in_backward_under_no_sync(model: Any, batch: Tensor) -> None:
    with model.no_sync():
        fail_in_backward(model, batch)


def finish_after_a_failed_backward(model: Any, batch: Tensor) -> None:
    fail_in_backward(model, batch)
    with pytest.raises(RuntimeError, match=r"after a backward that raised.*unit 'blocks\.1'.*zero_grad"):
        model.finish_grad_sync()


def abandon_after_a_microbatch(model: Any, batch: Tensor) -> None:
    with model.no_sync():
        mean_loss(model(batch)).backward()


def abandon_after_the_last_microbatch(model: Any, batch: Tensor) -> None:
    mean_loss(model(batch)).backward()


BREAKS = [
    fail_in_forward,
    fail_between,
    fail_in_backward,
    fail_in_backward_under_no_sync,
    finish_after_a_failed_backward,
    abandon_after_a_microbatch,
    abandon_after_the_last_microbatch,
]


@pytest.mark.in_turn
@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("first", ["nothing", "a microbatch", "an iteration"])
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "zero3, once", "hsdp, once"])
@pytest.mark.sampled(2)
def test_an_iteration_that_breaks_off(kind: str, first: str, breaks: Callable[[Any, Tensor], None]) -> None:
    """After ``optimizer.zero_grad()`` no gradient of it enters the next iteration."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Fragile, lambda model: shard_blocks(model, **options_of(kind)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = batches_of(rank, 2, step=1)
        if first != "nothing":
            with no_sync(model):
                mean_loss(model(batches[0])).backward()
        if first == "an iteration":
            mean_loss(model(batches[1])).backward()
        breaks(model, batches[1])
        model.where = ""
        assert all(isinstance(param, ShardedParameter) for param in model.parameters()), "nothing whole is left behind"
        optimizer.zero_grad()
        for step in range(2):
            one_backward(model, batches_of(rank, 2, step=step))
            everyones = [batches_of(other, 2, step=step) for other in range(size)]
            assert_same_grads(model, plain_grads(twin, one_backward, everyones))
            optimizer.zero_grad()

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["hsdp", "hsdp_zero1"])
@pytest.mark.sampled(1)
def test_a_microbatch_before_one_that_failed_is_not_reduced_across_instances(kind: str) -> None:
    """Its sums inside the instance were in no ``.grad`` yet, and go with the iteration. Nobody calls ``zero_grad``."""

    def on_each_rank() -> None:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Fragile().double())
            shard_blocks(models[-1], **options_of(kind))
        first, failing, last = batches_of(rank_and_size()[0], 3)
        with models[0].no_sync():
            mean_loss(models[0](first)).backward()
            fail_in_backward(models[0], failing)
        models[0].where = ""
        for model in models:
            mean_loss(model(last)).backward()
        for mine, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), wanted.grad.to_local()), mine.shard.name

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["hsdp", "hsdp_zero1", "zero3"])
@pytest.mark.sampled(1)
def test_gradients_that_are_zeroed_in_place_know_nothing_of_an_iteration_that_broke_off(kind: str) -> None:
    """``.grad`` stays, and with it the sums: what one instance had summed for the iteration that failed is lost."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Fragile, lambda model: shard_blocks(model, **options_of(kind)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lost = batches_of(rank, 3, step=1)
        mean_loss(model(lost[0])).backward()
        with no_sync(model):
            mean_loss(model(lost[1])).backward()
        fail_in_backward(model, lost[2])
        model.where = ""
        optimizer.zero_grad(set_to_none=False)
        one_backward(model, batches_of(rank, 2))
        assert_same_grads(model, plain_grads(twin, one_backward, [batches_of(other, 2) for other in range(size)]))

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["zero1", "zero3", "zero3, once", "hsdp", "hsdp_zero1", "hsdp_zero1, once"])
@pytest.mark.sampled(2)
def test_what_is_abandoned_in_a_unit_stays_out_of_later_iterations_that_do_not_use_it(kind: str) -> None:
    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Skips, lambda model: shard_blocks(model, **options_of(kind)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.left_out = 1
        with model.no_sync():
            one_backward(model, batches_of(rank, 1))
        optimizer.zero_grad()
        for each in (model, twin):
            each.left_out = 0
        one_backward(model, batches_of(rank, 1, step=1))
        assert all(param.grad is not None for param in model.parameters()), "zeros, as of what nobody uses"

        def run(each: Any, batches: Batches) -> None:
            each.left_out = 0
            one_backward(each, batches)

        assert_same_grads(model, plain_grads(twin, run, [batches_of(other, 1, step=1) for other in range(size)]))
        optimizer.step()

    simulate(on_each_rank, ranks_of(kind))


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    mean_loss(model(batch)).backward()


@pytest.mark.parametrize("kind", ["zero3", "zero2", "zero1", "hsdp", "zero3, once"])
@pytest.mark.sampled(2)
def test_what_users_do_to_gradients_between_microbatches_comes_after_what_is_under_way(kind: str) -> None:
    """Reductions of the first microbatch are, when its backward returns. Where ``.grad`` is not all that there is, a
    change is refused."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Net, lambda net: shard_blocks(net, **options_of(kind)))
        optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
        everyones = [batches_of(other, 2) for other in range(size)]
        with model.no_sync():
            mean_loss(model(everyones[rank][0])).backward()
        if kind not in ("zero2", "zero3"):  # parts of sums are elsewhere
            with pytest.raises(RuntimeError, match=r"\.grad of parameter '.*' was changed in the middle"):
                zero_in_place(model, optimizer, everyones[rank][1])
            return
        first = [(param.grad.clone(), param.grad) for param in model.parameters()]
        assert all(torch.equal(early.to_local(), grad.to_local()) for early, grad in first)
        assert_same_grads(model, plain_grads(twin, one_backward, [batches[:1] for batches in everyones]))
        optimizer.zero_grad(set_to_none=False)
        assert not any(param.grad.to_local().any() for param in model.parameters())
        mean_loss(model(everyones[rank][1])).backward()
        assert_same_grads(model, plain_grads(twin, one_backward, [batches[1:] for batches in everyones]))
        optimizer.step()
        plain.step()

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("model", [Half, Detaches], ids=["never run", "never reached"])
@pytest.mark.parametrize("kind", ["zero1", "zero3", "zero3, once", "hsdp"])
@pytest.mark.sampled(2)
def test_a_unit_that_no_backward_reaches_has_zeros(kind: str, model: type[Net]) -> None:
    """As under DistributedDataParallel, so that an optimizer does the same under both."""

    def on_each_rank() -> None:
        sharded, _ = both(model, lambda net: shard_blocks(net, **options_of(kind)))
        left_out = sharded.blocks[2 if model is Half else 0]
        batches = batches_of(rank_and_size()[0], 2)
        for _ in range(2):
            one_backward(sharded, batches)
            grads = [param.grad for param in left_out.parameters()]
            assert not any(grad.to_local().any() for grad in grads)
            assert sharded.head.weight.grad.norm() > 0
            sharded.finish_grad_sync()  # once more changes nothing
            assert all(param.grad is grad for param, grad in zip(left_out.parameters(), grads, strict=True))
            sharded.zero_grad()
            sharded.finish_grad_sync()  # nothing is under way
            assert all(param.grad is None for param in sharded.parameters())

    simulate(on_each_rank, ranks_of(kind))
