"""Orders run with real modules: bitwise the plain gradients, each weight gradient in its slot, wrong use refused."""

import contextlib
import copy
import gc
import random
import re
import types
import weakref
from pathlib import Path

import orders
import pytest
import torch
from delaying import DelayingLinear, ForwardingSequential
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear, Sequential, WgradQueue, delayed_wgrad
from maingrad.te_integration.schedule import Kind, ScheduleError, parse_order
from maingrad.te_integration.schedule_executor import ScheduleExecutor

WIDTH = 8
ROWS = 3


def stand_in(delay):
    return DelayingLinear(WIDTH, WIDTH, delay=delay)


def unfused(delay):
    return Linear(WIDTH, WIDTH, delay_wgrad_compute=delay)


def fused(delay):
    return Linear(WIDTH, WIDTH, delay_wgrad_compute=delay, fuse_wgrad_accumulation=True)


def make_chunks(make_linear, delays):
    """One chunk per entry: linear layers that delay or not, each between a norm and an activation."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(*(layer for delay in chunk for layer in (nn.LayerNorm(WIDTH), make_linear(delay), nn.GELU())))
        for chunk in delays
    )


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def loss_of(y, microbatch):
    return (y * (microbatch + 1)).square().mean()


def plain_losses(chunks, inputs):
    """The plain order: one microbatch after the other through the whole model."""
    losses = []
    for k, x in enumerate(inputs):
        for chunk in chunks:
            x = chunk(x)
        loss = loss_of(x, k)
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients(chunks):
    return {
        name: param.main_grad if hasattr(param, "main_grad") else param.grad
        for name, param in chunks.named_parameters()
    }


def compare(schedule, make_linear, delays):
    """Losses and gradients of the order against the plain order of the same layers, undelayed."""
    inputs = batches(schedule.num_microbatches)
    results = []
    for delayed in (True, False):
        chunks = make_chunks(make_linear, [[delay and delayed for delay in chunk] for chunk in delays])
        ddp = DistributedDataParallel(chunks) if make_linear is fused else None
        with ddp.no_sync() if ddp else contextlib.nullcontext():
            if delayed:
                losses = ScheduleExecutor(schedule, list(chunks)).run(inputs, loss_of)
            else:
                losses = plain_losses(chunks, inputs)
        if ddp:
            ddp.finish_grad_sync()
        results.append((losses, gradients(chunks)))
    (losses, grads), (plain, plain_grads) = results
    assert all(map(torch.equal, losses, plain))
    assert not any(loss.requires_grad for loss in losses)
    assert len(grads) == 4 * sum(map(len, delays))
    for name, gradient in plain_grads.items():
        assert torch.equal(grads[name], gradient), name
        assert gradient.abs().max() > 0, name


@st.composite
def scheduled(draw):
    """A random order of a pipeline, and which layers of its chunks delay: some, where wgrads are written down."""
    rules = draw(orders.rules(max_chunks=3, max_microbatches=4, connected=True))
    delays = []
    for chunk in range(1, rules.num_chunks + 1):
        layers = draw(st.lists(st.booleans(), min_size=1, max_size=3))
        delays.append(layers if chunk not in rules.delayed or any(layers) else [True, *layers])
    order = orders.draw_order(rules, random.Random(draw(st.integers(0, 2**32))))
    return order, delays


# ---- The page in docs/. ----

PAGE = (Path(__file__).resolve().parents[2] / "docs/schedules.md").read_text()


def test_the_documentations_code_runs_and_its_pictures_are_right(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {}
    exec(code, names)
    picture, error = re.findall(r"```\n(entry.*?)```", PAGE, flags=re.DOTALL)
    assert capsys.readouterr().out == picture
    assert len(names["losses"]) == 2
    with pytest.raises(ScheduleError) as caught:
        parse_order([1, 1, -1, -1, -1.5])
    assert str(caught.value) + "\n" == error


# ---- The same numbers. ----


@pytest.mark.parametrize("make_linear", [stand_in, unfused, fused])
@given(scheduled())
def test_every_order_gives_bitwise_the_gradients_of_the_plain_order(make_linear, drawn):
    order, delays = drawn
    compare(parse_order(order), make_linear, delays)


@pytest.mark.parametrize("make_linear", [stand_in, unfused, fused])
def test_the_real_interleaved_order(make_linear):
    schedule = parse_order(orders.INTERLEAVED_3_CHUNKS_8_MICROBATCHES, num_layers_per_chunk=[3, 9, 6])
    compare(schedule, make_linear, [[True], [True, False, True], [False, True]])


@pytest.mark.parametrize("make_linear", [stand_in, unfused, fused])
@pytest.mark.parametrize("lag", range(5))
def test_wgrads_may_lag_any_number_of_dgrads_behind(make_linear, lag):
    order = [1] * 6 + [-1] * lag + [-1, -1.5] * (6 - lag) + [-1.5] * lag
    compare(parse_order(order), make_linear, [[True, True]])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_every_module_and_its_container(fuse, recompute, seed):
    rules = orders.Rules(2, 3, frozenset({1, 2}), connected=True)
    schedule = parse_order(orders.draw_order(rules, random.Random(seed)), num_layers_per_chunk=[2, 2])
    inputs = batches(3)
    results = []
    for delay in (True, False):
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
        chunks = nn.ModuleList(
            Sequential(
                LayerNormLinear(WIDTH, WIDTH, **options),
                LayerNormMLP(WIDTH, 16, activation="swiglu", checkpoint=recompute, **options),
            )
            for _ in range(2)
        )
        ddp = DistributedDataParallel(chunks)
        executor = ScheduleExecutor(schedule, list(chunks))
        with ddp.no_sync():
            losses = executor.run(inputs, loss_of) if delay else plain_losses(chunks, inputs)
        ddp.finish_grad_sync()
        wgrads = [record.modules for record in executor.records if record.entry.kind is Kind.WGRAD]
        assert wgrads == ([("1", "0")] * 6 if delay else [])
        results.append((losses, gradients(chunks)))
    (losses, grads), (plain, plain_grads) = results
    assert all(map(torch.equal, losses, plain))
    assert all(torch.equal(grads[name], gradient) for name, gradient in plain_grads.items())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make_linear", [stand_in, unfused, fused])
def test_recomputed_chunks(make_linear, use_reentrant):
    class Recomputed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    order = [1, 2, 1, 2, -2, -2, -1, -2.5, -1, -1.5, -2.5, -1.5]
    inputs = [x.requires_grad_() for x in batches(2)]  # reentrant recompute needs an input with a gradient
    results = []
    for recompute in (True, False):
        chunks = make_chunks(make_linear, [[True, False], [False, True]])
        ddp = DistributedDataParallel(chunks)
        executor = ScheduleExecutor(parse_order(order), [Recomputed(chunk) if recompute else chunk for chunk in chunks])
        with ddp.no_sync():
            executor.run(inputs, loss_of)
        ddp.finish_grad_sync()
        ran = [(record.modules, record.delayed) for record in executor.records]
        results.append((gradients(chunks), str(ran).replace("inner.", "")))
    (recomputed, ran), (plain, plain_ran) = results
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())
    assert ran == plain_ran


def test_three_iterations_with_one_executor():
    order = [1, 1, -1, -1, -1.5, -1.5]
    chunks, plain = (make_chunks(stand_in, [[delay, delay]]) for delay in (True, False))
    executor = ScheduleExecutor(parse_order(order), list(chunks))
    for _ in range(3):
        for model in (chunks, plain):
            if model is chunks:
                executor.run(batches(2), loss_of)
            else:
                plain_losses(plain, batches(2))
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
    assert all(map(torch.equal, chunks.parameters(), plain.parameters()))
    assert len(executor.records) == len(order)  # the latest run's


# ---- One rank's chunks, with other ranks' between them. ----


class Mailbox:
    """Every chunk's input and output gradient given; what comes out is kept."""

    def __init__(self, num_chunks, num_microbatches):
        generator = torch.Generator().manual_seed(2)
        keys = [(chunk, k) for chunk in range(1, num_chunks + 1) for k in range(num_microbatches)]
        self.inputs = {key: torch.randn(ROWS, WIDTH, generator=generator).requires_grad_() for key in keys}
        self.output_grads = {key: torch.randn(ROWS, WIDTH, generator=generator) for key in keys}
        self.outputs, self.input_grads = {}, {}

    def receive_input(self, chunk, microbatch):
        return self.inputs[chunk, microbatch]

    def send_output(self, chunk, microbatch, output):
        self.outputs[chunk, microbatch] = output

    def receive_output_grad(self, chunk, microbatch):
        return (self.output_grads[chunk, microbatch],)

    def send_input_grad(self, chunk, microbatch, grad):
        self.input_grads[chunk, microbatch] = grad


