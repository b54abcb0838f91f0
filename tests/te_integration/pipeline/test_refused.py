"""The executor refuses wrong uses by name, and a failed run leaves nothing behind."""

import gc
import weakref

import pytest
import torch
from delaying import DelayingLinear
from pipelines import WIDTH, batches, fused, gradients, loss_of, make_chunks, plain_losses, stand_in, unfused
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import WgradQueue, delayed_wgrad
from maingrad.te_integration.pipeline.executor import ScheduleExecutor
from maingrad.te_integration.pipeline.order import ScheduleError, parse_order


def refused(order, chunks, error, message, inputs=None, loss=loss_of):
    schedule = parse_order(order)
    executor = ScheduleExecutor(schedule, list(chunks))
    with pytest.raises(error, match=message):
        executor.run(batches(schedule.num_microbatches) if inputs is None else inputs, loss)
    return executor


@pytest.mark.parametrize("layer", [nn.Linear(WIDTH, WIDTH), nn.ReLU()])
def test_a_wgrad_where_no_module_can_delay_is_refused_before_anything_runs(layer):
    chunks = [DelayingLinear(WIDTH, WIDTH), nn.Sequential(layer)]
    executor = refused(
        [1, 2, -2, -2.5, -1, -1.5],
        chunks,
        RuntimeError,
        r"entry 3 \(-2.5: wgrad of chunk 2, microbatch 0\): chunk 2 \(Sequential\) has no delayed weight gradient",
    )
    assert executor.records == []


@pytest.mark.parametrize("make_linear", [stand_in, unfused])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_wgrad_where_nothing_was_delayed_is_refused(make_linear, frozen):
    chunk = make_chunks(make_linear, [[frozen, frozen]])
    if frozen:
        for module in chunk.modules():
            if isinstance(module, nn.Linear):
                module.weight.requires_grad_(False)
    refused([1, -1, 1, -1.5, -1, -1.5], chunk, RuntimeError, "entry 3 .* has no delayed weight gradient to compute")


def test_a_queue_of_the_callers_is_not_the_schedules():
    chunks, plain = make_chunks(unfused, [[False]]), make_chunks(unfused, [[False]])
    queue = WgradQueue()
    with delayed_wgrad(queue):
        refused([1, -1, -1.5], chunks, RuntimeError, r"entry 2 \(-1.5: .* has no delayed weight gradient to compute")
        queue.clear()
        chunks.zero_grad()
        ScheduleExecutor(parse_order([1, -1]), list(chunks)).run(batches(1), loss_of)
    assert queue.pending_owners == ["Linear(in_features=8, out_features=8)"]
    queue.drain()
    plain_losses(plain, batches(1))
    assert all(torch.equal(gradients(plain)[name], gradient) for name, gradient in gradients(chunks).items())


def test_without_wgrad_entries_nothing_needs_to_delay():
    chunks, plain = make_chunks(stand_in, [[False], [False]]), make_chunks(stand_in, [[False], [False]])
    ScheduleExecutor(parse_order([1, 2, -2, -1]), list(chunks)).run(batches(1), loss_of)
    plain_losses(plain, batches(1))
    assert all(torch.equal(gradients(plain)[name], gradient) for name, gradient in gradients(chunks).items())


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_inference_is_refused(disabled):
    chunks = make_chunks(stand_in, [[True]])
    with disabled():
        refused([1, -1, -1.5], chunks, RuntimeError, "entry 1 .* gradients are disabled")


def test_an_order_in_which_a_chunk_runs_before_its_neighbour_is_refused():
    chunks = make_chunks(stand_in, [[True], [True]])
    schedule = parse_order([2, 1, -2, -1])
    with pytest.raises(ScheduleError, match=r"entry 0 .* comes before the forward of chunk 1") as caught:
        ScheduleExecutor(schedule, list(chunks)).run(batches(1), loss_of)
    assert caught.value.index == 0


def test_chunks_must_match_the_schedule():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="2 chunks for a schedule of 1"):
        ScheduleExecutor(parse_order([1, -1]), layers)
    with pytest.raises(ValueError, match="chunk 1 has 2 layers, the schedule says 3"):
        ScheduleExecutor(parse_order([1, -1], num_layers=3), [layers])
    with pytest.raises(ValueError, match="chunk 1 has 2 layers, the schedule says 3"):
        ScheduleExecutor(parse_order([1, -1], num_layers=3), [nn.Sequential(*layers)])
    for chunk in (lambda x: x, [lambda x: x, layers[0]], [layers[0], lambda x: x], 1):
        with pytest.raises(TypeError, match="chunk 1"):
            ScheduleExecutor(parse_order([1, -1]), [chunk])
    ScheduleExecutor(parse_order([1, -1], num_layers=3), [layers[0]])  # its layers are its own affair


