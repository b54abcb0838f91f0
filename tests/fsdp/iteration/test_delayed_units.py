"""Delayed weight gradients of units: iterations that are given up, and weights that another use does not delay."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_training import shard as shard_units
from sharded_twin import assert_same_grads, batches_of, mean_loss, options_of, ranks_of, shard_blocks
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules


class Delaying(nn.Module):
    """Blocks whose weight gradients a queue may delay. Backward computes the gradients of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Linear(5, 5, fuse_wgrad_accumulation=True, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def backward_and_drain(model: Any, batch: Tensor, queue: WgradQueue) -> None:
    """The queue is drained outside of the block that delays."""
    with delayed_wgrad(queue):
        loss = mean_loss(model(batch))
    loss.backward()
    queue.drain()


def two_models(kind: str) -> tuple[Any, Any]:
    """With equal weights, sharded alike."""
    torch.manual_seed(0)
    model = Delaying()
    other = copy.deepcopy(model)
    for each in (model, other):
        shard_blocks(each, **options_of(kind))
    return model, other


@pytest.mark.parametrize("earlier", ["nothing", "a microbatch"])
@pytest.mark.parametrize("kind", ["zero1", "zero3", "zero3, once", "hsdp", "hsdp_zero1"])
@pytest.mark.sampled(2)
def test_an_iteration_is_given_up_before_its_delayed_gradients_are_computed(kind: str, earlier: str) -> None:
    """Gradients that backward has computed, biases here, do not enter the next iteration."""

    def on_each_rank() -> None:
        model, other = two_models(kind)
        batches = batches_of(dist.get_rank(), 3)
        queue = WgradQueue()
        with model.no_sync():
            if earlier == "a microbatch":
                mean_loss(model(batches[2])).backward()
            with delayed_wgrad(queue):
                loss = mean_loss(model(batches[0]))
            loss.backward()
        queue.clear()
        model.zero_grad()
        for each in (model, other):
            mean_loss(each(batches[1])).backward()
        for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(param.grad.to_local(), wanted.grad.to_local()), param.shard.name

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["zero2", "hsdp"])
@pytest.mark.sampled(1)
def test_gradients_are_cleared_while_delayed_ones_wait(kind: str) -> None:
    """Of weights ``.grad`` then has what is computed later, and nothing of the microbatch before."""

    def on_each_rank() -> None:
        model, other = two_models(kind)
        first, second = batches_of(dist.get_rank(), 2)
        queue = WgradQueue()
        with model.no_sync():
            mean_loss(model(first)).backward()
        with delayed_wgrad(queue):
            loss = mean_loss(model(second))
        loss.backward()
        model.zero_grad()
        queue.drain()
        mean_loss(other(second)).backward()
        for mine, theirs in zip(model.blocks, other.blocks, strict=True):
            assert torch.equal(mine.weight.grad.to_local(), theirs.weight.grad.to_local())

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["zero2", "hsdp"])
def test_modules_that_get_a_queue_of_their_own_after_they_were_sharded(kind: str) -> None:
    """When the model was sharded nobody knew that these weight gradients come later."""

    def on_each_rank() -> None:
        model, other = two_models(kind)
        for block in model.blocks:
            block.wgrad_queue = WgradQueue()
        for index in range(2):  # the second iteration knows no more than the first
            (batch,) = batches_of(dist.get_rank() + index, 1)
            mean_loss(model(batch)).backward()
            for block in reversed(model.blocks):
                block.backward_dw()
            model.finish_grad_sync()
            mean_loss(other(batch)).backward()
            for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(param.grad.to_local(), wanted.grad.to_local(), rtol=1e-12, atol=0)
            for each in (model, other):
                each.zero_grad()

    simulate(on_each_rank, ranks_of(kind))


def test_what_was_computed_late_and_then_cleared_is_not_reduced() -> None:
    """``finish_grad_sync`` behind ``zero_grad`` brings zeros, for delayed gradients that are computed too."""

    def on_each_rank() -> None:
        model, _ = two_models("zero2")
        queue = WgradQueue()
        with model.no_sync(), delayed_wgrad(queue):
            mean_loss(model(batches_of(dist.get_rank(), 1)[0])).backward()
        queue.drain()
        model.zero_grad()
        model.finish_grad_sync()
        assert not any(param.grad.to_local().any() for param in model.parameters())

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
@pytest.mark.sampled(2)
def test_an_iteration_whose_queue_was_let_go_is_given_up(kind: str) -> None:
    """Nothing can compute its gradients any more. The error names the module, and ``zero_grad`` begins anew."""

    def on_each_rank() -> None:
        model, other = two_models(kind)
        first, second = batches_of(dist.get_rank(), 2)
        queue = WgradQueue()
        with delayed_wgrad(queue):
            loss = mean_loss(model(first))
        loss.backward()
        del queue
        with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) while .* are pending: .*zero_grad\(\) gives"):
            model.finish_grad_sync()
        model.zero_grad()
        for each in (model, other):
            mean_loss(each(second)).backward()
            each.finish_grad_sync()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local()), mine.shard.name

    simulate(on_each_rank, ranks_of(kind))


