"""A queue that several threads drain, and entries whose module is gone."""

import gc
import pickle
import threading

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad
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
def test_a_module_that_is_gone_is_named_once_and_blocks_nobody(verb: str) -> None:
    gone, layer, queue = Linear(8, 8, name="gone"), Linear(8, 8), WgradQueue()
    queue.log = []
    for module in (gone, layer):
        with queue.microbatch(0), delayed_wgrad(queue):
            y = module(torch.ones(2, 8))
        with queue.microbatch(0):
            y.sum().backward()
    del gone, module, y
    gc.collect()
    with pytest.raises(RuntimeError, match="gone: the weight was freed"):
        getattr(queue, verb)(*([layer] if verb == "drain_module" else []))
    assert not len(queue) and len(queue.log) == 1
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))
    queue.check_empty()


def test_a_module_with_a_queue_of_its_own_can_be_pickled() -> None:
    layer = pickle.loads(pickle.dumps(Linear(8, 8, delay_wgrad_compute=True)))
    layer(torch.ones(2, 8)).sum().backward()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))
