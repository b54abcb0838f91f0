"""Entries of delayed weight gradients by themselves: without a wrapper of ours, where nobody else counts them."""

import copy
import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract.delayed import (
    DelayedTarget,
    DelayedWgrad,
    absorb_late_sum,
    add_to_grad,
    compute_pending,
    live_queue,
)
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.ddp.contract.main_grad import attach, is_delayed
from maingrad.ddp.contract.module import take_grad_of_backward_dw
from maingrad.ddp.contract.record import GradRecord, PendingWgrad
from maingrad.te_integration import GroupedLinear, Linear, WgradQueue, delayed_wgrad


def entry_of(*weights: Tensor) -> DelayedWgrad:
    """Adds ones to ``.grad`` of the weights, which it does not keep alive."""
    references = [weakref.ref(weight) for weight in weights]

    def alive() -> Sequence[Tensor]:
        return [weight for each in references if (weight := each()) is not None]

    def write(entry: DelayedWgrad, *_: Any) -> None:
        for weight in alive():
            add_to_grad(weight, torch.ones_like(weight, dtype=torch.float64), None)

    return DelayedWgrad(write, (torch.ones(1),), (), "layer", 0, alive)


def step_over(*weights: Tensor) -> None:
    torch.optim.SGD(weights, lr=1.0).step()


PENDING = r"SGD.step\(\) while a delayed weight gradient of layer is pending"


def test_a_step_over_what_is_pending_is_refused_until_it_is_computed_or_dropped() -> None:
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    entry = entry_of(weight)
    assert entry.serves(weight)
    assert not entry.serves(other)
    of_both = entry_of(other, weight)
    assert of_both.serves(weight)
    assert of_both.serves(other)
    with pytest.raises(RuntimeError, match=PENDING):
        step_over(other)
    of_both.drop()
    assert entry.waits
    step_over(other)
    with pytest.raises(RuntimeError, match=PENDING):
        step_over(other, weight)
    with pytest.raises(RuntimeError, match=PENDING):
        torch.optim.SGD([{"params": [other]}, {"params": [weight]}], lr=1.0).step()
    entry.run()
    assert not entry.waits
    assert not entry.in_use
    step_over(weight)
    assert weight.tolist() == [-1, -1]
    with pytest.raises(RuntimeError, match="was computed or dropped already"):
        entry.run()
    dropped = entry_of(weight)
    dropped.drop()
    step_over(weight)
    with pytest.raises(RuntimeError, match="was computed or dropped already"):
        dropped.run()


def test_a_lost_gradient_is_said_once_to_who_steps_over_its_weight() -> None:
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    lost = entry_of(weight)
    lost.lose()
    assert not lost.waits, "its operands take no more memory"
    step_over(other)
    with pytest.raises(RuntimeError, match=PENDING):
        step_over(weight)
    step_over(weight)
    gone = nn.Parameter(torch.zeros(2))
    entry = entry_of(gone)
    entry.lose()
    del gone
    gc.collect()
    assert entry.is_orphaned
    step_over(weight)
    forgotten = weakref.ref(entry)
    del entry
    gc.collect()
    assert forgotten() is None, "nobody can step over its weight"


def test_a_product_on_one_stream_needs_its_operands_no_more() -> None:
    entry = entry_of(nn.Parameter(torch.zeros(2)))
    assert not entry.in_use
    entry.run()
    assert not entry.in_use and not entry.waits


def test_a_fused_gradient_that_is_delayed_without_a_provider_is_refused_in_backward() -> None:
    weight, queue = nn.Parameter(torch.zeros(2, 2)), WgradQueue()
    target = DelayedTarget([weight], ["weight"], GroupedWgrad([weight]), "layer", fused=True, queue=queue)
    with pytest.raises(RuntimeError, match=r"layer, weight: .* needs weight.main_grad, and nobody provided it"):
        target.resolve([True])
    assert target.resolve([False]) == [None]
    unfused = DelayedTarget([weight], ["weight"], GroupedWgrad([weight]), "layer", fused=False, queue=queue)
    (place,) = unfused.resolve([True])
    assert place is not None and place.weight is weight


