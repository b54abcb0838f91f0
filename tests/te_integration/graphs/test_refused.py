"""What graphs cannot do is refused by name, and leaves the model as it was."""

import pytest
import torch
from delaying import DelayingLinear
from foreign import ForeignLinear, ForeignProvider, LazyForeignProvider
from graphed import ROWS, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.graphs.capture import CapturedGraph, GraphPool
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    WgradQueue,
    delayed_wgrad,
    graphed_chunks,
    make_graphed_callables,
)
from maingrad.te_integration.graphs.layer_graphs import LayerGraphs
from maingrad.te_integration.pipeline import ScheduleError, parse_order


def x(**options):
    return torch.ones(ROWS, WIDTH, **options).requires_grad_()


def samples(count):
    return [(x(),) for _ in range(count)]


def linear(**options):
    return Linear(WIDTH, WIDTH, **{"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, **options})


def wrapped(*layers):
    return DistributedDataParallel(nn.ModuleList(layers))


def kinds_of(callables):
    return callables[0]._graphs._order.steps


# ---- Orders. ----


@pytest.mark.parametrize(
    "order, error",
    [
        ([1, -1.5, -1], "comes before its dgrad"),
        ([1, 1, -1, -1, -1.5], "has no wgrad"),
        ([1, 1, -1], "has no dgrad"),
        ([1, -1, -2.5], "is about chunk 2 of 1"),
    ],
)
def test_an_invalid_order(order, error):
    layer = linear()
    ddp = wrapped(layer)
    with pytest.raises(ScheduleError, match=error):
        make_graphed_callables([layer], samples(2), order=order, num_layers_per_chunk=[1])
    assert ddp.is_clear


def test_wgrad_entries_of_a_chunk_in_which_nothing_delays():
    first, second = linear(), linear(delay_wgrad_compute=False)
    ddp = wrapped(first, second)
    with pytest.raises(ValueError, match=r"wgrad entries \(-2\.5\) of chunk 2, and none of its layers delays"):
        make_graphed_callables([first, second], samples(2), order=[1, 2, -2, -2.5, -1, -1.5])
    assert ddp.is_clear
    second.weight.requires_grad_(False)
    second.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"wgrad entries \(-1\.5\) of chunk 1, and no output of its layers requires"):
        make_graphed_callables([second], [(torch.ones(ROWS, WIDTH),)], order=[1, -1, -1.5])
    layers, given = [second, nn.Linear(WIDTH, WIDTH)], [(torch.ones(ROWS, WIDTH),)] * 2
    with pytest.raises(ValueError, match="none of its layers delays"):
        make_graphed_callables(layers, given, order=[1, -1, -1.5], num_layers_per_chunk=[2])


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_layer_that_uses_a_module_of_elsewhere(ran_before):
    class Layer(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.own, self.others = linear(delay_wgrad_compute=False), [other]

        def forward(self, x):
            return self.others[0](self.own(x))

    other = linear(delay_wgrad_compute=False)
    layer = Layer(other)
    ddp = wrapped(other, layer)
    if ran_before:
        layer(x()).sum().backward()
        ddp.zero_grad()
    with pytest.raises(ValueError, match="is used by a captured layer that does not register it"):
        make_graphed_callables([layer], [(x(),)])
    layer(x()).sum().backward()
    assert other.weight.grad.any()


def test_only_layers_that_delay_get_wgrad_graphs_last_layer_first():
    layers = [linear(), linear(delay_wgrad_compute=False), nn.Linear(WIDTH, WIDTH), linear()]
    ddp = wrapped(*layers)
    for param in layers[2].parameters():
        param.requires_grad_(False)
    ddp = wrapped(*list(ddp.unwrap()))
    callables = make_graphed_callables(layers, samples(4), order=[1, -1, -1.5], num_layers_per_chunk=[4])
    steps = [step.removeprefix("the ").split(" (")[0] for step in kinds_of(callables)]
    assert steps == [
        *(f"forward of layer {layer}" for layer in range(4)),
        *(f"dgrad of layer {layer}" for layer in (3, 2, 1, 0)),
        "wgrad of layer 3",
        "wgrad of layer 0",
    ]
    out = x()
    for layer in callables:
        out = layer(out)
    out.sum().backward()
    assert [layer.need_backward_dw() for layer in callables] == [True, False, False, True]
    for layer in reversed(callables):
        layer.backward_dw()
    ddp.finish_grad_sync()


def test_a_layer_through_which_no_backward_goes_has_a_forward_alone():
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    (graphed,) = make_graphed_callables([frozen], [(torch.ones(ROWS, WIDTH),)])
    assert len(kinds_of([graphed])) == 1
    assert torch.equal(graphed(torch.zeros(ROWS, WIDTH)), frozen.bias.expand(ROWS, WIDTH))


def test_numbers_that_do_not_fit():
    layer = linear()
    ddp = wrapped(layer)
    with pytest.raises(ValueError, match="sample_args has 1 entries, and there are 2 callables"):
        make_graphed_callables([layer], samples(1), order=[1, 1, -1, -1])
    with pytest.raises(ValueError, match="1 layers for chunks of"):
        make_graphed_callables([layer], samples(2), order=[1, -1], num_layers_per_chunk=[2])
    with pytest.raises(ValueError, match="num_layers_per_chunk belongs to an order"):
        make_graphed_callables([layer], samples(1), num_layers_per_chunk=[1])
    with pytest.raises(TypeError, match="sample_args is a list of tuples"):
        make_graphed_callables([layer], x())
    with pytest.raises(TypeError, match="sample_args is a list of tuples"):
        make_graphed_callables([layer], [*samples(1), x()], order=[1, 1, -1, -1])
    with pytest.raises(ValueError, match="sample_kwargs has 2 entries, and there are 1 callables"):
        make_graphed_callables([layer], samples(1), sample_kwargs=[{}, {}])
    with torch.no_grad(), pytest.raises(RuntimeError, match="while gradients are disabled: there is no backward"):
        make_graphed_callables([layer], samples(1))
    with pytest.raises(ValueError, match="num_warmup_iters must be 1 or more"):
        make_graphed_callables([layer], samples(1), num_warmup_iters=0)
    (graphed,) = make_graphed_callables([layer], samples(1), order=[1, -1])
    with pytest.raises(ValueError, match="1 callables for 2 microbatches of 1 layers"):
        graphed_chunks([graphed], parse_order([1, 1, -1, -1], num_layers_per_chunk=[1]))
    two = make_graphed_callables([layer], samples(2), order=[1, 1, -1, -1])
    with pytest.raises(ValueError, match="2 callables for 1 microbatches of 1 layers"):
        graphed_chunks(two, parse_order([1, -1], num_layers_per_chunk=[1]))
    with pytest.raises(ValueError, match="this schedule knows no layers"):
        graphed_chunks(two, parse_order([1, 1, -1, -1]))
    assert ddp.is_clear


# ---- Modules. ----


def hooked():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_a_hook_on_a_weight():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[1].weight.register_hook(lambda grad: grad * 2)
    return layers


def lazily_provided():
    layer = linear()
    LazyForeignProvider(layer)
    return layer


def foreign_consumer():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), ForeignLinear(WIDTH, WIDTH, bias=False))
    ForeignProvider(layer)
    return layer


