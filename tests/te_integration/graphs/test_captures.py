"""What a capture runs, which memory its graphs share, and what they give away."""

import weakref
from typing import ClassVar

import pytest
import torch
from foreign import ForeignLinear, ForeignProvider
from graphed import ROWS, WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear, Sequential, graphed_chunks, make_graphed_callables
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order


def batch(seed=0, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def linear(**options):
    torch.manual_seed(0)
    return Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, **options)


# ---- What a capture runs. ----


@pytest.mark.parametrize("warmups", [1, 2])
def test_each_kind_of_arguments_is_tried_once(warmups):
    class Counting(nn.Linear):
        seen: ClassVar[list[int]] = []

        def forward(self, x):
            self.seen.append(len(x))
            return super().forward(x)

    layer = Counting(WIDTH, WIDTH)
    samples = [[batch(rows=rows)] for rows in (4, 4, 3)]
    make_graphed_callables([layer], samples, order=[1, -1] * 3, num_warmup_iters=warmups)
    # One more with the kernels of a first write, and the capture of each microbatch.
    assert layer.seen.count(4) == warmups + 1 + 2
    assert layer.seen.count(3) == warmups + 1 + 1


def test_a_layer_that_is_refused_for_its_flags_keeps_none():
    """With one, the provider would take the next plain gradient of that weight for a placeholder."""
    layer = nn.Sequential(*(ForeignLinear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    ForeignProvider(layer)
    with pytest.raises(ValueError, match="writes main_grad in its own backward"):
        make_graphed_callables([layer], [(batch(),)])
    assert [param.grad_added_to_main_grad for param in layer.parameters()] == [False, False]


def test_sample_arguments_that_a_layer_changes_in_place_stay():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = batch().detach()
    (graphed,) = make_graphed_callables([InPlace()], [(x,)])
    assert torch.equal(x, batch()) and torch.equal(graphed(batch(1).detach()), batch(1) * 2)


def test_a_buffer_of_inference_mode():
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.inference_mode():
        layer.register_buffer("table", torch.ones(3))
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    assert torch.equal(graphed(batch()), layer(batch()))


def test_layers_around_others_are_captured():
    """They have ``backward_dw`` for what is inside, and nothing inside delays."""
    (call,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], [(batch(),)])
    call.reset()
    for around in (Sequential(nn.Tanh()), nn.Sequential(call)):
        (graphed,) = make_graphed_callables([around], [(batch(),)])
        assert torch.equal(graphed(batch(1)), around(batch(1)))


def test_a_container_that_passes_on_what_its_layers_delay_is_captured():
    class Container(nn.Sequential):
        def need_backward_dw(self):
            return any(layer.need_backward_dw() for layer in self)

        def backward_dw(self):
            for layer in self:
                layer.backward_dw()

    container = Container(linear(delay_wgrad_compute=True))
    ddp = DistributedDataParallel(nn.ModuleList([container]))
    (graphed,) = make_graphed_callables([container], [(batch(),)])
    graphed(batch()).sum().backward()
    assert graphed.need_backward_dw() and container.need_backward_dw()
    graphed.backward_dw()
    ddp.finish_grad_sync()
    assert not container.need_backward_dw()


def test_all_that_is_captured_is_on_one_device_that_has_graphs():
    layers, on_meta = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, device="meta")], torch.ones(1, device="meta")
    for modules, given, devices in (
        (layers, [(batch(),)] * 2, "cpu, meta"),
        (layers[::-1], [(batch(),)] * 2, "cpu, meta"),
        ([nn.Identity()], [(batch(), on_meta)], "cpu, meta"),
        ([nn.Identity()], [(on_meta,)], "meta"),
        ([nn.Identity()], [(3,)], "none"),
    ):
        with pytest.raises(ValueError, match=f"one device, CUDA or CPU: tensors are on {devices}$"):
            make_graphed_callables(modules, given)


def test_what_was_written_by_hand_before_a_capture_is_refused_behind_it():
    layer = linear(bias=False)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    layer.weight.main_grad.fill_(2.0)
    make_graphed_callables([layer], [(batch(),)])
    assert layer.weight.main_grad.eq(2.0).all()
    with pytest.raises(RuntimeError, match="was written to by hand"):
        layer(batch()).sum().backward()
    ddp.abandon_iteration()


def test_a_constant_may_be_nan():
    class Filled(nn.Module):
        def forward(self, x, fill):
            return x.masked_fill(x > 0, fill)

    (graphed,) = make_graphed_callables([Filled()], [(batch(), torch.nan)])
    assert torch.equal(graphed(batch(1), torch.nan).isnan(), batch(1) > 0)


# ---- Memory. ----


def test_captured_graphs_of_autograd_are_freed():
    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nodes.append(weakref.ref(ctx))
            return x.square()

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    class Layer(nn.Module):
        def forward(self, x):
            return Op.apply(x)

    nodes = []
    calls = make_graphed_callables([Layer()], [(batch(),)] * 2, order=[1, -1, 1, -1])
    assert len(nodes) > len(calls) and not any(node() for node in nodes)


