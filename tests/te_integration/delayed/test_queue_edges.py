"""A queue that several threads drain, and entries whose module is gone."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel
from maingrad.fsdp import fully_shard
from maingrad.te_integration import Float8CurrentScaling, Linear, WgradQueue, autocast, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules

WIDTH = 256  # so wide that a product lets other threads run


def backward_of(layers: nn.Module, queue: WgradQueue, microbatches: int) -> None:
    for microbatch in range(microbatches):
        torch.manual_seed(microbatch)
        with delayed_wgrad(queue):
            y = layers(torch.randn(WIDTH, WIDTH))
        y.square().mean().backward()


def make_layers(**options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Linear(WIDTH, WIDTH, bias=False, **options) for _ in range(6)))


@pytest.mark.parametrize("verb", ["drain", "drain_oldest_microbatch", "drain_module", "drain_modules"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.sampled(3)
def test_threads_that_drain_together_compute_each_gradient_once(verb: str, fused: bool) -> None:
    options = {"delay_wgrad_compute": verb == "drain_modules", "fuse_wgrad_accumulation": fused}
    grads = []
    for num_threads in (1, 4):
        layers, queue = make_layers(**options), WgradQueue()
        wrapper = DistributedDataParallel(layers) if fused else None
        backward_of(layers, queue, 3)
        ready, failed = threading.Barrier(num_threads), []

        def work() -> None:
            ready.wait()  # noqa: B023
            try:
                for _ in range(3):
                    if verb == "drain_modules":
                        drain_modules(layers)  # noqa: B023
                    else:
                        getattr(queue, verb)(*([layers] if verb == "drain_module" else []))  # noqa: B023
            except BaseException as error:
                failed.append(error)  # noqa: B023

        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and not len(queue)
        grads.append([(p.main_grad if wrapper else p.grad).clone() for p in layers.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("verb", ["drain", "drain_oldest_microbatch", "drain_module"])
@pytest.mark.sampled(1)
def test_a_module_that_is_gone_is_named_once_and_blocks_nobody(verb: str) -> None:
    gone, gone_too, layer, queue = Linear(8, 8, name="gone"), Linear(8, 8), Linear(8, 8), WgradQueue()
    queue.log = []
    for module in (gone, gone_too, layer):
        with queue.microbatch(0), delayed_wgrad(queue):
            y = module(torch.ones(2, 8))
        with queue.microbatch(0):
            y.sum().backward()
    del gone, gone_too, module, y
    gc.collect()
    with pytest.raises(RuntimeError, match="gone, weight: the weight was freed"):
        getattr(queue, verb)(*([layer] if verb == "drain_module" else []))
    assert not len(queue) and len(queue.log) == 1
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))
    queue.check_empty()


def test_a_module_with_a_queue_of_its_own_can_be_pickled() -> None:
    layer = pickle.loads(pickle.dumps(Linear(8, 8, delay_wgrad_compute=True)))
    layer(torch.ones(2, 8)).sum().backward()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda queue: pickle.loads(pickle.dumps(queue))])
def test_a_copy_of_a_queue_fills_waits_too_and_holds_nothing(copied: Callable[[WgradQueue], WgradQueue]) -> None:
    for fill_waits in (False, True):
        layer, queue = Linear(8, 8), WgradQueue(fill_waits=fill_waits)
        pending_in(queue, layer)
        other = copied(queue)
        assert other is not queue and other.fill_waits is fill_waits and (len(queue), len(other)) == (1, 0)
        pending_in(other, layer)
        assert other.pending_microbatches == [0]
        queue.drain()
        other.drain()
        assert torch.equal(layer.weight.grad, torch.full((8, 8), 4.0))


def test_what_others_call_a_queue_is_left_alone() -> None:
    """Modules of other libraries may have an attribute of this name."""
    layer, other = Linear(8, 8, delay_wgrad_compute=True), nn.Identity()
    other.wgrad_queue = [nn.Identity()]  # type: ignore[assignment]  # of theirs
    layer(torch.ones(2, 8)).sum().backward()
    drain_modules(nn.Sequential(other, layer))
    assert not layer.need_backward_dw() and layer.weight.grad.eq(2).all() and len(other.wgrad_queue) == 1


def test_entries_may_be_computed_while_a_program_goes_through_them() -> None:
    layer, queue = Linear(8, 8), WgradQueue()
    for _ in range(3):
        pending_in(queue, layer)
    assert queue.pending_owners == [layer.describe()], "named once"
    for entry in queue:
        queue.run(entry)
    assert not queue and torch.equal(layer.weight.grad, torch.full((8, 8), 6.0))


def test_a_gradient_whose_computation_failed_stays_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, queue = Linear(8, 8), WgradQueue()
    pending_in(queue, layer)
    with monkeypatch.context() as patch:
        patch.setattr(layer.wgrad_product, "multiply", lambda *_: 1 / 0)  # as where memory is short
        with pytest.raises(ZeroDivisionError):
            queue.drain()
    with pytest.raises(RuntimeError, match="1 delayed weight gradients were never computed"):
        queue.check_empty()
    queue.drain()
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))


def pending_in(queue: WgradQueue, layer: nn.Module) -> None:
    with delayed_wgrad(queue):
        y = layer(torch.ones(2, 8))
    y.sum().backward()


@pytest.mark.parametrize("own", [True, False])
def test_a_step_over_what_is_pending_is_refused(own: bool) -> None:
    layer, other, queue = Linear(8, 8, name="layer", delay_wgrad_compute=own), nn.Linear(8, 8), WgradQueue()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pending_in(queue, layer)
    with pytest.raises(
        RuntimeError, match=r"SGD.step\(\) while a delayed weight gradient of layer is pending: .* drain its WgradQueue"
    ):
        optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # nothing is pending of these
    before = layer.weight.detach().clone()
    layer.backward_dw() if own else queue.drain()
    optimizer.step()
    assert torch.allclose(before - layer.weight, torch.full((8, 8), 0.2))
    optimizer.zero_grad()
    pending_in(queue, layer)
    (layer.wgrad_queue if own else queue).clear()
    optimizer.step()


def test_a_module_with_a_queue_of_its_own_keeps_it_in_a_block() -> None:
    own, other, queue = Linear(8, 8, delay_wgrad_compute=True), Linear(8, 8), WgradQueue()
    for count in (1, 2):
        pending_in(queue, nn.Sequential(own, other))
        assert (len(own.wgrad_queue), len(queue)) == (count, count)
    assert queue.pending_microbatches == [0, 1] and set(queue.pending_owners) == {other.describe()}
    queue.drain()
    own.wgrad_queue.drain()


def test_a_queue_that_nobody_keeps_is_gone_and_what_it_lacked_is_said() -> None:
    layer, queue = Linear(8, 8, name="layer"), WgradQueue()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pending_in(queue, layer)
    gone = weakref.ref(queue)
    del queue
    assert gone() is None, "no module keeps it"
    with pytest.raises(
        RuntimeError, match=r"weight gradient of layer is pending: .* a queue that is let go before has"
    ):
        optimizer.step()
    optimizer.zero_grad()
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_a_queue_keeps_nothing_of_the_layers_before() -> None:
    before, layer, queue = nn.Linear(8, 8), Linear(8, 8), WgradQueue()
    pending_in(queue, nn.Sequential(before, layer))
    alive = weakref.ref(before.weight)
    del before
    assert alive() is None
    queue.drain()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("quantised", [False, True])
def test_uses_in_two_recomputed_blocks_are_one_microbatch(quantised: bool) -> None:
    """Each block of a reentrant checkpoint runs a backward of its own, inside the one that the program has called."""
    layer = Linear(32, 32, bias=False, dtype=torch.bfloat16, delay_wgrad_compute=True)

    def run(x: Tensor) -> Tensor:
        with autocast(enabled=quantised, recipe=Float8CurrentScaling()):
            return layer(x)  # type: ignore[no-any-return]

    x = torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)
    (checkpoint(run, x, use_reentrant=True) + checkpoint(run, x, use_reentrant=True)).sum().backward()
    layer.backward_dw()
    assert not layer.need_backward_dw()
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 8.0))


def test_a_backward_whose_queue_is_gone_is_refused() -> None:
    layer, queue = Linear(8, 8, name="layer"), WgradQueue()
    with delayed_wgrad(queue):
        y = layer(torch.ones(2, 8))
    del queue
    with pytest.raises(RuntimeError, match="layer: the WgradQueue that this forward delayed into was let go"):
        y.sum().backward()
    layer(torch.ones(2, 8)).sum().backward()  # undelayed, by a use of its own
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))


def test_a_wrapper_names_a_queue_that_was_let_go_and_the_iteration_can_be_given_up() -> None:
    layer, queue = Linear(8, 8, name="layer", fuse_wgrad_accumulation=True), WgradQueue()
    wrapper = DistributedDataParallel(layer)
    pending_in(queue, wrapper)
    del queue
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) while .* 1 of layer; .*zero_grad\(\) gives the iter"):
        wrapper.finish_grad_sync()
    wrapper.zero_grad_buffer()
    wrapper(torch.ones(2, 8)).sum().backward()
    wrapper.finish_grad_sync()
    assert torch.equal(layer.weight.main_grad, torch.full((8, 8), 2.0))


def test_a_microbatch_inside_another_ends_with_its_block() -> None:
    layer, queue = Linear(8, 8), WgradQueue()
    with queue.microbatch(5):
        pending_in(queue, layer)
        with queue.microbatch(7):
            pending_in(queue, layer)
        pending_in(queue, layer)
        with pytest.raises(ArithmeticError), queue.microbatch(9):
            raise ArithmeticError
        pending_in(queue, layer)
    assert [entry.pending.microbatch for entry in queue] == [5, 7, 5, 5]
    assert queue.pending_microbatches == [5, 7]
    pending_in(queue, layer)
    assert [entry.pending.microbatch for entry in queue][-1] == 6, "numbered again after the last block's"
    queue.drain_microbatch(5)
    assert queue.pending_microbatches == [7, 6]
    queue.drain_oldest_microbatch()
    assert queue.pending_microbatches == [6], "the oldest is what was queued first"
    queue.clear()


@pytest.mark.parametrize("placements", ["zero2", "zero3"])
def test_the_module_of_a_unit_is_drained_alone(placements: str) -> None:
    """Behind a backward it registers shards, and the queue knows the whole parameters."""
    layers = nn.Sequential(*(Linear(8, 8, bias=False) for _ in range(2)))
    for layer in layers:
        fully_shard(layer, WORLD_OF_ONE, placements=placements)
    model, queue = fully_shard(layers, WORLD_OF_ONE, placements=placements), WgradQueue()
    pending_in(queue, model)
    assert len(queue) == 2
    queue.drain_module(layers[0])
    (left,) = queue.pending_owners
    assert len(queue) == 1, left
    queue.drain_module(layers[1])
    assert len(queue) == 0
    assert all(param.grad.to_local().any() for param in model.parameters())