def compiled():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.compile()
    return layer


def with_a_buffer_elsewhere():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_buffer("mask", torch.ones(1, device="meta"))
    return layer


@pytest.mark.parametrize(
    "make, error",
    [
        (hooked, "has hooks on its forward or backward"),
        (with_a_hook_on_a_weight, r"parameter '1.weight' has a hook \(register_hook\)"),
        (lazily_provided, "parameter 'weight' is sharded"),
        (foreign_consumer, "writes main_grad in its own backward"),
        (lambda: nn.Sequential(nn.Sequential(nn.Sequential(hooked()))), r"'0.0.0.*' .* has hooks"),
        (compiled, "is compiled"),
        (lambda: torch.compile(nn.Linear(WIDTH, WIDTH)), "is compiled"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH))), "'0' .* is compiled"),
        (lambda: DelayingLinear(WIDTH, WIDTH), "delays weight gradients by itself"),
        (lambda: wrapped(nn.Linear(WIDTH, WIDTH)), "give the layers inside"),
        (lambda: nn.Linear(WIDTH, WIDTH, device="meta"), "one device"),
        (with_a_buffer_elsewhere, "one device.* tensors are on cpu, meta"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.sampled(21)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_module_that_cannot_be_captured(make, error):
    with pytest.raises(ValueError, match=error):
        make_graphed_callables([make()], samples(1))


def test_a_wrapper_of_torch_what_is_no_module_and_a_later_module():
    def on_a_rank():
        with pytest.raises(ValueError, match="give the layers inside of the wrapper"):
            make_graphed_callables([TorchDDP(nn.Linear(WIDTH, WIDTH))], samples(1))

    simulate(on_a_rank, 1)
    with pytest.raises(TypeError, match=r"module 0 .* must be a module, not a function"):
        make_graphed_callables([lambda x: x], samples(1))
    with pytest.raises(ValueError, match=r"module 1 \(Linear\) has hooks"):
        make_graphed_callables([nn.Linear(WIDTH, WIDTH), hooked()], samples(2))


def test_experts_whose_rows_the_host_reads():
    layer = GroupedLinear(2, WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match="on a CPU the host reads the rows of each expert"):
        make_graphed_callables([layer], [(torch.randn(4, WIDTH), torch.tensor([1, 3]))])


def test_sharded_parameters():
    def on_a_rank():
        layer = nn.Sequential(linear(delay_wgrad_compute=False))
        fully_shard(layer)
        with pytest.raises(ValueError, match="is sharded"):
            make_graphed_callables([layer[0]], samples(1))

    simulate(on_a_rank, 2)


def test_parameters_that_torch_shards():
    def on_a_rank():
        layer = nn.Linear(WIDTH, WIDTH)
        torch_fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="parameter 'weight' is sharded"):
            make_graphed_callables([layer], samples(1))

    simulate(on_a_rank, 2)


