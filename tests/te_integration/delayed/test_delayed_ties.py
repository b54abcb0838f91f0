"""A weight with two owners that both delay; one of them fuses. The last owner hands the sum to the provider."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import GroupedLinear, Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules

FEATURES = 6


class Tied(nn.Module):
    """``last`` has the weight of ``first``, which is one of two experts' where ``grouped``."""

    def __init__(self, *, grouped: bool, fused: tuple[bool, bool], own_queues: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = [{"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": own_queues} for fuse in fused]
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.first: Any
        if grouped:
            self.first = GroupedLinear(2, FEATURES, FEATURES, bias=False, **options[0])
        else:
            self.first = Linear(FEATURES, FEATURES, bias=False, **options[0])
        self.last = Linear(FEATURES, FEATURES, bias=False, **options[1])
        self.last.weight = self.first.weight0 if grouped else self.first.weight
        self.last.mark_delayed_weights()

    def forward(self, x: Tensor) -> Tensor:
        splits = (torch.tensor([2, x.shape[0] - 2]),) if isinstance(self.first, GroupedLinear) else ()
        return self.last(self.middle(self.first(x, *splits).tanh()).tanh())


def batch(index: int, rank: int) -> Tensor:
    return torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(10 * index + rank))


def expected(make: Callable[[], Tied], num_microbatches: int, size: int) -> dict[str, Tensor]:
    """The mean over ranks of the gradients that autograd sums."""
    model = make()
    for module in (model.first, model.last):
        module.fuse_wgrad_accumulation, module.wgrad_queue = False, None
    for rank in range(size):
        for index in range(num_microbatches):
            model(batch(index, rank)).square().sum().backward()
    return {name: param.grad / size for name, param in model.named_parameters()}


def gradients_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        if hasattr(param, "shard"):
            whole = torch.zeros(param.shard.shape)
            whole.view(-1)[param.shard.start : param.shard.end] = param.grad.to_local().view(-1)
            dist.all_reduce(whole)
            yield name, whole
        else:
            yield name.removeprefix("module."), param.main_grad


DRAINS: dict[str, tuple[bool, Callable[[Tied, WgradQueue], None]]] = {
    # whether modules have queues of their own, and how these are emptied
    "last layer first": (True, lambda model, queue: (model.last.backward_dw(), model.first.backward_dw())),
    "first layer first": (True, lambda model, queue: (model.first.backward_dw(), model.last.backward_dw())),
    "by the model": (True, lambda model, queue: drain_modules(model)),
    "one queue": (False, lambda model, queue: queue.drain()),
    "one queue, last module first": (
        False,
        lambda model, queue: (queue.drain_module(model.last), queue.drain_module(model.first)),
    ),
    "one queue, by microbatch": (False, lambda model, queue: queue.drain_microbatch(queue.pending_microbatches[0])),
}


def train(kind: str, grouped: bool, fused: tuple[bool, bool], drain: str, lag: bool, num_microbatches: int) -> None:
    own_queues, empty = DRAINS[drain]
    queue = WgradQueue()

    def make() -> Tied:
        return Tied(grouped=grouped, fused=fused, own_queues=own_queues)

    plain = make()
    if kind == "ddp":
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
        model: Any = DistributedDataParallel(plain, config)
    else:
        model = fully_shard(plain)
    for _ in range(2):
        for index in range(num_microbatches):
            with model.no_sync() if index + 1 < num_microbatches else nullcontext():
                with nullcontext() if own_queues else delayed_wgrad(queue):
                    loss = model(batch(index, dist.get_rank())).square().sum()
                loss.backward()
                if not lag:
                    empty(plain, queue)
        for _ in range(num_microbatches if lag else 0):
            empty(plain, queue)
        model.finish_grad_sync()
        wanted = expected(make, num_microbatches, dist.get_world_size())
        found = dict(gradients_of(model))
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
        if kind == "ddp":
            model.zero_grad_buffer()
        else:
            for param in model.parameters():
                param.grad = None


@pytest.mark.parametrize("drain", DRAINS)
@pytest.mark.parametrize("fused", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "expert"])
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
@pytest.mark.sampled(2)
def test_all_of_a_tied_weights_gradient_arrives(kind: str, grouped: bool, fused: tuple[bool, bool], drain: str) -> None:
    for lag, num_microbatches in ((False, 1), (False, 2), (True, 2)):
        simulate(train, 2, kind, grouped, fused, drain, lag, num_microbatches)


def test_a_sum_that_waits_is_given_up_with_its_iteration() -> None:
    """One owner has added to .grad, the other's gradient is abandoned: the next iteration contains neither."""
    model = Tied(grouped=False, fused=(True, False), own_queues=True)
    ddp = DistributedDataParallel(model)
    ddp(batch(0, 0)).square().sum().backward()
    model.last.backward_dw()
    model.first.wgrad_queue.clear()
    ddp.zero_grad_buffer()
    fresh = DistributedDataParallel(copy.deepcopy(Tied(grouped=False, fused=(True, False), own_queues=True)))
    for wrapper in (ddp, fresh):
        wrapper(batch(1, 0)).square().sum().backward()
        wrapper.module.first.backward_dw()
        wrapper.module.last.backward_dw()
        wrapper.finish_grad_sync()
    for (_, ours), (_, theirs) in zip(gradients_of(ddp), gradients_of(fresh), strict=True):
        assert torch.equal(ours, theirs)


def test_the_sum_of_each_microbatch_is_handed_over_with_it() -> None:
    """What unfused owners add is in the weight's dtype; sums over microbatches are in fp32."""
    layer, queue = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), WgradQueue()
    layer.__class__ = Linear  # gradients are delayed, and not fused
    ddp = DistributedDataParallel(layer)
    for value in (256.0, 1.0, -256.0):
        with ddp.no_sync(), delayed_wgrad(queue):
            ddp(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    queue.drain()
    ddp.finish_grad_sync()
    assert layer.weight.main_grad.item() == 1.0