@given(orders.rules(max_chunks=3, max_microbatches=4), st.integers(0, 2**32))
def test_every_order_of_one_ranks_chunks_is_run(rules, seed):
    schedule = parse_order(orders.draw_order(rules, random.Random(seed)))
    delays = [[True, False]] * rules.num_chunks
    link = Mailbox(rules.num_chunks, rules.num_microbatches)
    chunks, plain = (make_chunks(stand_in, [[on and d for d in chunk] for chunk in delays]) for on in (True, False))
    ScheduleExecutor(schedule, list(chunks)).run_linked(link)
    for (chunk, k), x in link.inputs.items():
        y = plain[chunk - 1](x)
        y.backward(link.output_grads[chunk, k])
        assert torch.equal(link.outputs[chunk, k][0], y)
        assert torch.equal(link.input_grads[chunk, k][0], x.grad)
    grads = gradients(chunks)
    assert all(torch.equal(grads[name], gradient) for name, gradient in gradients(plain).items())


def test_a_link_must_give_a_gradient_for_each_output():
    class Wrong(Mailbox):
        def receive_output_grad(self, chunk, microbatch):
            return ()

    executor = ScheduleExecutor(parse_order([1, -1]), list(make_chunks(stand_in, [[True]])))
    with pytest.raises(ValueError, match=r"entry 1 \(-1: .*: got 0 gradients for 1 outputs"):
        executor.run_linked(Wrong(1, 1))


