"""Each weight gradient runs once, in its slot, for its microbatch."""

import copy
import types

import pytest
import torch
from delaying import DelayingLinear, ForwardingSequential
from hypothesis import given
from pipelines import (
    WIDTH,
    batches,
    loss_of,
    make_chunks,
    plain_losses,
    scheduled,
    stand_in,
    unfused,
)
from torch import nn

from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline.executor import ScheduleExecutor
from maingrad.te_integration.pipeline.order import Kind, parse_order


def run_with_log(order, delays):
    """The executor after a run, and for each delayed weight gradient, in order: its module's name and microbatch."""
    schedule = parse_order(order)
    inputs = batches(schedule.num_microbatches)
    chunks = make_chunks(stand_in, delays)
    seen, log = {}, []
    names = {module: f"{i + 1}/{name}" for i, chunk in enumerate(chunks) for name, module in chunk.named_modules()}
    for module in chunks.modules():
        if isinstance(module, DelayingLinear):
            module.log = log
            seen[module] = []
            module.register_forward_hook(lambda module, args, output: seen[module].append(args[0].detach().clone()))
    executor = ScheduleExecutor(schedule, list(chunks))
    executor.run(inputs, loss_of)
    ran = [(names[module], [k for k, known in enumerate(seen[module]) if torch.equal(x, known)]) for module, x in log]
    return executor, ran


@given(scheduled())
def test_each_weight_gradient_runs_in_its_slot_and_for_its_microbatch(drawn):
    order, delays = drawn
    executor, ran = run_with_log(order, delays)
    linear_names = [[str(3 * i + 1) for i in range(len(chunk))] for chunk in delays]
    delaying = [
        [name for name, delay in zip(names, chunk, strict=True) if delay]
        for names, chunk in zip(linear_names, delays, strict=True)
    ]
    weighted = [[str(i) for i in range(3 * len(chunk)) if i % 3 != 2] for chunk in delays]
    expected = []
    assert [record.entry for record in executor.records] == list(executor.schedule.steps)
    for record in executor.records:
        chunk = record.entry.chunk - 1
        if record.entry.kind is Kind.FORWARD:
            assert (record.modules, record.delayed) == (tuple(weighted[chunk]), ())
        elif record.entry.kind is Kind.DGRAD:
            assert record.modules == tuple(reversed(weighted[chunk]))
            assert record.delayed == tuple(reversed(delaying[chunk]))
        else:
            assert (record.modules, record.delayed) == (tuple(reversed(delaying[chunk])), ())
            expected += [(f"{chunk + 1}/{name}", [record.entry.microbatch]) for name in record.modules]
    assert ran == expected


def test_each_microbatch_gets_its_own_wgrad():
    _, ran = run_with_log([1, 1, -1, -1, -1.5, -1.5], [[True, True]])
    assert ran == [("1/4", [0]), ("1/1", [0]), ("1/4", [1]), ("1/1", [1])]


def test_lists_of_layers_are_called_one_after_another():
    layers = [DelayingLinear(WIDTH, WIDTH), nn.ReLU(), ForwardingSequential(DelayingLinear(WIDTH, WIDTH), nn.ReLU())]
    for chunk in (layers, tuple(layers), nn.ModuleList(layers)):
        executor = ScheduleExecutor(parse_order([1, -1, -1.5], num_layers=3), [chunk])
        executor.run(batches(1), loss_of)
        assert [record.modules for record in executor.records] == [("0", "2.0"), ("2.0", "0"), ("2.0", "0")]


def test_a_container_with_the_verbs_does_not_run_its_children_twice():
    torch.manual_seed(0)
    inner = ForwardingSequential(DelayingLinear(WIDTH, WIDTH), DelayingLinear(WIDTH, WIDTH))
    model = ForwardingSequential(inner, DelayingLinear(WIDTH, WIDTH))
    executor = ScheduleExecutor(parse_order([1, 1, -1, -1, -1.5, -1.5]), [model])
    executor.run(batches(2), loss_of)
    assert [record.modules for record in executor.records[4:]] == [("1", "0.1", "0.0")] * 2
    assert [len(module.log) for module in model.modules() if isinstance(module, DelayingLinear)] == [2, 2, 2]