@pytest.mark.parametrize("change", [torch.t, torch.Tensor.bfloat16])
def test_outputs_have_the_strides_and_dtype_of_eager_ones(change):
    """Whatever memory of their shape and size is free."""

    class Changing(nn.Module):
        def forward(self, x):
            return change(x.exp())

    layer = Changing()
    for call in make_graphed_callables([layer], [(batch(rows=WIDTH),)] * 3, order=[1, -1] * 3):
        x = batch(1, rows=WIDTH)
        y = call(x)
        assert y.stride() == layer(x).stride() and y.dtype is layer(x).dtype
        assert torch.equal(y, layer(x))
        y.sum().backward()
        assert torch.equal(x.grad, *torch.autograd.grad(layer(x).sum(), x))


def test_a_gradient_in_memory_of_the_next_graph_may_be_transposed():
    """What chunk 2 returns lies where chunk 1 takes its gradients, and a hook has transposed it between."""
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        calls = [[layer] * 2 for layer in layers]
        if graphed:
            samples = [(batch(rows=WIDTH),) for _ in range(4)]
            one = make_graphed_callables(layers, samples, order=[1, 2, -2, -1] * 2, num_layers_per_chunk=[1, 1])
            calls = [one[:2], one[2:]]
        for microbatch in range(2):
            y = calls[0][microbatch](batch(microbatch, rows=WIDTH))
            y.register_hook(torch.t)
            calls[1][microbatch](y).square().sum().backward()
        outcomes.append([param.grad for layer in layers for param in layer.parameters()])
    torch.testing.assert_close(*outcomes)


class Branches(nn.Module):
    """Two outputs of one input."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x), self.right(x)


class PassesOn(nn.Module):
    """Two inputs, of which one goes on as it is, in either place: its gradient is that of an output."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, *inputs):
        outputs = [each.tanh() for each in inputs]
        outputs[self.place] = inputs[self.place].view(-1, WIDTH)
        return tuple(outputs)


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_goes_on_as_it_is_stays_until_it_is_read(place):
    """The layer before takes its gradients in the same memory, in another order."""
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = [Branches(), PassesOn(place)]
        calls = layers
        if graphed:
            calls = make_graphed_callables(layers, [(batch(),), (batch(1), batch(2))], order=[1, -1])
        left, right = calls[1](*calls[0](batch(3)))
        (left.square() + 3 * right).sum().backward()
        outcomes.append([param.grad for param in layers[0].parameters()])
    torch.testing.assert_close(*outcomes)


def test_large_gradients_of_parameters_share_memory_and_small_ones_are_copied_less():
    def nbytes(width):
        layer = nn.Linear(width, width, bias=False)
        samples = [(torch.ones(1, width, requires_grad=True),) for _ in range(3)]
        calls = make_graphed_callables([layer], samples, order=[1, -1] * 3)
        eager = nn.Linear(width, width, bias=False)
        eager.load_state_dict(layer.state_dict())
        for number, call in enumerate(calls):
            for each in (call, eager):
                each(torch.full((1, width), 1.0 + number, requires_grad=True)).square().sum().backward()
        assert torch.equal(layer.weight.grad, eager.weight.grad)
        return calls[0]._graphs._order.buffers.nbytes - 4 * (width * 4)  # x, y, dy and dx

    assert nbytes(512) == 2**20
    assert nbytes(8) == 0


# ---- What they give away. ----


def test_a_hook_before_the_wrappers_may_keep_gradients():
    layer, kept = nn.Linear(WIDTH, WIDTH), []
    layer.weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    for seed in range(2):
        with ddp.no_sync():
            graphed(batch(seed)).square().sum().backward()
    for seed, grad in enumerate(kept):
        assert torch.equal(grad, *torch.autograd.grad(layer(batch(seed)).square().sum(), layer.weight))


def test_what_an_eager_backward_has_delayed_before_comes_first():
    layer = linear(delay_wgrad_compute=True, bias=False)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with ddp.no_sync():
        layer(x).sum().backward()
        graphed(2 * x).sum().backward()
    graphed.backward_dw()
    assert not graphed.need_backward_dw() and not layer.need_backward_dw()
    assert torch.equal(layer.weight.main_grad, torch.full((WIDTH, WIDTH), 3.0 * ROWS))


def test_in_a_layer_of_which_a_part_delays_the_last_module_comes_first():
    """Behind ``reset()`` too."""
    parts = [linear(delay_wgrad_compute=delays, bias=False) for delays in (True, False, True)]
    layer = nn.Sequential(*parts)
    ddp, log = DistributedDataParallel(nn.ModuleList([layer])), []
    for part in (parts[0], parts[2]):
        part.register_wgrad_accumulation_and_reduce_hooks(lambda part=part: log.append(part))
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    found = []
    for _ in range(2):
        log.clear()
        graphed(batch(1)).square().sum().backward()
        graphed.backward_dw()
        assert log == [parts[2], parts[0]] and not graphed.need_backward_dw()
        ddp.finish_grad_sync()
        found.append([part.weight.main_grad.clone() for part in parts])
        ddp.zero_grad_buffer()
        graphed.reset()
    assert all(map(torch.equal, *found))