# ---- What ran where. ----


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
            return types.SimpleNamespace(context=types.SimpleNamespace(empty=lambda: not self._waiting))

        def need_backward_dw(self):
            return True

        def backward_dw(self):
            assert self._waiting
            super().backward_dw()

    order = [1, 1, -1, 1, -1, -1.5, -1, -1.5, -1.5]
    chunk = nn.Sequential(Engine(WIDTH, WIDTH), Engine(WIDTH, WIDTH), Engine(WIDTH, WIDTH))
    chunk[1].weight.requires_grad_(False)
    executor = ScheduleExecutor(parse_order(order), [chunk])
    for _ in range(2):
        executor.run(batches(3), loss_of)
        wgrads = [record.modules for record in executor.records if record.entry.kind is Kind.WGRAD]
        assert wgrads == [("2", "0")] * 3


# ---- Between chunks. ----


def test_inputs_that_want_a_gradient_get_it():
    chunks, plain = (make_chunks(stand_in, [[delay], [delay]]) for delay in (True, False))
    inputs, plain_inputs = ([x.requires_grad_() for x in batches(2)] for _ in range(2))
    scale = torch.ones(WIDTH, requires_grad=True)
    ScheduleExecutor(parse_order([1, 2, -2, -1, 1, 2, -2, -1]), list(chunks)).run(
        [inputs[0], inputs[1] * scale], loss_of
    )
    plain_losses(plain, plain_inputs)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(inputs, plain_inputs, strict=True))
    assert scale.grad is not None