def test_a_module_that_delays_itself_is_named_by_its_class():
    executor = ScheduleExecutor(parse_order([1, -1, -1.5]), [DelayingLinear(WIDTH, WIDTH)])
    executor.run(batches(1), loss_of)
    assert executor.records[2].modules == ("DelayingLinear",)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_layer_that_skips_a_microbatch_does_not_run_anothers_wgrad_early(lag):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = DelayingLinear(WIDTH, WIDTH), DelayingLinear(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            y = self.always(x)
            return self.sometimes(y) if self.calls != 2 else y

    order = [1] * 3 + [-1] * lag + [-1, -1.5] * (3 - lag) + [-1.5] * lag
    executor = ScheduleExecutor(parse_order(order), [Sometimes()])
    executor.run(batches(3), loss_of)
    wgrads = {r.entry.microbatch: r.modules for r in executor.records if r.entry.kind is Kind.WGRAD}
    assert wgrads == {0: ("sometimes", "always"), 1: ("always",), 2: ("sometimes", "always")}


def test_a_module_may_delay_the_gradient_of_a_weight_that_another_holds():
    class Delaying(nn.Module):
        """It has no parameters of its own, and what holds the weight does not delay."""

        def __init__(self):
            super().__init__()
            self.held = nn.Linear(WIDTH, WIDTH, bias=False)
            self.others = [DelayingLinear(WIDTH, WIDTH, bias=False)]
            self.others[0].weight = self.held.weight
            self.need_backward_dw, self.backward_dw = self.others[0].need_backward_dw, self.others[0].backward_dw

        def forward(self, x):
            return self.others[0](x)

    executor = ScheduleExecutor(parse_order([1, 1, -1, -1, -1.5, -1.5]), [Delaying()])
    executor.run(batches(2), loss_of)
    assert [record.modules for record in executor.records] == [("Delaying",)] * 6


@pytest.mark.parametrize("make_linear", [stand_in, unfused])
def test_a_layer_used_twice_in_a_forward_runs_both_in_one_slot(make_linear):
    torch.manual_seed(0)
    layer = make_linear(True)
    plain = copy.deepcopy(layer)
    plain.delay = False
    if isinstance(plain, Linear):
        plain.wgrad_queue = None
    executor = ScheduleExecutor(parse_order([1, 1, -1, -1, -1.5, -1.5]), [nn.Sequential(layer, nn.GELU(), layer)])
    executor.run(batches(2), loss_of)
    plain_losses([nn.Sequential(plain, nn.GELU(), plain)], batches(2))
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-7)


def test_a_layer_that_occurs_twice_in_a_list_has_its_first_name():
    layer = DelayingLinear(WIDTH, WIDTH)
    executor = ScheduleExecutor(parse_order([1, -1, -1.5]), [[layer, nn.GELU(), layer]])
    executor.run(batches(1), loss_of)
    assert [record.modules for record in executor.records] == [("0",)] * 3


def test_each_layer_of_a_list_is_told_that_a_run_begins():
    """Graphed chunks begin with microbatch 0 then, wherever in the list they are."""

    class Told(nn.Linear):
        runs = 0

        def begin_run(self):
            self.runs += 1

    layers = [Told(WIDTH, WIDTH) for _ in range(3)]
    executor = ScheduleExecutor(parse_order([1, 1, -1, -1]), [layers])
    for run in (1, 2):
        executor.run(batches(2), loss_of)
        assert [layer.runs for layer in layers] == [run] * 3


def test_a_layer_whose_output_is_a_dict_is_in_the_record_of_its_dgrad():
    class Named(nn.Linear):
        def forward(self, x):
            return {"first": x.detach(), "y": super().forward(x), "last": x.detach()}

    class Unpacking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Named(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x)["y"]

    executor = ScheduleExecutor(parse_order([1, -1]), [Unpacking()])
    executor.run(batches(1), loss_of)
    assert [record.modules for record in executor.records] == [("linear",), ("linear",), ()]


def test_a_run_leaves_no_hook_on_a_parameter_that_a_module_returns():
    class Prompt(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self):
            return self.weight

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = Prompt()

        def forward(self, x):
            return x * self.prompt()

    chunk = Prompted()
    ScheduleExecutor(parse_order([1, -1]), [chunk]).run(batches(1), loss_of)
    assert chunk.prompt.weight.grad.any() and not chunk.prompt.weight._backward_hooks


def test_a_module_with_one_of_the_verbs_alone_does_not_delay():
    class Half(nn.Linear):
        def backward_dw(self):
            raise AssertionError("it delays nothing")

    executor = ScheduleExecutor(parse_order([1, -1]), [Half(WIDTH, WIDTH)])
    executor.run(batches(1), loss_of)
    assert [record.modules for record in executor.records] == [("Half",), ("Half",), ()]


def test_modules_are_looked_up_when_a_run_starts():
    chunk = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    executor = ScheduleExecutor(parse_order([1, -1, -1.5]), [chunk])
    chunk[0] = DelayingLinear(WIDTH, WIDTH)
    executor.run(batches(1), loss_of)
    assert executor.records[2].modules == ("0",)


def test_transformer_engines_verb_that_is_always_true():
    class Engine(DelayingLinear):
        """``need_backward_dw`` tells whether the module delays; ``backward_dw`` fails with nothing to do."""

        @property
        def wgrad_store(self):
            queue = types.SimpleNamespace(empty=lambda: not self._waiting)
            return types.SimpleNamespace(context=queue if self.delay else None)

        def need_backward_dw(self):
            return True

        def backward_dw(self):
            assert self._waiting
            super().backward_dw()

    order = [1, 1, -1, 1, -1, -1.5, -1, -1.5, -1.5]
    chunk = nn.Sequential(*(Engine(WIDTH, WIDTH, delay=number < 3) for number in range(4)))
    chunk[1].weight.requires_grad_(False)
    executor = ScheduleExecutor(parse_order(order), [chunk])
    for _ in range(2):
        executor.run(batches(3), loss_of)
        wgrads = [record.modules for record in executor.records if record.entry.kind is Kind.WGRAD]
        assert wgrads == [("2", "0")] * 3