def test_a_chunk_without_layers_passes_its_inputs_on():
    chunks, plain = make_chunks(stand_in, [[False]]), make_chunks(stand_in, [[False]])
    ScheduleExecutor(parse_order([1, 2, 3, -3, -2, -1]), [[], chunks[0], []]).run(batches(1), loss_of)
    plain_losses(plain, batches(1))
    assert all(torch.equal(gradients(plain)[name], gradient) for name, gradient in gradients(chunks).items())


def test_inputs_and_losses_must_fit():
    chunks = make_chunks(stand_in, [[True]])
    refused([1, -1], chunks, ValueError, "2 inputs for a schedule of 1 microbatches", inputs=batches(2))
    refused([1, -1], chunks, ValueError, "loss_fn", loss=lambda y, microbatch: y)
    refused([1, -1], chunks, ValueError, "loss_fn", loss=lambda y, microbatch: 1.0)
    refused([1, -1], chunks, TypeError, "loss_fn must be a function", loss=None)

    class Wrong(nn.Module):
        def forward(self, x):
            return x, None

    refused([1, -1], [Wrong()], TypeError, "chunk 1 must return a tensor or a tuple of tensors, not Tensor, NoneType")


def test_what_was_pending_before_is_refused():
    chunks = make_chunks(stand_in, [[True]])
    chunks[0](batches(1)[0]).sum().backward()
    refused([1, -1, -1.5], chunks, RuntimeError, "1 of chunk 1 has pending weight gradients from before this run")
    chunks = make_chunks(stand_in, [[True], [True]])
    chunks[1](batches(1)[0]).sum().backward()
    refused([1, 2, -2, -1], chunks, RuntimeError, "1 of chunk 2 has pending weight gradients from before this run")


def test_what_is_pending_afterwards_is_refused():
    class Both(DelayingLinear):
        """Delays, and holds a module that delays."""

        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.inner = DelayingLinear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(self.inner(x))

    refused(
        [1, -1, -1.5],
        [nn.Sequential(Both())],
        RuntimeError,
        "after the last entry, weight gradients are still pending in 0 of chunk 1",
    )


def test_a_module_shared_by_chunks_runs_in_turn_or_is_refused():
    shared = DelayingLinear(WIDTH, WIDTH)
    executor = ScheduleExecutor(parse_order([1, 2, -2, -2.5, -1, -1.5]), [shared, shared])
    executor.run(batches(1), loss_of)
    assert len(shared.log) == 2
    refused(
        [1, 2, -2, -1, -1.5, -2.5],
        [shared, shared],
        RuntimeError,
        r"entry 4 .*DelayingLinear is in chunk 2 too, and its oldest pending weight gradient is that of microbatch 0",
    )


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_plain_loop_after_a_failed_run_computes_what_it_delays(error):
    """Where its gradients are read: no part of the failed run is waited for."""
    chunks, plain = make_chunks(fused, [[True], [True]]), make_chunks(unfused, [[False], [False]])
    ddp = DistributedDataParallel(chunks)

    def fails(y, microbatch):
        raise error

    executor = ScheduleExecutor(parse_order([1, 2, -2, -2.5, -1, -1.5]), list(chunks))
    with pytest.raises(error):
        executor.run(batches(1), fails)
    ddp.abandon_iteration()
    plain_losses(chunks, batches(1))
    assert nn.utils.clip_grad_norm_(ddp.parameters(), 1e9) > 0 and executor.records
    plain_losses(plain, batches(1))
    found = dict(chunks.named_parameters())
    assert all(torch.equal(found[name].grad, gradient) for name, gradient in gradients(plain).items())


def test_a_failed_run_leaves_no_hooks_and_no_activations_behind():
    chunks = make_chunks(stand_in, [[True], [True]])
    activations = []

    chunks[0].register_forward_hook(lambda module, args, output: activations.append(weakref.ref(output)))

    class Failing(nn.Module):
        def forward(self, x):
            activations.append(weakref.ref(x))
            raise ZeroDivisionError("on purpose")

    executor = ScheduleExecutor(parse_order([1, 2, -2, -1]), [chunks[0], nn.Sequential(chunks[1], Failing())])
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            executor.run(batches(1), loss_of)
        assert [reference() for reference in activations] == [None, None]
    finally:
        gc.enable()
    assert [len(module._forward_hooks) for module in chunks.modules()] == [0, 1, *[0] * 7]  # the test's own
    assert [record.entry.number for record in executor.records] == [1]