def test_a_queue_is_drained_in_the_order_of_buckets() -> None:
    """So the last block's reduction runs under the products of the others, whatever number of microbatches waits."""
    torch.manual_seed(0)
    model: Any = Delaying()
    for module in (*model.blocks, model):
        fully_shard(module)
    queue = WgradQueue()
    queue.log = []
    for index, batch in enumerate(batches_of(0, 2)):
        with delayed_wgrad(queue):
            loss = mean_loss(model(batch))
        with model.no_sync() if index == 0 else nullcontext():
            loss.backward()
    queue.drain()
    assert [(run.bucket, run.microbatch) for run in queue.log] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_queue_is_drained_of_one_unit() -> None:
    """Its module registers shards by then, and the queue has products for the whole weights."""
    model: Any = Delaying()
    for module in (*model.blocks, model):
        fully_shard(module)
    queue = WgradQueue()
    queue.log = []
    with delayed_wgrad(queue):
        loss = mean_loss(model(batches_of(0, 1)[0]))
    loss.backward()
    queue.drain_module(model.blocks[1])
    assert [run.bucket for run in queue.log] == [1]
    queue.drain()
    assert sorted(run.bucket for run in queue.log) == [0, 1, 2]


class Skips(nn.Module):
    """Two layers, of which a forward may skip the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (Linear(5, 5, fuse_wgrad_accumulation=True, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.second(x if skips else self.first(x).tanh())


@pytest.mark.parametrize("kind", ["zero1", "zero3, once"])
@pytest.mark.sampled(1)
def test_what_waits_behind_delayed_gradients_is_cleared_with_them(kind: str) -> None:
    """The last microbatch delays one unit. Another has gradients of the microbatch before, to be sent after these."""

    def on_each_rank() -> None:
        model: Any = Skips()
        for module in (model.first, model.second, model):
            fully_shard(module, **options_of(kind))
        first, second = batches_of(dist.get_rank(), 2)
        queue = WgradQueue()
        with model.no_sync():
            mean_loss(model(first, False)).backward()
        with delayed_wgrad(queue):
            loss = mean_loss(model(second, True))
        loss.backward()
        model.zero_grad()
        queue.drain()
        assert not model.first.weight.grad.to_local().any()
        assert model.second.weight.grad.full_tensor().any()

    simulate(on_each_rank, ranks_of(kind))


class Tied(nn.Module):
    """An embedding tied to the head, around layers that are units of their own."""

    def __init__(self, *, delays: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])
        self.head = Linear(
            6, 9, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=delays, dtype=torch.float64
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def _grads_of_two_microbatches(delays: bool) -> list[Tensor]:
    model = Tied(delays=delays)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, bucket_size=1)
    for microbatch in range(2):
        tokens = torch.arange(4) + microbatch
        if microbatch == 0:
            with model.no_sync():
                model(tokens).square().mean().backward()
        else:
            model(tokens).square().mean().backward()
        if delays:
            model.head.backward_dw()
    model.finish_grad_sync()
    return [param.grad.to_local().clone() for param in model.parameters()]


def test_a_tied_weight_is_delayed_in_one_module_alone() -> None:
    """While the gradient is queued, a wait for the reduction of the microbatch before resets its bucket."""
    for delayed, plain in zip(_grads_of_two_microbatches(True), _grads_of_two_microbatches(False), strict=True):
        torch.testing.assert_close(delayed, plain, rtol=1e-12, atol=0)


class Sometimes(nn.Module):
    """Blocks with a layer that a rank may skip."""

    def __init__(self, make_layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([SometimesBlock(make_layer()) for _ in range(3)])

    def forward(self, x: Tensor, used: Sequence[bool]) -> Tensor:
        x = self.stem(x)
        for block, use in zip(self.blocks, used, strict=True):
            x = block(x, use)
        return self.head(x)


class SometimesBlock(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.always, self.layer = nn.Linear(6, 6), layer
        self.queue: WgradQueue | None = None
        """The forward delays by it, whether it uses the layer or not."""

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = x + self.always(x).tanh()
        with nullcontext() if self.queue is None else delayed_wgrad(self.queue):
            return x + self.layer(x) if use else x


def used(rank: int, index: int) -> list[bool]:
    return [(rank + index + place) % 3 > 0 for place in range(3)]


def test_some_ranks_alone_use_what_the_forward_of_a_unit_delays() -> None:
    some_ranks_alone("zero3", "forward")


@pytest.mark.parametrize("who", ["modules", "queue"])
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"])
@pytest.mark.sampled(2)
def test_some_ranks_alone_use_what_delays(kind: str, who: str) -> None:
    some_ranks_alone(kind, who)


def some_ranks_alone(kind: str, who: str) -> None:
    """Different ranks in every microbatch. A rank computes its delayed gradients one microbatch later."""

    def plain(twin: nn.Module, rank: int) -> None:
        for index, batch in enumerate(batches_of(rank, 4)):
            mean_loss(twin(batch, used(rank, index))).backward()

    def delaying(model: Any, rank: int) -> None:
        queue = WgradQueue()
        for block in model.blocks if who == "forward" else ():
            block.queue = queue
        for index, batch in enumerate(batches_of(rank, 4)):
            with model.no_sync() if index < 3 else nullcontext():
                with delayed_wgrad(queue) if who == "queue" else nullcontext():
                    loss = mean_loss(model(batch, used(rank, index)))
                loss.backward()
            if index:
                queue.drain_oldest_microbatch()
                for block in reversed(model.blocks) if who == "modules" else ():
                    block.layer.backward_dw()
        queue.drain()
        if who == "modules":
            drain_modules(model)

    def on_each_rank() -> None:
        delays = who == "modules"
        model = Sometimes(lambda: Linear(6, 6, fuse_wgrad_accumulation=True, delay_wgrad_compute=delays)).double()
        twin = Sometimes(lambda: nn.Linear(6, 6)).double()
        twin.load_state_dict(model.state_dict())
        shard_units(model, [f"blocks.{index}" for index in range(3)], **options_of(kind))
        delaying(model, dist.get_rank())
        for rank in range(dist.get_world_size()):
            plain(twin, rank)
        size = dist.get_world_size()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad / size for name, p in twin.named_parameters()}
        assert_same_grads(model, grads)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # nothing is missing

    simulate(on_each_rank, ranks_of(kind))


# ---- What comes between the last backward and the gradients that it has delayed. ----


def test_24_a_queue_that_is_drained_leaves_the_units_name_until_the_step() -> None:
    """Nothing is pending on any rank, and another rank may have drained its queue behind the forward."""

    def on_each_rank() -> None:
        model, _ = two_models("zero3")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = batches_of(dist.get_rank(), 2)
        backward_and_drain(model, first, WgradQueue())
        refusal = r"^a forward after the iteration's last backward, in which weight gradients of the outermost unit"
        with pytest.raises(RuntimeError, match=refusal):
            model(second)
        optimizer.step()
        model(second)

    simulate(on_each_rank, 2)


def test_24_gradients_of_one_unit_that_were_cleared_end_no_delays() -> None:
    """Those of the others are wanted still. Where all were cleared, the forward begins a new iteration."""

    def on_each_rank() -> None:
        model: Any = Delaying()
        for module in (*model.blocks, model):
            fully_shard(module)
        first, second = batches_of(dist.get_rank(), 2)
        backward_and_drain(model, first, WgradQueue())
        for param in model.blocks[0].parameters():
            param.grad = None
        with pytest.raises(RuntimeError, match=r"^a forward after the iteration's last backward"):
            model(second)
        model.zero_grad()
        model(second)

    simulate(on_each_rank, 2)


def test_24_a_step_over_two_models_ends_the_delays_of_both() -> None:
    def on_each_rank() -> None:
        models, queue = two_models("zero3"), WgradQueue()
        optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
        first, second = batches_of(dist.get_rank(), 2)
        for model in models:
            backward_and_drain(model, first, queue)
        optimizer.step()
        for model in models:
            model(second)

    simulate(on_each_rank, 2)


class OnOneRank(nn.Module):
    """A module with delayed weight gradients, which only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "dtype": torch.float64}
        self.always = nn.Linear(5, 5, dtype=torch.float64)
        self.delayed = Linear(5, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.delayed(x) if dist.get_rank() == 0 else x


def a_gradient_of_inputs(model: Any, batch: Tensor) -> None:
    x = batch.clone().requires_grad_()
    torch.autograd.grad(mean_loss(model(x)), x)


CROSSING: dict[str, Callable[[Any, Tensor], Any]] = {
    "a backward": lambda model, batch: mean_loss(model(batch)).backward(),
    "a gradient": a_gradient_of_inputs,
    "a forward": lambda model, batch: model(batch),
    "an evaluation": lambda model, batch: torch.no_grad()(model)(batch),
    "unsharded": lambda model, batch: model.unsharded().__enter__(),
}


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("what", CROSSING)
@pytest.mark.parametrize("kind", ["zero3", "zero1"])
@pytest.mark.sampled(4)
def test_24_what_would_cross_with_delayed_gradients_is_refused_on_all_ranks(
    kind: str, what: str, finishes: bool
) -> None:
    """Also ranks without pending gradients refuse. After ``finish_grad_sync()``, or a step, no gradient is pending."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = fully_shard(OnOneRank(), **options_of(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            batches = batches_of(dist.get_rank(), 2, step=step)
            mean_loss(model(batches[0])).backward()
            if finishes:
                drain_modules(model)
                model.finish_grad_sync()
                CROSSING[what](model, batches[1])
                drain_modules(model)
                model.finish_grad_sync()
                if what == "unsharded":
                    model.reshard()
                optimizer.step()
                optimizer.zero_grad()
                continue
            with pytest.raises(
                RuntimeError, match=r"after the iteration's last backward.*call model\.finish_grad_sync"
            ):
                CROSSING[what](model, batches[1])
            drain_modules(model)
            model.finish_grad_sync()
            optimizer.zero_grad()

    simulate(on_each_rank, 2)


def test_24_a_backward_of_an_earlier_forward_is_refused_behind_the_last_one() -> None:
    """Its forward was over before the last backward, and the backward would gather."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = fully_shard(OnOneRank(), **options_of("zero3"))
        first, second = (mean_loss(model(batch)) for batch in batches_of(dist.get_rank(), 2))
        second.backward()
        refusal = r"^a backward after the iteration's last backward, in which weight gradients of .* were delayed"
        with pytest.raises(RuntimeError, match=refusal):
            first.backward()

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("kind", ["zero3", "zero1", "zero3, once"])
@pytest.mark.sampled(1)
def test_a_step_that_is_skipped_after_its_delayed_gradients_leaves_the_next_iteration_its_microbatches(
    kind: str,
) -> None:
    """``finish_grad_sync()`` is not called: it is optional once all delayed gradients are computed."""

    def on_each_rank() -> None:
        model, other = two_models(kind)
        batches = batches_of(dist.get_rank(), 4)
        queue = WgradQueue()

        def train(each: Any, mine: Sequence[Tensor]) -> None:
            for index, batch in enumerate(mine):
                with nullcontext() if index == len(mine) - 1 else each.no_sync(), delayed_wgrad(queue):
                    mean_loss(each(batch)).backward()
                queue.drain()

        train(model, batches[:1])
        model.zero_grad()
        for each in (model, other):
            train(each, batches[1:])
        for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(param.grad.to_local(), wanted.grad.to_local()), param.shard.name

    simulate(on_each_rank, ranks_of(kind))


def test_an_iteration_behind_a_delayed_one_delays_nothing() -> None:
    """So forwards between its backward and its step are as welcome as ever."""

    def on_each_rank() -> None:
        model, _ = two_models("zero3")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = batches_of(dist.get_rank(), 2)
        backward_and_drain(model, first, WgradQueue())
        optimizer.step()
        optimizer.zero_grad()
        mean_loss(model(second)).backward()
        model(first)

    simulate(on_each_rank, 2)


def test_delayed_gradients_that_were_cleared_end_no_later_iteration() -> None:
    """They are computed in the next iteration's first microbatch: ``.grad`` is complete after its last one."""

    def on_each_rank() -> list[int]:
        model, _ = two_models("zero3")
        queue, called = WgradQueue(), []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(called.append)
        first, second, third = batches_of(dist.get_rank(), 3)
        with delayed_wgrad(queue):
            mean_loss(model(first)).backward()
        model.zero_grad()
        with model.no_sync():
            backward_and_drain(model, second, queue)
        counts = [len(called)]
        backward_and_drain(model, third, queue)
        return [*counts, len(called)]

    num_params = len(list(Delaying().parameters()))
    assert simulate(on_each_rank, 2) == [[0, num_params]] * 2


def test_a_delaying_unit_that_the_iteration_has_left_out_delays_nothing() -> None:
    def on_each_rank() -> None:
        model: Any = Skips()
        model.first = Linear(5, 5, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, dtype=torch.float64)
        for module in (model.first, model.second, model):
            fully_shard(module)
        first, second = batches_of(dist.get_rank(), 2)
        mean_loss(model(first, True)).backward()
        assert model.second.weight.grad.norm() > 0
        model(second, True)

    simulate(on_each_rank, 2)
