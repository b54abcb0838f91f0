"""Orders run with real modules give bitwise the gradients of the plain order."""

import contextlib
import copy
import itertools
import random
import re
import types
from contextlib import nullcontext
from pathlib import Path

import orders
import pytest
import torch
from delaying import DelayingLinear
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import (
    ROWS,
    WIDTH,
    batches,
    fused,
    gradients,
    loss_of,
    make_chunks,
    plain_losses,
    scheduled,
    stand_in,
    unfused,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Sequential
from maingrad.te_integration.pipeline.executor import ScheduleExecutor
from maingrad.te_integration.pipeline.order import Kind, ScheduleError, parse_order


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


# ---- The page in docs/. ----

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "schedules.md").read_text() + (DOCS / "reference/schedules.md").read_text()


def test_the_documentations_code_runs_and_its_pictures_are_right(capsys):
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
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
@pytest.mark.sampled(1)
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


@pytest.mark.in_turn
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@given(st.integers(0, 2**32))
@settings(max_examples=10)
@pytest.mark.sampled(1)
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
@pytest.mark.sampled(4)
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
        # The stand-in and unfused modules leave their gradients in .grad, where a wrapper would look for hooks.
        ddp = DistributedDataParallel(chunks) if make_linear is fused else None
        executor = ScheduleExecutor(parse_order(order), [Recomputed(chunk) if recompute else chunk for chunk in chunks])
        with nullcontext() if ddp is None else ddp.no_sync():
            executor.run(inputs, loss_of)
        if ddp is not None:
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
    assert not any(module._forward_hooks for module in chunks.modules())


# ---- One rank's chunks, with other ranks' between them. ----


class Mailbox:
    """Provides every chunk's input and output gradient, and keeps the results."""

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


def test_a_link_may_say_that_an_output_of_its_last_chunk_is_unused():
    class Two(nn.Module):
        def forward(self, x):
            return x * 2, x.square()

    class FirstAlone(Mailbox):
        def receive_output_grad(self, chunk, microbatch):
            return self.output_grads[chunk, microbatch], None

    link = FirstAlone(1, 1)
    ScheduleExecutor(parse_order([1, -1]), [Two()]).run_linked(link)
    assert torch.equal(link.input_grads[1, 0][0], 2 * link.output_grads[1, 0])


def test_a_link_must_give_a_gradient_for_each_output():
    class Wrong(Mailbox):
        given = 0

        def receive_output_grad(self, chunk, microbatch):
            return (None,) * self.given

    for number in (0, 2):
        Wrong.given = number
        executor = ScheduleExecutor(parse_order([1, -1]), list(make_chunks(stand_in, [[True]])))
        with pytest.raises(ValueError, match=rf"entry 1 \(-1: .*: got {number} gradients for 1 outputs"):
            executor.run_linked(Wrong(1, 1))


# ---- Between chunks. ----


def test_what_a_microbatch_held_is_free_after_its_dgrads():
    """Activations and gradients between chunks: a schedule's memory is that of the microbatches under way."""
    held: list[StorageWeakRef] = []

    class Holding(nn.Linear):
        def forward(self, x):
            output = super().forward(x * 1.0)
            held.append(StorageWeakRef(x.untyped_storage()))
            output.register_hook(lambda grad: held.append(StorageWeakRef(grad.untyped_storage())))
            return output

    class First(Holding):
        def forward(self, x):
            assert all(each.expired() for each in held)
            output = super().forward(x)
            held.clear()  # the caller's input stays
            return output

    executor = ScheduleExecutor(parse_order([1, 2, -2, -1] * 3), [First(3, 3), Holding(3, 3)])
    executor.run([torch.ones(2, 3) for _ in range(3)], lambda output, microbatch: output.sum())
    assert len(held) == 3


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


def test_each_tensor_of_an_input_gets_its_gradient():
    class Product(nn.Module):
        def forward(self, x, y, mask):
            return x * y * mask

    x, y = (batch.requires_grad_() for batch in batches(2))
    scale = torch.ones(WIDTH, requires_grad=True)
    ScheduleExecutor(parse_order([1, -1]), [Product()]).run([(x * scale, y, torch.ones(WIDTH))], loss_of)
    expected = torch.autograd.grad(loss_of(x * scale * y, 0), (x, y, scale))
    assert all(map(torch.equal, (x.grad, y.grad, scale.grad), expected))


def test_a_loss_may_have_dims_of_size_one():
    chunks, plain = (make_chunks(stand_in, [[delay]]) for delay in (True, False))
    ScheduleExecutor(parse_order([1, -1]), list(chunks)).run(
        batches(1), lambda y, microbatch: loss_of(y, microbatch).view(1, 1)
    )
    plain_losses(plain, batches(1))
    assert all(torch.equal(gradients(chunks)[name], gradient) for name, gradient in gradients(plain).items())


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


def test_the_documentations_wrapper_around_chunks_is_reduced() -> None:
    _, code, _ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    model = names["model"]
    assert isinstance(model, DistributedDataParallel)
    assert model.is_reduced and len(names["losses"]) == 2
    assert all(record.view.any() for record in model.records)


def trained(delays: bool, **config: bool) -> list[torch.Tensor]:
    """Weights after three steps of a stock optimizer, which clears ``.grad`` and nothing else."""
    chunks = make_chunks(fused, [[delays], [delays]])
    ddp = DistributedDataParallel(chunks, DistributedDataParallelConfig(**config))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    inputs = batches(2)
    order = [1, 1, 2, -2, 2, -2, -2.5, -2.5, -1, -1, -1.5, -1.5] if delays else [1, 1, 2, -2, 2, -2, -1, -1]
    executor = ScheduleExecutor(parse_order(order), list(chunks))
    for _ in range(3):
        executor.run(inputs, loss_of)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in ddp.parameters()]


def test_a_plain_loop_around_a_schedule_with_a_stock_optimizer() -> None:
    chunks = make_chunks(unfused, [[False], [False]])
    optimizer = torch.optim.SGD(chunks.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        plain_losses(chunks, batches(2))
        assert torch.nn.utils.clip_grad_norm_(chunks.parameters(), 0.01) > 0.02
        optimizer.step()
        optimizer.zero_grad()
    expected = [param.detach() for param in chunks.parameters()]
    for delays, overlap in itertools.product((False, True), repeat=2):
        torch.testing.assert_close(trained(delays, overlap_grad_reduce=overlap), expected)