def test_recomputed_uses_of_a_weight_are_one_backward_to_a_foreign_provider():
    """It asks for the first write of a backward to overwrite; each block of a reentrant checkpoint runs its own."""
    outcomes = []
    for graphed in (False, True):
        layers = nn.ModuleList(linear(bias=False) for _ in range(2))
        layers[1].weight = weight = layers[0].weight
        provider = ForeignProvider(layers)
        calls = make_graphed_callables(list(layers), [(batch(),)] * 2) if graphed else layers
        weight.main_grad.fill_(torch.nan)
        weight.overwrite_main_grad = True
        x = batch(1)
        for call in calls:
            x = checkpoint(call, x, use_reentrant=True)
        x.square().sum().backward()
        outcomes.append(weight.main_grad.clone())
        assert provider.seen
    assert torch.equal(*outcomes) and outcomes[0].isfinite().all()


class InAList(nn.Module):
    """Returns its output in a list."""

    def forward(self, x):
        return [x.tanh()]


def test_layers_of_a_chunk_may_return_lists():
    order, losses = [1, -1], []
    schedule = parse_order(order, num_layers_per_chunk=[2])
    torch.manual_seed(0)
    layers = [InAList(), nn.Linear(WIDTH, WIDTH)]
    chunks = graphed_chunks(make_graphed_callables(layers, [(batch(),)] * 2, order=order), schedule)
    for seed in (2, 3):
        assert torch.equal(chunks[0](batch(seed)), layers[1](batch(seed).tanh())), "without an executor"
    for parts in (chunks, [layers]):
        losses += ScheduleExecutor(schedule, parts).run([batch(1)], lambda y, microbatch: y.square().sum())
    assert torch.equal(*losses)
    assert list(chunks[0].parameters()) == list(layers[1].parameters())
    assert [name for name, _ in chunks[0].named_parameters("block")] == ["block.1.weight", "block.1.bias"]


def test_a_chunk_of_which_one_layer_delays():
    order = [1, 1, -1, -1, -1.5, -1.5]
    layers = [linear(delay_wgrad_compute=True, bias=False), linear(bias=False)]
    ddp = DistributedDataParallel(nn.ModuleList(layers))
    schedule = parse_order(order, num_layers_per_chunk=[2])
    (chunk,) = graphed_chunks(make_graphed_callables(layers, [(batch(),)] * 4, order=order), schedule)
    outputs = [chunk(batch(seed)) for seed in range(2)]
    with ddp.no_sync():
        for output in outputs:
            output.square().sum().backward()
    written = []
    for _ in outputs:
        assert chunk.need_backward_dw()
        chunk.backward_dw()
        written.append(layers[0].weight.main_grad.clone())
    x = batch()
    expected = torch.autograd.grad(layers[1](layers[0](x)).square().sum(), layers[0].weight)
    assert not chunk.need_backward_dw(), "a microbatch each time"
    torch.testing.assert_close(written[:1], [*expected])
    ddp.finish_grad_sync()


def test_without_gradients_the_layer_itself_runs_between_the_steps_of_an_order():
    layer = nn.Linear(WIDTH, WIDTH)
    first, second = make_graphed_callables([layer], [(batch(),)] * 2, order=[1, 1, -1, -1])
    outputs = [first(batch())]
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(second(batch(1)), layer(batch(1)))
    outputs.append(second(batch()))
    for output in outputs:
        output.sum().backward()


def test_of_a_layer_whose_graphs_are_gone_any_part_may_wait():
    layer = nn.Sequential(*(linear(delay_wgrad_compute=True, bias=False) for _ in range(2)))
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    graphed.reset()
    graphed(batch()).sum().backward()
    layer[1].backward_dw()
    assert graphed.need_backward_dw()
    graphed.backward_dw()
    assert not graphed.need_backward_dw()
    ddp.finish_grad_sync()


def test_a_layer_of_which_only_what_it_does_not_register_requires_a_gradient_has_a_forward():
    factor = torch.full((WIDTH,), 2.0, requires_grad=True)

    class Scaled(nn.Module):
        def forward(self, x):
            return x * factor

    x = batch().detach()
    (graphed,) = make_graphed_callables([Scaled()], [(x,)])
    assert torch.equal(graphed(x + 1), 2 * (x + 1))


def test_attributes_that_the_layer_has_are_set_there():
    layer = nn.Linear(WIDTH, WIDTH)
    (graphed,) = make_graphed_callables([layer], [(batch(),)])
    graphed.note = "its own"
    graphed.out_features = 1
    assert layer.out_features == graphed.out_features == 1 and not hasattr(layer, "note")