def test_a_fused_layer_without_a_provider():
    with pytest.raises(RuntimeError, match="nobody provided it"):
        make_graphed_callables([linear()], samples(1))


def test_a_block_that_delays():
    layer = linear(delay_wgrad_compute=False)
    ddp = wrapped(layer)
    queue = WgradQueue()
    with delayed_wgrad(queue), pytest.raises(ValueError, match="a capture in a delayed_wgrad block"):
        make_graphed_callables([layer], samples(1))
    (graphed,) = make_graphed_callables([layer], samples(1))
    with delayed_wgrad(queue), pytest.raises(RuntimeError, match="called in a delayed_wgrad block"):
        graphed(x())
    assert ddp.is_clear


# ---- A failed capture. ----


class ReadsOnce(nn.Module):
    """Reads a value on the host, but not in the first ``eager`` forwards."""

    def __init__(self, eager):
        super().__init__()
        self.linear = linear()
        self.left = eager

    def forward(self, x):
        y = self.linear(x)
        self.left -= 1
        return y if self.left >= 0 else y * y.sum().item()


@pytest.mark.parametrize("order", [None, [1, -1, -1.5]])
def test_a_capture_that_fails_leaves_the_model_as_it_was(order, monkeypatch):
    freed, reset = [], LayerGraphs.reset
    monkeypatch.setattr(LayerGraphs, "reset", lambda graphs: (freed.append(graphs), reset(graphs)))
    good, bad = linear(), ReadsOnce(eager=4)
    ddp = wrapped(good, bad)
    with torch.no_grad():
        good(x()), bad.linear(x())
    with ddp.no_sync():
        good(x()).sum().backward()  # something to keep
        good.backward_dw()
    before = {name: param.main_grad.clone() for name, param in ddp.named_parameters()}
    phases = [bucket.phase for bucket in ddp.buckets]
    with pytest.raises(RuntimeError, match="not permitted when capturing") as raised:
        make_graphed_callables([good, bad], samples(2), order=order, num_layers_per_chunk=order and [2])
    assert any("nothing was captured" in note for note in raised.value.__notes__)
    assert len(freed) == 2, "memory goes, though the error with its traceback is kept"
    for name, param in ddp.named_parameters():
        assert torch.equal(param.main_grad, before[name])
        assert param.grad is None
        assert not param.grad_added_to_main_grad
    assert [bucket.phase for bucket in ddp.buckets] == phases
    assert not good.need_backward_dw() and not bad.linear.need_backward_dw()
    good(x()).sum().backward()
    good.backward_dw()
    ddp.finish_grad_sync()
    assert torch.equal(good.weight.main_grad, 2 * before["module.0.weight"])