def test_what_others_delay_is_given_up_by_nobody_but_them() -> None:
    record = GradRecord("weight", torch.zeros(2), first_write_overwrites=False, shared=False)
    theirs, ours = PendingWgrad("theirs"), PendingWgrad("ours")
    ours.lost = True
    record.pending = [theirs, ours]
    record.forget_lost()
    assert record.pending == [theirs]
    param = nn.Parameter(torch.zeros(2))
    attach(param, record)
    with pytest.raises(RuntimeError, match=r"parameter 'weight': another.backward_dw\(\) ran more often than"):
        take_grad_of_backward_dw(param, record, "another")
    take_grad_of_backward_dw(param, record, "theirs")
    assert record.pending == []


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_an_operand_that_was_changed_meanwhile_is_refused(changed: int) -> None:
    """Also a quantised one, which is several tensors."""
    tensors = [torch.ones(1) for _ in range(3)]
    operands: Any = tensors[0], SimpleNamespace(tensors=tensors[1:])
    entry = DelayedWgrad(lambda *_: None, operands, (), "layer", 0)
    tensors[changed].add_(1)
    with pytest.raises(RuntimeError, match=r"layer: the input or the output gradient .* was changed in place"):
        entry.run()
    entry.drop()


def test_a_gradient_whose_product_has_failed_may_be_computed_again() -> None:
    written: list[Tensor] = []

    def write(_: DelayedWgrad, operand: Tensor) -> None:
        if not written:
            written.append(operand)
            raise torch.OutOfMemoryError
        written.append(operand)

    record = GradRecord("weight", torch.zeros(1), first_write_overwrites=False, shared=False)
    entry = DelayedWgrad(write, (torch.ones(1),), [record, record], "layer", 0)  # two experts share the weight
    with pytest.raises(torch.OutOfMemoryError):
        entry.run()
    assert entry.waits
    assert record.pending == [entry.pending] * 2
    entry.run()
    assert len(written) == 2
    assert not entry.waits
    assert record.pending == []


@pytest.mark.parametrize(("fused", "delayed"), [(True, True), (False, True), (True, False)])
def test_a_weight_that_is_frozen_after_its_forward_gets_nothing(fused: bool, delayed: bool) -> None:
    layers = nn.Sequential(*[Linear(3, 3, bias=False, fuse_wgrad_accumulation=fused) for _ in range(2)])
    ddp, queue = DistributedDataParallel(layers), WgradQueue()
    with delayed_wgrad(queue) if delayed else nullcontext():
        loss = ddp(torch.ones(2, 3)).sum()
    layers[0].weight.requires_grad_(False)
    with ddp.no_sync():
        loss.backward()
    assert len(queue) == int(delayed)
    queue.drain()
    assert [record.written for record in ddp.records if record.name == "0.weight"] == [False]
    assert layers[1].weight.main_grad.any()


def test_what_waits_in_a_queue_keeps_no_graph() -> None:
    """The graph of the input would keep the layers before it."""
    first, second, queue = Linear(3, 3), Linear(3, 2, bias=False), WgradQueue()
    x = first(torch.ones(4, 3))
    with delayed_wgrad(queue):
        second(x).sum().backward()
    expected = x.detach().sum(0).expand(2, 3)
    before = weakref.ref(first.weight)
    del first, x
    gc.collect()
    assert before() is None
    queue.drain()
    torch.testing.assert_close(second.weight.grad, expected)


def test_sums_in_grad_have_the_weights_dtype() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    for _ in range(2):
        add_to_grad(weight, torch.tensor([1.0, 2.0]), None)
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.tolist() == [2, 4]


def test_unfused_gradients_of_one_microbatch_go_into_main_grad_together() -> None:
    """Behind the last of them: ``.grad`` may show this iteration's gradient by then."""
    layer = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    (record,) = ddp.records
    entries = [DelayedWgrad(lambda *_: None, (torch.ones(1),), [record], "layer", 0) for _ in range(2)]
    for entry in entries:
        assert not entry.is_orphaned
        add_to_grad(layer.weight, torch.tensor([[1.0, 2.0]]), record)
        absorb_late_sum(layer.weight, record, entry)
        entry.run()
    assert layer.weight.grad is None
    assert layer.weight.main_grad.tolist() == [[2, 4]]
    assert record.num_hook_writes == 1
    assert record.late_sum is None


def test_unfused_gradients_do_not_wait_for_those_of_later_microbatches() -> None:
    layer = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    (record,) = ddp.records
    entries = [DelayedWgrad(lambda *_: None, (torch.ones(1),), [record], "layer", 0) for _ in range(2)]
    for number, entry in enumerate(entries):
        entry.pending.microbatch = number
    for number, entry in enumerate(entries):
        add_to_grad(layer.weight, torch.tensor([[1.0, 2.0]]), record)
        absorb_late_sum(layer.weight, record, entry)
        assert record.late_sum is None
        assert layer.weight.main_grad.tolist() == [[number + 1, 2 * number + 2]]
        entry.run()