def test_several_tensors_and_integers_pass_between_chunks():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(5, WIDTH), DelayingLinear(WIDTH, WIDTH)

        def forward(self, tokens, shift):
            x = self.linear(self.embed(tokens))
            return x, tokens + shift, x.square()

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, WIDTH)

        def forward(self, x, tokens, unused):
            return [x + self.embed(tokens)]

    torch.manual_seed(0)
    chunks = nn.ModuleList([First(), Second()])
    plain = copy.deepcopy(chunks)
    inputs = [(torch.tensor([0, 1, k]), torch.tensor(k)) for k in range(3)]
    ScheduleExecutor(parse_order([1, 1, 2, 2, 1, -2, -2, 2, -1, -1, -2, -1.5, -1, -1.5, -1.5]), list(chunks)).run(
        inputs, loss_of
    )
    for k, arguments in enumerate(inputs):
        loss_of(*plain[1](*plain[0](*arguments)), microbatch=k).backward()
        plain[0].linear.backward_dw()
    grads = gradients(chunks)
    assert all(torch.equal(grads[name], gradient) for name, gradient in gradients(plain).items())


def test_a_frozen_first_chunk_has_nothing_to_do_in_backward():
    chunks = make_chunks(unfused, [[True], [True]])
    chunks[0].requires_grad_(False)
    executor = ScheduleExecutor(parse_order([1, 2, -2, -1, -2.5]), list(chunks))
    executor.run(batches(1), loss_of)
    assert all(param.grad is None for param in chunks[0].parameters())
    assert all(param.grad is not None for param in chunks[1].parameters())
    assert [record.modules for record in executor.records if record.entry.chunk == 1] == [("0", "1"), (), ()]


def test_a_frozen_pipeline_has_nothing_to_do_in_backward():
    chunks = make_chunks(unfused, [[True], [True]]).requires_grad_(False)
    executor = ScheduleExecutor(parse_order([1, 2, -2, -1]), list(chunks))
    executor.run(batches(1), loss_of)
    assert [record.modules for record in executor.records[2:]] == [()] * 4


def test_a_layer_whose_output_is_no_tensor_still_has_its_slot():
    class Boxed(DelayingLinear):
        def forward(self, x):
            return types.SimpleNamespace(value=super().forward(x))

    class Unboxing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Boxed(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x).value

    executor = ScheduleExecutor(parse_order([1, -1, 1, -1.5, -1, -1.5]), [Unboxing()])
    executor.run(batches(2), loss_of)
    assert [record.modules for record in executor.records if record.entry.kind is Kind.WGRAD] == [("linear",)] * 2


# ---- Refusals. ----


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
        refused([1, -1, -1.5], chunks, RuntimeError, r"entry 2 \(-1.5: wgrad .* in inference: gradients are disabled")
        refused([1, -1], chunks, RuntimeError, r"entry 1 \(-1: dgrad .* in inference: gradients are disabled")


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
    with pytest.raises(TypeError, match="chunk 1 must be a module or a list of modules, not of function"):
        ScheduleExecutor(parse_order([1, -1]), [[lambda x: x]])
    with pytest.raises(TypeError, match="chunk 1 must be a module or a list of modules, not function"):
        ScheduleExecutor(parse_order([1, -1]), [lambda x: x])
    with pytest.raises(ValueError, match="chunk 1 has no layers"):
        ScheduleExecutor(parse_order([1, -1]), [[]])


def test_inputs_and_losses_must_fit():
    chunks = make_chunks(stand_in, [[True]])
    refused([1, -1], chunks, ValueError, "2 inputs for a schedule of 1 microbatches", inputs=batches(2))
    refused([1, -1], chunks, ValueError, r"got shape \(3, 8\) for microbatch 0", loss=lambda y, microbatch: y)
    refused([1, -1], chunks, ValueError, "got a float for microbatch 0", loss=lambda y, microbatch: 1.0)
    refused([1, -1], chunks, TypeError, "loss_fn must be a function", loss=None)

    class Wrong(nn.Module):
        def forward(self, x):
            return x, None

    refused([1, -1], [Wrong()], TypeError, "chunk 1 must return a tensor or a tuple of tensors, not Tensor, NoneType")


def test_what_was_pending_before_is_refused():
    chunks = make_chunks(stand_in, [[True]])
    chunks[0](batches(1)[0]).sum().backward()
    refused([1, -1, -1.5], chunks, RuntimeError, "1 of chunk 1 has pending weight gradients from before this run")


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