# ---- Calls. ----


@pytest.mark.parametrize(
    "argument, error",
    [
        (lambda: torch.ones(1, WIDTH).requires_grad_(), r"must be \(4, 8\), torch.float32 .* got \(1, 8\)"),
        (lambda: torch.ones(ROWS, WIDTH, dtype=torch.float64).requires_grad_(), "got .* torch.float64"),
        (lambda: torch.ones(ROWS, WIDTH), "which requires a gradient.* got .* which requires no gradient"),
        (lambda: 3, "got a int|another structure|the argument"),
    ],
)
@pytest.mark.sampled(10)
def test_an_argument_of_another_kind(argument, error):
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    with pytest.raises(RuntimeError, match=error):
        graphed(argument())


class Options(nn.Module):
    def forward(self, x, *, scale=1.0, shift=0.0, negate=False):
        return (-x if negate else x) * scale + shift


@pytest.mark.parametrize(
    "captured, called, error",
    [
        ({}, {"scale": 2.0}, "another structure"),
        ({}, {"shift": torch.ones(1)}, "another structure"),
        ({"negate": True}, {}, "another structure"),
        ({"negate": True}, {"negate": False}, "the argument True is part of the graph; got False"),
        ({"scale": torch.ones(1)}, {"shift": torch.ones(1)}, "another structure"),
    ],
)
def test_keyword_arguments_are_those_of_the_capture(captured, called, error):
    (graphed,) = make_graphed_callables([Options()], samples(1), sample_kwargs=[captured])
    with pytest.raises(RuntimeError, match=error):
        graphed(x(), **called)
    graphed(x(), **captured).sum().backward()


def test_the_number_of_arguments_is_that_of_the_capture():
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    for given in ((), (x(), x())):
        with pytest.raises(RuntimeError, match="another structure"):
            graphed(*given)


def test_a_call_while_another_graph_is_captured():
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    with (
        pytest.raises(RuntimeError, match="was called while another graph is captured"),
        CapturedGraph(GraphPool(torch.device("cpu"))).capture(),
    ):
        graphed(x())


def test_a_call_out_of_turn():
    layer = linear()
    ddp = wrapped(layer)
    first, second = make_graphed_callables([layer], samples(2), order=[1, 1, -1, -1, -1.5, -1.5])
    with ddp.no_sync():
        with pytest.raises(RuntimeError, match=r"the forward of layer 0 .* microbatch 1 was called where the forward"):
            second(x())
        a, b = first(x()), second(x())
        with pytest.raises(RuntimeError, match=r"the dgrad of .* microbatch 1 was called where the dgrad of"):
            b.sum().backward()
        a.sum().backward()
        with pytest.raises(RuntimeError, match=r"the wgrad of .* microbatch 0 was called where the dgrad of"):
            first.backward_dw()
        second.backward_dw()  # quiet: nothing of it is pending
        assert first.need_backward_dw() and not second.need_backward_dw()


def test_one_forward_is_held_at_a_time():
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    first = graphed(x())
    second = graphed(x())
    with pytest.raises(RuntimeError, match="its forward was run again since"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"was called where|its forward was run again since"):
        second.sum().backward()


