"""A fully sharded model that is let go frees its memory by reference count alone: no cycle waits for the collector."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_twin import Net, batches_of, mean_loss, one_backward, options_of, ranks_of, shard_blocks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


class Watched:
    """Weak references to everything large that a sharded model owns: objects, and memory itself."""

    def __init__(self, model: FSDPModule) -> None:
        self.objects: dict[str, weakref.ref[Any]] = {"model": weakref.ref(model)}
        self.memory: dict[str, StorageWeakRef] = {}
        for unit in model.units:
            self.objects[unit.label] = weakref.ref(unit)
            self.objects[f"root of {unit.label}"] = weakref.ref(unit.root)
            for bucket in unit.buckets:
                self.objects[f"bucket of {unit.label}"] = weakref.ref(bucket)
                self.watch_memory(f"shards of {unit.label}", bucket.shard)
                self.watch_memory(f"whole parameters of {unit.label}", bucket.whole_params.data)
                if bucket.trainable:
                    self.watch_memory(f"whole gradients of {unit.label}", bucket.whole_grads.data)
            for pair in unit.pairs:
                self.objects[f"shard of {pair.sharded.shard.name}"] = weakref.ref(pair.sharded)
                self.objects[f"whole {pair.sharded.shard.name}"] = weakref.ref(pair.whole)
                if pair.sharded.grad is not None:
                    self.watch_memory(f"gradient of {pair.sharded.shard.name}", pair.sharded.grad)

    def watch_memory(self, name: str, tensor: Tensor) -> None:
        self.memory[name] = StorageWeakRef(tensor.untyped_storage())

    def alive(self) -> list[str]:
        objects = [name for name, reference in self.objects.items() if reference() is not None]
        return objects + [name for name, reference in self.memory.items() if not reference.expired()]


def nothing(model: Any) -> None:
    """Only a gather, without a training step."""


def a_forward(model: Any) -> None:
    mean_loss(model(batches_of(0, 1)[0]))


def an_evaluation(model: Any) -> None:
    with torch.inference_mode():
        model(batches_of(0, 1)[0])


def an_iteration(model: Any) -> None:
    one_backward(model, batches_of(0, 2))


def steps(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        one_backward(model, batches_of(0, 2, step=step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def steps_without_zero_grad(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_backward(model, batches_of(0, 2))
    optimizer.step()


def an_unfinished_iteration(model: Any) -> None:
    with model.no_sync():
        mean_loss(model(batches_of(0, 1)[0])).backward()


def a_recorded_timeline(model: Any) -> None:
    with model.record_timeline() as timeline:
        one_backward(model, batches_of(0, 2))
    assert timeline.backwards


def whole_parameters(model: Any) -> None:
    with model.unsharded(writeback=True), torch.no_grad():
        model.head.weight.add_(1.0)


def a_state_dict(model: Any) -> None:
    model.load_state_dict(model.state_dict())


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("the model's own mistake")


def a_failed_backward(model: Any) -> None:
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises(ArithmeticError, match="own mistake"):
        mean_loss(model(batches_of(0, 1)[0])).backward()
    handle.remove()


def a_failed_forward(model: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3, dtype=torch.float64))


def a_profiled_iteration(model: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        one_backward(model, batches_of(0, 2))


LIVES = [
    nothing,
    a_forward,
    an_evaluation,
    an_iteration,
    steps,
    steps_without_zero_grad,
    an_unfinished_iteration,
    a_recorded_timeline,
    whole_parameters,
    a_state_dict,
    a_failed_backward,
    a_failed_forward,
]


def make_sharded(kind: str) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    shard_blocks(model, **options_of(kind))
    return model


@pytest.mark.parametrize("live", LIVES)
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1", "zero3, once"])
@pytest.mark.sampled(3)
def test_everything_goes_with_the_last_name(kind: str, live: Callable[[Any], None]) -> None:
    def on_each_rank() -> list[str]:
        model = make_sharded(kind)
        live(model)
        watched = Watched(model)
        assert "model" in watched.alive()
        dist.barrier()  # a collective that another rank has not joined has its memory
        del model
        return watched.alive()

    for left in simulate(on_each_rank, ranks_of(kind)):
        assert left == []


def test_a_profiler_keeps_nothing() -> None:
    model = make_sharded("alone")
    a_profiled_iteration(model)
    watched = Watched(model)
    del model
    assert watched.alive() == []


@pytest.mark.parametrize("kind", ["zero3", "zero1"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.sampled(3)
def test_a_model_and_its_optimizer_in_either_order(kind: str, first: str) -> None:
    def on_each_rank() -> None:
        model = make_sharded(kind)
        optimizer = torch.optim.AdamW(model.parameters())
        one_backward(model, batches_of(0, 2))
        optimizer.step()
        watched = Watched(model)
        if first == "model":
            del model
            left = {name for name in watched.alive() if not name.startswith(("shard", "gradient"))}
            assert left == set(), "the optimizer keeps shards and their gradients, no more"
            optimizer.zero_grad()
            optimizer.step()
            del optimizer
        else:
            del optimizer
            del model
        assert watched.alive() == []

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["zero3", "zero1"])
def test_a_graph_keeps_parameters_and_no_model(kind: str) -> None:
    def on_each_rank() -> None:
        model = make_sharded(kind)
        loss = mean_loss(model(batches_of(0, 1)[0]))
        watched = Watched(model)
        dist.barrier()
        del model
        assert not {"model", "root of the outermost unit"} & set(watched.alive())
        with pytest.raises(RuntimeError, match=r"backward of the outermost unit, whose model is gone: keep the model"):
            loss.backward()
        del loss
        assert watched.alive() == []

    simulate(on_each_rank, ranks_of(kind))


@pytest.mark.parametrize("kind", ["zero3", "zero1"])
@pytest.mark.parametrize("goes_back", [True, False])
def test_inputs_that_live_on_keep_nothing(kind: str, goes_back: bool) -> None:
    """A program may keep what it has computed the inputs from, or use them again."""

    def on_each_rank() -> None:
        model = make_sharded(kind)
        x = batches_of(0, 1)[0].requires_grad_() * 1.0
        view = x[:2]
        for _ in range(2):
            loss = mean_loss(model(x)) + mean_loss(model(view))
            if goes_back:
                loss.backward(retain_graph=True)
        watched = Watched(model)
        dist.barrier()
        del model, loss
        assert watched.alive() == []

    simulate(on_each_rank, ranks_of(kind))


def test_outputs_of_an_evaluation_keep_nothing() -> None:
    def on_each_rank() -> None:
        model = make_sharded("zero3")
        kept = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                kept.append(model(batches_of(0, 1)[0]))
        model.requires_grad_(False)
        kept.append(model(batches_of(0, 1)[0]))
        watched = Watched(model)
        dist.barrier()
        del model
        assert watched.alive() == [] and all(each.isfinite().all() for each in kept)

    simulate(on_each_rank, 3)


def test_between_forward_and_backward_with_delayed_weight_gradients() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(Linear(5, 8), nn.Tanh(), Linear(8, 3)).double()
        shard_blocks(model[0])
        shard_blocks(model[2])
        shard_blocks(model)
        queue = WgradQueue()
        x = batches_of(0, 1)[0].requires_grad_()
        with delayed_wgrad(queue):
            loss = mean_loss(model(x))
        loss.backward()
        assert len(queue) == 2
        watched = Watched(model)
        del model, loss
        queue.clear()
        assert watched.alive() == []

    simulate(on_each_rank, 2)


def test_what_it_was_made_of_is_free_while_it_lives() -> None:
    """The parameters of before sharding have no memory, even if references to them exist."""
    model = Net()
    before = list(model.parameters())
    memory = [StorageWeakRef(param.untyped_storage()) for param in before]
    shard_blocks(model)
    assert all(reference.expired() for reference in memory)
    assert [param.numel() for param in before] == [0] * len(before)


def test_a_unit_that_was_a_model_of_its_own_lets_go_of_what_it_had_as_one() -> None:
    def on_each_rank() -> None:
        inside: Any = fully_shard(nn.Linear(5, 5).double())
        mean_loss(inside(batches_of(0, 1)[0])).backward()
        inside.zero_grad()
        root = weakref.ref(root_of(inside))
        model: Any = fully_shard(nn.Sequential(inside, nn.Linear(5, 5).double()))
        mean_loss(model(batches_of(0, 1)[0])).backward()
        assert root() is None
        assert [unit.root for unit in model.units] == [root_of(inside)] * 2

    simulate(on_each_rank, 2)
