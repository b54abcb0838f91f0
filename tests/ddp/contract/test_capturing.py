"""Weight gradients of captured backwards: what replays leave in ``main_grad`` is what eager backwards do."""

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.collectives import streams
from maingrad.ddp.contract import torch_wrappers
from maingrad.ddp.contract.capturing import (
    BackwardCapture,
    CapturedTarget,
    Delivery,
    FirstWrites,
    noting,
    open_deliveries,
    settle_kept,
)
from maingrad.ddp.contract.delayed import DelayedTarget
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.ddp.contract.main_grad import Demand, WgradTarget
from maingrad.ddp.contract.target import AutogradTarget, choose_target
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


def captured_of(weights: Sequence[Tensor], *, in_order: bool = True) -> Delivery:
    delivery = Delivery("layer", weights, fused=True, queue=None, compute=lambda overwrites: [None] * len(weights))
    delivery.compute(FirstWrites(in_order=in_order))
    return delivery


def captured(weight: Tensor, *, in_order: bool) -> Delivery:
    delivery = captured_of([weight], in_order=in_order)
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
    for value, expected in ((1, 1), (5, 6)):
        kept = open_deliveries([delivery], 1)
        main_grad.copy_(torch.full((2, 2), value) + (0 if in_order else main_grad))  # the replay
        settle_kept(kept)
        assert main_grad.tolist() == [[expected] * 2] * 2


def test_all_products_of_a_graph_are_opened() -> None:
    model = nn.Sequential(*(Linear(2, 2, bias=False, fuse_wgrad_accumulation=True) for _ in range(2)))
    ddp = DistributedDataParallel(model)
    deliveries = [captured(layer.weight, in_order=False) for layer in model]
    for layer in model:
        layer.weight.main_grad.fill_(7)
    for record in ddp.records:
        record.reset()
    assert open_deliveries(deliveries, 1) == []
    assert not any(layer.weight.main_grad.any() for layer in model), "each is added to zeros"


def test_a_capture_lets_go_of_operands_and_overwrites_no_grad() -> None:
    layer, _ = fused_layer()
    operand = torch.ones(2)
    compute = partial(lambda operand, overwrites: [None], operand)
    delivery = Delivery("layer", [layer.weight], fused=False, queue=None, compute=compute)
    first_writes = FirstWrites(in_order=True)
    delivery.compute(first_writes)
    assert delivery.overwrites == (False,), "a gradient for .grad writes no main_grad"
    assert first_writes.take(layer.weight)
    gone = weakref.ref(operand)
    del operand, compute
    assert gone() is None


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
        entry = delivery.put(lambda: replays.append(len(queue)), (torch.ones(1),), 1)
        assert entry.serves(weight)
        assert not entry.serves(torch.zeros(2))
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


def test_a_capture_that_failed_is_over() -> None:
    capture = BackwardCapture(FirstWrites(in_order=True), [])
    with pytest.raises(KeyError), noting(capture):
        raise KeyError
    with noting(capture):
        pass


def test_what_another_thread_captures_is_not_ours() -> None:
    """Ranks may be threads."""
    with ThreadPoolExecutor(1) as executor, streams.capturing():
        assert streams.is_capturing()
        assert not executor.submit(streams.is_capturing).result()
        assert executor.submit(streams.capture_number).result() == 0
    assert not streams.is_capturing()


def test_each_capture_has_a_number_of_its_own() -> None:
    """Also one inside another, which goes on behind it, and behind one that raised."""
    numbers = {0}

    def capture_and_raise() -> None:
        with streams.capturing():
            numbers.add(streams.capture_number())
            raise KeyError

    with streams.capturing():
        numbers.add(first := streams.capture_number())
        with pytest.raises(KeyError):
            capture_and_raise()
        assert streams.capture_number() == first
    assert streams.capture_number() == 0
    with streams.capturing():
        assert len(numbers | {streams.capture_number()}) == 4


def test_a_weight_of_which_others_have_a_part_is_never_overwritten() -> None:
    """A module of others may have written it before."""
    layer = nn.Linear(2, 2, bias=False)
    ddp = DistributedDataParallel(layer)
    assert not ddp.records[0].first_write_overwrites
    delivery = Delivery("layer", [layer.weight], fused=True, queue=None, compute=lambda overwrites: [None])
    delivery.compute(FirstWrites(in_order=True))
    assert delivery.overwrites == (False,)