def test_weights_that_are_not_what_was_captured():
    layer = nn.Linear(WIDTH, WIDTH)
    for name in ("weight", "bias"):
        (graphed,) = make_graphed_callables([layer], samples(1))
        kept = getattr(layer, name)
        for other in (kept.detach().clone(), kept.detach()):  # in the same memory too: its hooks are others
            setattr(layer, name, nn.Parameter(other))
            with pytest.raises(RuntimeError, match="it is not as it was captured"):
                graphed(x())
        setattr(layer, name, kept)
        kept.data = kept.data.clone()
        with pytest.raises(RuntimeError, match="it is not as it was captured"):
            graphed(x())
        (graphed,) = make_graphed_callables([layer], samples(1))
        kept.requires_grad_(False)
        with pytest.raises(RuntimeError, match="it is not as it was captured"):
            graphed(x())
    layer = nn.BatchNorm1d(WIDTH)
    for name in ("running_mean", "running_var"):
        (graphed,) = make_graphed_callables([layer], samples(1))
        setattr(layer, name, torch.ones(WIDTH))
        with pytest.raises(RuntimeError, match="it is not as it was captured"):
            graphed(x())


def test_modules_that_are_not_what_was_captured():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    (graphed,) = make_graphed_callables([layer], samples(1))
    hooked = (
        ("it", layer.register_forward_hook(print)),
        ("Linear '0'", layer[0].register_forward_pre_hook(print)),
        ("Linear '0'", layer[0].register_full_backward_hook(print)),
        ("Dropout '1'", layer[1].register_full_backward_pre_hook(print)),
    )
    for name, handle in hooked:
        with pytest.raises(RuntimeError, match=f"{name} is not as it was captured"):
            graphed(x())
        handle.remove()
    graphed(x()).sum().backward()
    layer[1].eval()
    given = x()
    assert torch.equal(graphed(given), layer[0](given)), "the layer runs, and draws no mask"
    layer[1].train()
    layer[1] = nn.Identity()
    with pytest.raises(RuntimeError, match="it is not as it was captured"):
        graphed(x())


def test_a_wrapper_of_another_time():
    layer = linear(delay_wgrad_compute=False)
    ddp = wrapped(layer)
    (graphed,) = make_graphed_callables([layer], samples(1))
    inside = ddp.unwrap()
    again = DistributedDataParallel(inside)
    with again.no_sync(), pytest.raises(RuntimeError, match="main_grad of a weight has moved"):
        graphed(x()).sum().backward()


def test_gradients_that_only_the_layer_can_give():
    layer = linear(delay_wgrad_compute=False)
    ddp = wrapped(layer)
    (graphed,) = make_graphed_callables([layer], samples(1))
    before = layer.weight.main_grad.clone()
    a = x()
    with pytest.raises(RuntimeError, match=r"autograd\.grad\(\), backward\(inputs=\.\.\.\) and split backwards need"):
        torch.autograd.grad(graphed(a).sum(), a)
    with pytest.raises(RuntimeError, match="create_graph=True needs the layer itself"):
        torch.autograd.grad(graphed(a).sum(), a, create_graph=True)
    layer.weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"the weight got a hook \(register_hook\) after the capture"):
        graphed(a).sum().backward()
    assert torch.equal(layer.weight.main_grad, before)
    assert ddp.is_clear
    delayed = linear()
    ddp = wrapped(delayed)
    (graphed,) = make_graphed_callables([delayed], samples(1))
    delayed.weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"the weight got a hook \(register_hook\) after the capture"):
        graphed(a).sum().backward()
    assert ddp.is_clear
    options = {"fuse_wgrad_accumulation": True}
    for layer in (LayerNormMLP(WIDTH, 16, **options), Linear(WIDTH, 16, parameters_split=["q", "k"], **options)):
        ddp = wrapped(layer)
        (graphed,) = make_graphed_callables([layer], samples(1))
        for name in layer.weight_names:
            handle = layer.get_parameter(name).register_hook(lambda grad: grad)
            with pytest.raises(RuntimeError, match=r"the weight got a hook \(register_hook\) after the capture"):
                graphed(a).sum().backward()
            handle.remove()
            with pytest.raises(RuntimeError, match="split backwards need the layer itself"):
                graphed(a).sum().backward(inputs=[layer.get_parameter(name)])
        assert ddp.is_clear
    plain = nn.Linear(WIDTH, WIDTH)
    (graphed,) = make_graphed_callables([plain], samples(1))  # autograd delivers all gradients: every backward works
    (dx,) = torch.autograd.grad(graphed(a).sum(), a)
    assert torch.equal(dx, *torch.autograd.grad(plain(a).sum(), a))