@pytest.mark.parametrize("fused_first", [False, True])
def test_a_tied_weight_gets_the_delayed_gradients_of_both_its_layers(fused_first: bool) -> None:
    """One is written, the other one summed first; either may be the microbatch's last."""
    first, second = (Linear(3, 3, bias=False, fuse_wgrad_accumulation=fuse) for fuse in (fused_first, not fused_first))
    second.weight = first.weight
    ddp, queue, x = DistributedDataParallel(nn.Sequential(first, nn.Tanh(), second)), WgradQueue(), torch.rand(4, 3)
    with delayed_wgrad(queue):
        ddp(x).square().sum().backward()
    queue.drain()
    assert ddp.records[0].late_sum is None
    ddp.finish_grad_sync()
    twin = first.weight.detach().clone().requires_grad_()
    ((x @ twin.t()).tanh() @ twin.t()).square().sum().backward()
    torch.testing.assert_close(first.weight.main_grad, twin.grad)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_expert_gets_its_delayed_gradient(fuse: bool, frozen: bool) -> None:
    """One expert may be frozen, which gets none."""
    layer, queue = GroupedLinear(2, 3, 2, bias=False, fuse_wgrad_accumulation=fuse), WgradQueue()
    layer.weight0.requires_grad_(not frozen)
    trained = [param for param in layer.parameters() if param.requires_grad]
    ddp = DistributedDataParallel(layer)
    for _ in range(2):
        with delayed_wgrad(queue):
            ddp(torch.ones(5, 3), torch.tensor([2, 3])).sum().backward()
        queue.drain()
        ddp.finish_grad_sync()
        assert [param.main_grad.tolist() for param in trained] == [[[n] * 3] * 2 for n in (2, 3)[frozen:]]
        assert layer.weight0.grad is None or not frozen
        ddp.zero_grad_buffer()


def test_a_wrapper_gives_up_what_is_lost_and_computes_what_a_step_lacks() -> None:
    """Steps over its weights are refused only as long as a gradient cannot come."""
    layer, second = Linear(3, 1, bias=False), Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(nn.Sequential(layer, second))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    nn.init.zeros_(layer.weight)
    nn.init.ones_(second.weight)
    queue = WgradQueue()
    with delayed_wgrad(queue):
        ddp(torch.ones(1, 3)).sum().backward()
    del queue
    gc.collect()
    with pytest.raises(RuntimeError, match="was let go"):
        optimizer.step()
    ddp.zero_grad()  # gives the iteration up
    queue = WgradQueue()
    with delayed_wgrad(queue):
        ddp(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(queue) == 0
    assert layer.weight.tolist() == [[-1] * 3]


def test_unfused_gradients_are_computed_in_the_weights_dtype() -> None:
    layer = Linear(3, 2, bias=False, dtype=torch.float64, delay_wgrad_compute=True)
    x = torch.rand(4, 3, dtype=torch.float64)
    layer(x).sum().backward()
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3), rtol=1e-14, atol=0)


def test_pending_gradients_are_computed_in_bucket_order_and_each_once() -> None:
    done: list[int] = []
    records = [
        GradRecord(str(n), torch.zeros(1), first_write_overwrites=False, shared=False, bucket_index=n) for n in (2, 0)
    ]
    for number, record in enumerate(records):
        entry = DelayedWgrad(lambda *_: None, (torch.ones(1),), records[number:], "layer", 0)
        entry.pending.compute = lambda number=number: done.append(number)  # type: ignore[misc]
        assert entry.is_last_of(record) is (number == 0)
    foreign = DelayedWgrad(lambda *_: None, (torch.ones(1),), records[:1], "theirs", 0)
    assert foreign.pending.compute is None
    first = DelayedWgrad(lambda *_: None, (torch.ones(1),), records[1:], "layer", 0)
    first.pending.order = (-1, 0)
    first.pending.compute = lambda: done.append(2)  # type: ignore[misc]
    compute_pending(records)
    assert done == [2, 0, 1]


def test_a_queue_that_was_let_go_is_named() -> None:
    queue = WgradQueue()
    reference = weakref.ref(queue)
    assert live_queue(reference, "layer") is queue
    del queue
    with pytest.raises(RuntimeError, match=r"layer: the WgradQueue .* was let go before backward"):
        live_queue(reference, "layer")