def test_delayed_gradients_of_a_replay_go_into_main_grad_of_a_wrapped_weight() -> None:
    layer, queue = nn.Linear(2, 2, bias=False), WgradQueue()
    ddp = DistributedDataParallel(layer)
    delivery = Delivery(
        "layer", [layer.weight], fused=False, queue=weakref.ref(queue), compute=lambda overwrites: [torch.ones(2, 2)]
    )
    delivery.compute(FirstWrites(in_order=True))
    for microbatch in range(2):
        delivery.put(lambda: None, (torch.ones(1),), microbatch)
    assert len(ddp.records[0].pending) == 2
    queue.drain()
    assert ddp.records[0].pending == []
    assert layer.weight.main_grad.tolist() == [[2, 2]] * 2
    assert ddp.records[0].late_sum is None


OFFSETS = torch.tensor([0, 1, 2], dtype=torch.int32)
DY, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])


@pytest.mark.parametrize(
    ("fused", "delayed", "in_order"),
    [(False, True, False), (True, False, False), (True, True, False), (True, False, True)],
)
@pytest.mark.parametrize("wanted", [[True, False], [False, True], [True, True]])
def test_a_capture_computes_the_gradients_that_are_wanted(
    wanted: list[bool], fused: bool, delayed: bool, in_order: bool
) -> None:
    """Of two experts, of which one may be frozen. In order, each captured write is the first, and overwrites."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    weights, queue = list(model), WgradQueue()
    kept = DistributedDataParallel(model) if fused else None
    for weight in weights if fused else ():
        weight.main_grad.fill_(7)
        weight._maingrad_record.first_write_overwrites = in_order
    options = (weights, ["one", "two"], GroupedWgrad(weights), "layer")
    eager = DelayedTarget(*options, fused=fused, queue=queue) if delayed else WgradTarget(*options)
    capture = BackwardCapture(FirstWrites(in_order=in_order), weights)
    target = CapturedTarget(eager, weakref.ref(capture))
    assert target.deliver(target.resolve(wanted), (DY, X, OFFSETS), 1) == [None, None]
    assert target.demand(None) is Demand.ACCUMULATE, "of each gradient, whatever autograd is asked for"
    (delivery,) = capture.deliveries
    assert delivery.weights == tuple(weight for weight, want in zip(weights, wanted, strict=True) if want)
    if delayed:
        delivery.compute(FirstWrites(in_order=False))
        delivery.put(lambda: None, (torch.ones(1),), 1)
        queue.drain()
    parts = [DY[:1].T @ X[:1], DY[1:].T @ X[1:]]
    for weight, part, want in zip(weights, parts, wanted, strict=True):
        if fused:
            assert torch.equal(weight.main_grad, part + 7 * (not in_order) if want else torch.full((2, 2), 7.0))
        else:
            assert torch.equal(weight.grad, part) if want else weight.grad is None
    if kept is not None:
        for record in kept.records:
            record.reset()
        assert delivery.open(1) == [], "each main_grad is where it was"


def test_a_captured_write_takes_rows_that_lie_apart() -> None:
    """Of a provider of others, as an eager one does."""
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.main_grad = torch.zeros(2, 4)[:, :2]
    delivery = captured_of([weight])
    assert delivery.open(1) == []


KINDS: dict[str, tuple[bool, bool, type]] = {
    # fused, delayed
    "autograd delivers": (False, False, AutogradTarget),
    "backward writes": (True, False, WgradTarget),
    "summed later": (False, True, DelayedTarget),
    "written later": (True, True, DelayedTarget),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capturing", [False, True])
def test_a_product_has_the_target_of_its_kind_and_keeps_it(kind: str, capturing: bool) -> None:
    """As long as weights and queue are the same."""
    fused, delayed, expected = KINDS[kind]
    weights, queue = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)], WgradQueue()
    capture = BackwardCapture(FirstWrites(in_order=True), weights)
    own = queue if delayed else None
    with noting(capture) if capturing else nullcontext():
        target = choose_target(weights, ["one", "two"], GroupedWgrad(weights), "layer", fused=fused, queue=own)
    assert type(target) is (CapturedTarget if capturing and expected is not AutogradTarget else expected)
    assert target.serves(weights, own)
    assert not target.serves(weights, None if delayed else queue)
    if expected is not AutogradTarget:
        assert not target.serves(weights[::-1], own)
        assert not target.serves(weights[:1], own)


def test_a_weight_that_has_main_grad_is_none_of_torchs() -> None:
    """Though torch's ``fully_shard`` has gathered it: the accumulator that was given comes first."""
    weights = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    for weight in weights:
        setattr(weight, torch_wrappers._MARK, torch_wrappers.TorchShards(nn.Linear(1, 1)))
    kinds = []
    for _ in range(3):
        made = choose_target(weights, ["one", "two"], GroupedWgrad(weights), "layer", fused=True, queue=None)
        kinds.append(type(made))
        weights[len(kinds) == 2].main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    assert kinds == [torch_wrappers.TorchShardedTarget] * 2 + [WgradTarget]