def test_changes_between_forward_and_backward():
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    y = graphed(x())
    y.add_(1)
    with pytest.raises(RuntimeError, match="an output was changed in place"):
        y.sum().backward()
    y = graphed(x())
    with torch.no_grad():
        graphed.bias.mul_(2)
    with pytest.raises(RuntimeError, match="a parameter was changed in place"):
        y.sum().backward()
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)  # the gradient of the input reads it all the same
    (graphed,) = make_graphed_callables([layer], samples(1))
    y = graphed(x())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="a parameter was changed in place"):
        y.sum().backward()


def test_a_reset_callable_runs_the_layer_and_the_others_their_graphs():
    layers = [linear(), linear()]
    ddp = wrapped(*layers)
    callables = make_graphed_callables(layers, samples(2), order=[1, -1, -1.5])
    outcomes = []
    for round_ in range(2):
        callables[1](callables[0](x())).sum().backward()
        for each in reversed(callables):
            assert each.need_backward_dw()
            each.backward_dw()
        ddp.finish_grad_sync()
        outcomes.append([layer.weight.main_grad.clone() for layer in layers])
        ddp.zero_grad_buffer()
        if round_ == 0:
            callables[1].reset()
            callables[1].reset()
    assert all(map(torch.equal, *outcomes))


def test_an_order_begins_anew_with_its_first_callable_that_was_not_reset():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    first, second = make_graphed_callables(layers, samples(2), order=[1, -1])
    first.reset()
    second(first(x()))  # an iteration that is given up
    second(first(x())).sum().backward()
    assert layers[0].weight.grad.any() and layers[1].weight.grad.any()


def test_an_order_does_not_begin_anew_while_another_layers_gradient_waits():
    """The dgrad of the layer that does not delay comes last."""
    layers = [linear(delay_wgrad_compute=False), linear()]
    ddp = wrapped(*layers)
    first, second = make_graphed_callables(layers, samples(2), order=[1, -1, -1.5])
    with ddp.no_sync():
        second(first(x())).sum().backward()
        with pytest.raises(RuntimeError, match="begins anew while 1 delayed weight gradients are pending"):
            first(x())
        second.backward_dw()


@pytest.mark.parametrize("step", ["dgrad", "wgrad"])
def test_a_reset_callable_has_no_graph_for_what_it_began(step):
    layer = linear()
    ddp = wrapped(layer)
    (graphed,) = make_graphed_callables([layer], samples(1))
    loss = graphed(x()).sum()
    if step == "wgrad":
        loss.backward()
    graphs = graphed._graphs._graphs.values()
    graphed.reset()
    assert not any(graph.is_captured for graph in graphs), "what was begun keeps no memory"
    with pytest.raises(RuntimeError, match=f"the {step} of module 0 .* has freed its graph"):
        loss.backward() if step == "dgrad" else graphed.backward_dw()
    layer.wgrad_queue.clear()
    ddp.zero_grad_buffer()
    layer(x()).sum().backward()


def test_another_autocast_than_that_of_the_capture():
    layer = linear(delay_wgrad_compute=False)
    ddp = wrapped(layer)
    (graphed,) = make_graphed_callables([layer], samples(1))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast is not as it was captured"):
        graphed(x())
    with torch.autocast("cpu", torch.float16, enabled=False):  # off, as it was: its dtype says nothing
        graphed(x()).sum().backward()
    ddp.finish_grad_sync()
    assert layer.weight.main_grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="autocast is not as it was captured"):
        graphed(x())