def test_functions_that_were_registered_run_behind_each_backward_dw() -> None:
    """Foreign providers reduce in them."""
    layer, seen = Linear(4, 4, bias=False, delay_wgrad_compute=True), []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(layer.weight.grad is not None))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(layer.need_backward_dw()))
    layer.backward_dw()
    assert seen == []
    twin = copy.deepcopy(layer)
    for each in (layer, twin):  # what is registered with a module is not for its copy
        each(torch.ones(2, 4)).sum().backward()
        each.backward_dw()
    assert seen == [True, False]
    for _ in range(2):
        twin(torch.ones(2, 4)).sum().backward()
    for left in (True, False):  # the oldest microbatch's alone
        assert twin.need_backward_dw()
        twin.backward_dw()
        assert twin.need_backward_dw() is left
    assert torch.equal(twin.weight.grad, 3 * layer.weight.grad)


def test_a_target_serves_its_weights_and_its_queue() -> None:
    """A forward keeps the last one's target where nothing is other; and a queue drops what nobody can compute whole."""
    weights, queue = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)], WgradQueue()
    target = DelayedTarget(weights, ["one", "two"], GroupedWgrad(weights), "layer", fused=False, queue=queue)
    assert target.serves(weights, queue)
    assert not target.serves(weights, WgradQueue())
    assert not target.serves(weights, None)
    assert not target.serves(weights[::-1], queue)
    assert not target.serves(weights[:1], queue)
    entries: list[DelayedWgrad] = []
    put = queue.put
    queue.put = lambda entry: (entries.append(entry), put(entry))  # type: ignore[method-assign, func-returns-value]
    rows = torch.ones(2, 2)
    target.deliver(target.resolve([True, True]), (rows, rows, torch.tensor([0, 1, 2], dtype=torch.int32)), 1)
    target.deliver(target.resolve([True, False]), (rows, rows, torch.tensor([0, 1, 2], dtype=torch.int32)), 1)
    assert [id(weight) for weight in entries[0].weights()] == [id(weight) for weight in weights]
    assert [id(weight) for weight in entries[1].weights()] == [id(weights[0])]
    del weights[1]
    gc.collect()
    assert entries[0].weights() == []
    assert entries[0].is_orphaned
    assert not entries[1].is_orphaned, "the other weight was not wanted"


def test_parameters_that_are_made_anew_are_marked_and_a_copy_tells_nobody() -> None:
    """Foreign providers read the mark when they wrap; what they have registered is for the layer that they wrapped."""
    layer, told = Linear(2, 2, bias=False, delay_wgrad_compute=True, device="meta"), []
    before = layer.weight
    layer.to_empty(device="cpu")
    assert layer.weight is not before
    assert is_delayed(layer.weight)
    nn.init.ones_(layer.weight)
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: told.append("the original"))
    twin = copy.deepcopy(layer)
    assert is_delayed(twin.weight)
    experts = GroupedLinear(3, 2, 2, delay_wgrad_compute=True)
    assert [name for name, param in experts.named_parameters() if is_delayed(param)] == [f"weight{n}" for n in range(3)]
    twin(torch.ones(1, 2)).sum().backward()
    twin.backward_dw()
    assert twin.weight.grad is not None
    assert told == []


@pytest.mark.parametrize("give_up", ["zero_grad", "forget_iteration"])
def test_what_nobody_can_compute_any_more_is_given_up(give_up: str) -> None:
    """By a program, or after a capture that failed: what another queue still holds is to be computed."""
    layers = nn.Sequential(*[Linear(4, 4, bias=False, fuse_wgrad_accumulation=True) for _ in range(3)])
    ddp = DistributedDataParallel(layers)
    let_go, kept = WgradQueue(), WgradQueue()
    with delayed_wgrad(let_go):
        x = layers[0](torch.ones(2, 4))
    with delayed_wgrad(kept):
        x = layers[1](x)
    with delayed_wgrad(let_go):
        x = layers[2](x)
    x.sum().backward()
    del let_go
    gc.collect()
    with pytest.raises(RuntimeError, match=r"of 3 parameter\(s\) are pending: .* Where the queue was let go, model"):
        ddp.start_grad_sync()
    with pytest.raises(
        RuntimeError, match=r"zero_grad_buffer\(\) while .* of 1 parameter\(s\) are pending: '1.weight'"
    ):
        getattr(ddp, give_up)()
    kept.drain()
    getattr(ddp, give_up)()
    layers[1](layers[0](torch.ones(2, 4))).sum().backward()
    ddp.finish_grad_sync()
    assert torch.equal(layers[0].weight.main_grad, 2 * layers[1].weight.sum(0)[:, None].expand(4, 4))  # type: ignore
