"""A deleted model frees its memory by reference counts alone: no reference cycle waits for the garbage collector."""

import weakref
from collections.abc import Callable

import pytest
import torch
from loops import ddp_backward, loss_of, make_batches, make_model, plain_backward, wrap
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.ddp.buckets import iteration_ends
from maingrad.launch import simulate

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


class Watched:
    """Weak references to all large objects and all memory of a wrapper and its model."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.objects: dict[str, weakref.ref[object]] = {"wrapper": weakref.ref(ddp), "model": weakref.ref(ddp.module)}
        self.memory: dict[str, StorageWeakRef] = {}
        for entry in ddp.bucket_params:
            self.objects[f"parameter {entry.owned.name}"] = weakref.ref(entry.owned.param)
            self.watch_memory(f"memory of parameter {entry.owned.name}", entry.owned.param)
        for bucket in ddp.buckets:
            self.objects[bucket.name] = weakref.ref(bucket)
        self.watch_memory("memory of gradients", ddp.buckets[0].grad_data)

    def watch_memory(self, name: str, tensor: torch.Tensor) -> None:
        self.memory[name] = StorageWeakRef(tensor.untyped_storage())

    def names(self) -> list[str]:
        return [*self.objects, *self.memory]

    def alive(self) -> list[str]:
        objects = [name for name, reference in self.objects.items() if reference() is not None]
        return objects + [name for name, reference in self.memory.items() if not reference.expired()]


def nothing(ddp: DistributedDataParallel) -> None:
    """Do nothing after wrapping."""


def a_forward(ddp: DistributedDataParallel) -> None:
    loss_of(ddp, make_batches(1)[0])


def an_iteration(ddp: DistributedDataParallel) -> None:
    ddp_backward(ddp, make_batches(3))
    ddp.zero_grad_buffer()


def an_iteration_with_a_stock_optimizer(ddp: DistributedDataParallel) -> None:
    optimizer = torch.optim.AdamW(ddp.parameters())
    for step in range(2):
        ddp_backward(ddp, make_batches(3, seed=step))
        ddp.expose_grads()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        if step == 0:
            ddp.zero_grad_buffer()


def an_iteration_with_our_optimizer(ddp: DistributedDataParallel) -> None:
    optimizer = DistributedOptimizer(ddp, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for step in range(2):
        ddp_backward(ddp, make_batches(3, seed=step))
        optimizer.step()
        schedule.step()
        ddp.zero_grad_buffer()
    optimizer.load_state_dict(optimizer.state_dict())


def a_recorded_timeline(ddp: DistributedDataParallel) -> None:
    with ddp.record_timeline() as timeline:
        ddp_backward(ddp, make_batches(2))
    assert timeline.backwards
    assert timeline.buckets


def a_profiled_iteration(ddp: DistributedDataParallel) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ddp_backward(ddp, make_batches(2))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the model's own mistake")


def a_failed_backward(ddp: DistributedDataParallel) -> None:
    handle = ddp.module[1].register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises(ArithmeticError, match="own mistake"):
        loss_of(ddp, make_batches(1)[0]).backward()
    handle.remove()


def a_backward_after_the_reduction(ddp: DistributedDataParallel) -> None:
    ddp_backward(ddp, make_batches(1))
    loss_of(ddp, make_batches(1)[0]).backward()


def an_unfinished_iteration(ddp: DistributedDataParallel) -> None:
    loss_of(ddp, make_batches(1)[0]).backward()


LIVES = [
    nothing,
    a_forward,
    an_iteration,
    an_iteration_with_a_stock_optimizer,
    an_iteration_with_our_optimizer,
    a_recorded_timeline,
    a_profiled_iteration,
    a_failed_backward,
    a_backward_after_the_reduction,
    an_unfinished_iteration,
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("live", LIVES)
def test_wrapper_model_and_buffers_go_with_their_last_name(
    live: Callable[[DistributedDataParallel], None], overlap: bool
) -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=overlap, find_unused_parameters=overlap, bucket_size=64)
    watched = Watched(ddp)
    live(ddp)
    assert {"wrapper", "model", "memory of gradients"} <= set(watched.alive())
    del ddp
    assert watched.alive() == []


@pytest.mark.parametrize("sharded", [False, True])
def test_the_optimizers_memory_goes_too(sharded: bool) -> None:
    ddp = wrap(make_model(torch.bfloat16), use_distributed_optimizer=sharded)
    optimizer = DistributedOptimizer(ddp)
    ddp_backward(ddp, make_batches(2, torch.bfloat16))
    optimizer.step()
    (master,) = optimizer.param_groups[0]["params"]
    watched = Watched(ddp)
    watched.objects["optimizer"] = weakref.ref(optimizer)
    watched.watch_memory("master", master)
    for name, value in optimizer.state[master].items():
        watched.watch_memory(name, value)
    del master, value, ddp
    assert watched.alive() == watched.names(), "the optimizer keeps its model"
    del optimizer
    assert watched.alive() == []


def test_after_a_step_on_several_ranks() -> None:
    def on_each_rank() -> list[str]:
        ddp = wrap(make_model(), overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=64)
        watched = Watched(ddp)
        an_iteration_with_our_optimizer(ddp)
        del ddp
        return watched.alive()

    assert simulate(on_each_rank, 2) == [[], []]


@pytest.mark.parametrize("live", LIVES)
def test_deleting_only_the_wrapper_frees_the_buckets_and_gives_plain_parameters_back(
    live: Callable[[DistributedDataParallel], None],
) -> None:
    model = make_model(fuse=False)
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=64)
    watched = Watched(ddp)
    live(ddp)
    del ddp
    assert not {
        "wrapper",
        "memory of gradients",
        *(name for name in watched.names() if name.startswith("bucket")),
    } & set(watched.alive())
    for parameter in model.parameters():
        assert not parameter.__dict__
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.grad is None
    plain_backward(model, make_batches(2))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(parameter.grad.any() for parameter in model.parameters())


class DelaysElsewhere(nn.Linear):
    """A foreign module that delays its weight gradient keeps what providers register with it."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.weight.skip_backward_post_hook = True
        self.registered: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, fn: Callable[[], None]) -> None:
        self.registered.append(fn)


def test_a_foreign_module_that_calls_back_keeps_no_buckets() -> None:
    model = DelaysElsewhere()
    ddp = wrap(model)
    watched = Watched(ddp)
    del ddp
    assert len(model.registered) == 1
    assert not {"wrapper", "memory of gradients"} & set(watched.alive())
    model.registered[0]()


def test_a_graph_that_outlives_its_wrapper_delivers_to_plain_grad() -> None:
    model = make_model(fuse=False)
    ddp = wrap(model, overlap_grad_reduce=True)
    loss = loss_of(ddp, make_batches(1)[0])
    del ddp
    loss.backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_nothing_is_kept_of_the_backwards_of_models_that_are_gone() -> None:
    before = len(iteration_ends._trained)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert len(iteration_ends._trained) == before + 1
    del ddp
    assert len(iteration_ends._trained) == before
