"""Graphed callables train bit for bit as the layers do eagerly, in every order, under every provider of gradients."""

from dataclasses import replace

import pytest
import torch
from graphed import KINDS, ORDERS, Case, train
from hypothesis import given, settings
from pipelines import ROWS, WIDTH, batches, fused, gradients, loss_of, make_chunks, scheduled

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import graphed_chunks, make_graphed_callables
from maingrad.te_integration.graphs.captured_order import ReplayError
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order

WAYS = ("alone", "ddp", "zero1")


def assert_alike(case: Case, ranks: int) -> None:
    if ranks == 1:
        results = [(train(case, graphed=False), train(case, graphed=True))]
    else:
        results = list(zip(*(simulate(train, ranks, case, graphed) for graphed in (False, True)), strict=True))
    for eager, graphed in results:
        assert len(eager) == len(graphed)
        assert all(map(torch.equal, eager, graphed))
        assert all(torch.isfinite(tensor).all() for tensor in eager)


@pytest.mark.in_turn
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "now"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(12)
def test_an_order_trains_as_it_does_eagerly(kind, order, way, delayed, fused):
    if fused and way == "alone":
        way = "ddp"
    case = Case(kind, order, fused, delayed, way)
    assert_alike(case, 1 if way == "alone" else 2)


def test_each_way_differs_from_no_training():
    case = Case()
    assert not all(map(torch.equal, train(case, graphed=True)[-2:], train(replace(case, steps=0), graphed=True)[-2:]))


@pytest.mark.in_turn
@given(scheduled())
@settings(max_examples=settings().max_examples // 2)
def test_random_orders_of_layers_of_which_some_delay(drawn):
    order, delays = drawn
    outcomes = []
    for graphed in (False, True):
        chunks = make_chunks(fused, delays)
        ddp = DistributedDataParallel(chunks)
        counts = [len(chunk) for chunk in chunks]
        schedule = parse_order(order, num_layers_per_chunk=counts)
        parts = [list(chunk) for chunk in chunks]
        if graphed:
            samples = [
                (torch.ones(ROWS, WIDTH).requires_grad_((chunk, layer) != (0, 0)),)
                for chunk, count in enumerate(counts)
                for _ in range(schedule.num_microbatches)
                for layer in range(count)
            ]
            layers = [layer for chunk in chunks for layer in chunk]
            callables = make_graphed_callables(
                layers, samples, order=order, num_layers_per_chunk=counts, num_warmup_iters=1
            )
            parts = graphed_chunks(callables, schedule)
        executor = ScheduleExecutor(schedule, parts)
        for _ in range(2):
            losses = executor.run(batches(schedule.num_microbatches), loss_of)
            ddp.finish_grad_sync()
            outcomes.append([*losses, *(gradient.clone() for gradient in gradients(chunks).values())])
            ddp.zero_grad_buffer()
    assert all(map(torch.equal, [*outcomes[0], *outcomes[1]], [*outcomes[2], *outcomes[3]]))


def test_a_step_out_of_turn_is_told_which_of_the_steps_that_were_not_freed_comes() -> None:
    """The first and the last of an order may have been freed."""
    sample = (torch.ones(ROWS, WIDTH, requires_grad=True),)
    calls = make_graphed_callables([torch.nn.Linear(WIDTH, WIDTH)], [sample] * 4, order=[1] * 4 + [-1] * 4)
    for each in (calls[0], calls[3]):
        each.reset()
    for _ in range(2):
        outputs = [call(*sample) for call in calls[1:3]]
        for output in outputs:
            output.sum().backward()
    with pytest.raises(ReplayError, match=r"microbatch 2 was called where .* microbatch 1 comes"):
        calls[2](*sample)
