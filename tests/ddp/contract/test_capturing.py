"""Weight gradients of captured backwards: what replays leave in ``main_grad`` is what eager backwards do."""

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract.capturing import (
    BackwardCapture,
    Delivery,
    FirstWrites,
    noting,
    open_deliveries,
    settle_kept,
)
from maingrad.te_integration import Linear, WgradQueue, make_graphed_callables


class Twice(nn.Module):
    """One product, run twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(4, 4, bias=False, fuse_wgrad_accumulation=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_a_weight_is_overwritten_once_where_a_layer_runs_it_twice() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layer = Twice()
        ddp = DistributedDataParallel(layer)
        run = make_graphed_callables([layer], [(x,)], order=[1, -1])[0] if graphed else layer
        for _ in range(2):
            run(x).square().sum().backward()
            ddp.finish_grad_sync()
            found.append(layer.layer.weight.main_grad.clone())
            ddp.zero_grad_buffer()
    assert all(torch.equal(found[0], each) for each in found)


def fused_layer() -> tuple[Linear, DistributedDataParallel]:
    layer = Linear(2, 2, bias=False, fuse_wgrad_accumulation=True)
    return layer, DistributedDataParallel(layer)


def captured(weight: Tensor, *, in_order: bool) -> Delivery:
    delivery = Delivery("layer", [weight], fused=True, queue=None, compute=lambda overwrites: [None])
    delivery.compute(FirstWrites(in_order=in_order))
    assert delivery.overwrites == (in_order,)
    assert not delivery.delayed
    return delivery


@pytest.mark.parametrize("in_order", [False, True])
def test_a_replays_first_write_begins_with_nothing_and_others_add(in_order: bool) -> None:
    """Whatever the capture has found: what its beta does wrong is mended around the replay."""
    layer, ddp = fused_layer()
    delivery, main_grad = captured(layer.weight, in_order=in_order), layer.weight.main_grad
    main_grad.fill_(7)  # of the last iteration
    ddp.records[0].reset()
    for expected in (1, 2):
        kept = open_deliveries([delivery], 1)
        main_grad.copy_(torch.ones(2, 2) + (0 if in_order else main_grad))  # the replay
        settle_kept(kept)
        assert main_grad.tolist() == [[expected] * 2] * 2


def test_main_grad_that_has_moved_since_the_capture_is_refused() -> None:
    layer, ddp = fused_layer()
    delivery = captured(layer.weight, in_order=True)
    ddp.unwrap()
    again = DistributedDataParallel(layer)
    with pytest.raises(RuntimeError, match="layer: main_grad of a weight has moved since its backward was captured"):
        delivery.open(1)
    assert ddp.records[0].view.data_ptr() != again.records[0].view.data_ptr()


def test_delayed_gradients_of_a_replay_are_added_when_the_queue_is_drained() -> None:
    weight, queue, replays = nn.Parameter(torch.zeros(2)), WgradQueue(), []
    computed = torch.ones(2)

    def compute(overwrites: Sequence[bool]) -> list[Tensor | None]:
        assert list(overwrites) == [False, False]
        return [computed, None]

    frozen = nn.Parameter(torch.zeros(2))
    delivery = Delivery("layer", [weight, frozen], fused=False, queue=weakref.ref(queue), compute=compute)
    capture = BackwardCapture(FirstWrites(in_order=True), [weight, frozen])
    capture.note(delivery)
    assert delivery.delayed
    assert delivery.gradients == ()
    delivery.compute(FirstWrites(in_order=True))
    assert delivery.open(1) == []
    assert delivery.hand_over() == [None, None]
    for _ in range(2):
        delivery.put(lambda: replays.append(len(queue)), (torch.ones(1),), 1)
    assert weight.grad is None
    queue.drain()
    assert len(replays) == 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]
    assert computed.tolist() == [1, 1]
    assert frozen.grad is None
    with pytest.raises(ValueError, match="layer is used by a captured layer that does not register it"):
        BackwardCapture(FirstWrites(in_order=True), [weight]).note(delivery)
    with (
        noting(capture),
        pytest.raises(RuntimeError, match="another layer is being captured in this process"),
        noting(capture),
    ):
        pass
