"""What programs do with graphed callables beside running an order: each as with the layers themselves."""

from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from foreign import ForeignProvider
from graphed import ROWS, WIDTH, Case, train
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.graphs.capture import GraphPool
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear, graphed_chunks, make_graphed_callables
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order


def batch(seed=0, grad=False):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def linears(count, **options):
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, **options}
    return nn.ModuleList(Linear(WIDTH, WIDTH, **options) for _ in range(count))


def samples(count):
    return [(batch(grad=True),) for _ in range(count)]


# ---- Without an order. ----


class Net(nn.Module):
    def __init__(self, delayed, fused):
        super().__init__()
        torch.manual_seed(1)
        options = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first = LayerNormMLP(WIDTH, 16, **options)
        self.second = LayerNormLinear(WIDTH, WIDTH, **options)

    def forward(self, x):
        x = self.first(self.embed(x)) + x
        return self.second(x)


def train_net(graphed, delayed, fused, microbatches=3):
    net = Net(delayed, fused)
    ddp = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True))
    layers = [net.first, net.second]
    if graphed:
        net.second, net.first = make_graphed_callables(layers[::-1], samples(2), num_warmup_iters=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for k in range(microbatches):
            with ddp.no_sync() if k < microbatches - 1 else nullcontext():
                loss = ddp(batch(10 * step + k)).square().mean()
                loss.backward()
            for layer in (net.second, net.first) if delayed else ():
                assert layer.need_backward_dw()
                layer.backward_dw()
                assert not layer.need_backward_dw()
                layer.backward_dw()  # quiet
            losses.append(loss.detach())
        ddp.finish_grad_sync()
        ddp.expose_grads()
        optimizer.step()
        ddp.zero_grad_buffer()
    return [*losses, *(param.detach() for layer in (net.embed, *layers) for param in layer.parameters())]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.sampled(4)
def test_without_an_order_every_module_has_one_microbatch_in_flight(delayed, fused):
    eager, graphed = (train_net(each, delayed, fused) for each in (False, True))
    assert all(map(torch.equal, eager, graphed))


def test_a_callable_in_the_place_of_its_layer_keeps_the_keys_of_the_state_dict():
    net, other = Net(True, True), Net(True, True)
    ddp = DistributedDataParallel(net)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    keys = list(net.state_dict())
    net.first, net.second = make_graphed_callables([net.first, net.second], samples(2))
    assert list(net.state_dict()) == keys
    assert not net.load_state_dict(other.state_dict()).unexpected_keys
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
    kept = net.state_dict(keep_vars=True)
    assert all(kept[name.replace("module.", "")] is param for name, param in net.named_parameters())
    assert torch.equal(net(batch()), other(batch()).detach())  # the graphs read what was loaded
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict({**other.state_dict(), "first.more": torch.ones(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({key: tensor for key, tensor in other.state_dict().items() if key != "first.fc1_bias"})
    assert ddp.is_clear


def test_keys_of_a_callable_may_repeat_its_name():
    net, other = Net(True, True), Net(True, True)
    inside = net.first
    net.first = nn.Sequential(OrderedDict(first=inside))
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    state = {f"first.{key}" if key.startswith("first.") else key: value for key, value in other.state_dict().items()}
    ddp = DistributedDataParallel(net)
    net.first, net.second = make_graphed_callables([net.first, net.second], samples(2))
    net.load_state_dict(state)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in state.items())
    assert ddp.is_clear


def test_modules_that_share_a_pool_are_called_in_the_order_of_their_capture():
    outcomes = []
    for graphed in (False, True):
        layers = linears(2)
        ddp = DistributedDataParallel(layers)
        first, second = layers
        if graphed:
            pool = GraphPool(torch.device("cpu"))
            first, second = make_graphed_callables(list(layers), samples(2), pool=pool)
        with ddp.no_sync():
            for k in range(2):
                second(first(batch(k, grad=True))).square().mean().backward()
                for layer in (second, first):
                    layer.backward_dw()
            outcomes.append([layer.weight.main_grad.clone() for layer in layers])
            if graphed:
                with pytest.raises(
                    RuntimeError, match=r"the forward of module 1 \(Linear\) was called where the forward"
                ):
                    second(batch(grad=True))
    assert all(map(torch.equal, *outcomes))


def test_captures_run_in_the_pool_that_was_given():
    class Counted(GraphPool):
        uses = 0

        def on_stream(self):
            self.uses += 1
            return super().on_stream()

    pool, layers = Counted(torch.device("cpu")), linears(2)
    ddp = DistributedDataParallel(layers)
    make_graphed_callables(list(layers), samples(2), pool=pool)
    assert pool.uses >= 4, "a forward and a backward of each"
    assert ddp.is_clear


@pytest.mark.in_turn
def test_in_a_compiled_model_a_callable_is_a_graph_break():
    outcomes = []
    for compiled in (False, True):
        net = Net(True, True)
        ddp = DistributedDataParallel(net)
        (net.first,) = make_graphed_callables([net.first], samples(1))
        run = torch.compile(net, backend="eager") if compiled else net
        for k in range(3):
            with ddp.no_sync():
                run(batch(k)).square().mean().backward()
            net.second.backward_dw()
            net.first.backward_dw()
        outcomes.append([param.main_grad.clone() for param in net.parameters()])
    assert all(map(torch.equal, *outcomes))
    torch.compiler.reset()


def test_without_an_order_a_delayed_gradient_is_not_overtaken():
    (layer,) = linears(1)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    (graphed,) = make_graphed_callables([layer], samples(1))
    with ddp.no_sync():
        graphed(batch(grad=True)).sum().backward()
        with pytest.raises(RuntimeError, match=r"begins anew while 1 delayed weight gradients are pending"):
            graphed(batch(grad=True))
        graphed.backward_dw()
        graphed(batch(grad=True))


def test_arguments_by_keyword_and_constants_and_several_results():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, scale, *, negate, more):
            y = self.linear(x) * scale
            return {"y": -y if negate else y, "more": (more + 1, 7), "index": y.argmax(1)}

    torch.manual_seed(0)
    module = Two()
    x, more = batch(grad=True), batch(1)
    (graphed,) = make_graphed_callables([module], [(x, 2.0)], sample_kwargs=[{"negate": True, "more": more}])
    outcomes = []
    for run in (module, graphed):
        a = batch(5, grad=True)
        found = run(a, float("2.0"), negate=True, more=batch(6))  # another object of the same value
        assert not found["index"].requires_grad and not found["more"][0].requires_grad
        (found["y"] * found["more"][0]).sum().backward()
        outcomes.append([found["y"], *found["more"], found["index"], a.grad, module.linear.weight.grad])
        module.zero_grad()
    for eager, replayed in zip(*outcomes, strict=True):
        assert torch.equal(eager, replayed) if isinstance(eager, torch.Tensor) else eager == replayed
    with pytest.raises(RuntimeError, match=r"the argument 2\.0 is part of the graph; got 3\.0"):
        graphed(a, 3.0, negate=True, more=more)


@pytest.mark.parametrize("number", range(3))
def test_each_tensor_among_the_arguments_is_of_its_kind(number):
    class Sum(nn.Module):
        def forward(self, x, y, z):
            return x + y + z

    (graphed,) = make_graphed_callables([Sum()], [(batch(), batch(), batch())])
    given = [batch(), batch(), batch()]
    given[number] = torch.ones(1, WIDTH)
    with pytest.raises(RuntimeError, match=rf"tensor {number} of the arguments must be \(4, 8\).* got \(1, 8\)"):
        graphed(*given)


# ---- Between replays. ----


def evaluate(step, chunks, **_):
    for layers in [chunk.callables[0] for chunk in chunks] if hasattr(chunks[0], "callables") else chunks:
        for layer in layers:
            layer.eval()
            layer(batch(step))
            layer.train()
            with torch.no_grad():
                layer(batch(step)[:1])


def change_rate(step, optimizer, **_):
    optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)


def load(step, model, **_):
    if step == 1:
        model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def give_up(step, model, executor, **_):
    """A failed iteration after a good one: in the loss, so that forwards and dgrads of some microbatches have run."""

    def fails(y, microbatch):
        if microbatch == 1:
            raise ValueError("the loss")
        return y.sum()

    with pytest.raises(ValueError, match="the loss"):
        executor.run([batch(90), batch(91)], fails)
    for module in model.modules():
        if getattr(module, "wgrad_queue", None) is not None:
            module.wgrad_queue.clear()
    model.abandon_iteration()


@pytest.mark.parametrize("between", [evaluate, change_rate, load, give_up])
@pytest.mark.parametrize("way", ["ddp", "zero1"])
@pytest.mark.parametrize("order", ["lag 0", "lag 1", "interleaved"])
@pytest.mark.sampled(8)
def test_between_two_replays(between, way, order):
    if between is give_up and order == "interleaved":
        order = "lag 1"
    case = Case("LayerNormMLP", order, way=way)
    eager, graphed = (train(case, each, between) for each in (False, True))
    assert all(map(torch.equal, eager, graphed))


def test_an_order_that_is_run_twice_in_an_iteration_adds():
    """The first write of the second run was captured as an overwrite."""
    order = [1, 1, -1, -1, -1.5, -1.5]
    schedule = parse_order(order, num_layers_per_chunk=[1])
    outcomes = []
    for graphed in (False, True):
        (layer,) = linears(1)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 - 1)  # sums of integers are exact
        ddp = DistributedDataParallel(nn.ModuleList([layer]))
        chunks = [[layer]]
        if graphed:
            calls = make_graphed_callables([layer], samples(2), order=order)
            chunks = graphed_chunks(calls, schedule)
        executor = ScheduleExecutor(schedule, chunks)
        inputs = [torch.ones(ROWS, WIDTH).requires_grad_() * (k + 1) for k in range(4)]
        with ddp.no_sync():
            executor.run([x.detach().requires_grad_() for x in inputs[:2]], lambda y, microbatch: y.sum())
        executor.run([x.detach().requires_grad_() for x in inputs[2:]], lambda y, microbatch: y.sum())
        ddp.finish_grad_sync()
        outcomes.append(layer.weight.main_grad.clone())
    assert torch.equal(*outcomes)
    assert torch.equal(outcomes[0], torch.full_like(outcomes[0], ROWS * 10))


def test_a_run_after_one_that_failed_begins_with_the_first_microbatch():
    order = [1, 1, -1, -1]
    schedule = parse_order(order, num_layers_per_chunk=[1])
    (layer,) = linears(1, delay_wgrad_compute=False)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    calls = make_graphed_callables([layer], samples(2), order=order)
    executor = ScheduleExecutor(schedule, graphed_chunks(calls, schedule))
    inputs = [torch.full((ROWS, WIDTH), float(k + 1)) for k in range(2)]

    def loss_of(y, microbatch):
        if fails:
            raise KeyError(microbatch)
        return y.square().sum()

    for fails in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if fails:
            with pytest.raises(KeyError):
                executor.run(leaves, loss_of)
        else:
            losses = executor.run(leaves, loss_of)
    ddp.finish_grad_sync()
    y = [torch.nn.functional.linear(x, layer.weight, layer.bias).detach() for x in inputs]
    torch.testing.assert_close(losses, [each.square().sum() for each in y])
    expected = sum(2 * each.t() @ x for each, x in zip(y, inputs, strict=True))
    torch.testing.assert_close(layer.weight.main_grad, expected)


def test_an_eager_first_microbatch_is_not_overwritten():
    (layer,) = linears(1, delay_wgrad_compute=False)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    (graphed,) = make_graphed_callables([layer], samples(1), order=[1, -1])
    x = torch.ones(ROWS, WIDTH).requires_grad_()
    with ddp.no_sync():
        layer(x).sum().backward()
        graphed(x).sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((WIDTH, WIDTH), 2.0 * ROWS))


def test_a_capture_behind_an_iteration():
    """Fused layers do not zero their gradients between iterations: what is there was not written by hand."""
    (layer,) = linears(1, delay_wgrad_compute=False)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    x = torch.ones(ROWS, WIDTH).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad.any()
    ddp.zero_grad()
    (graphed,) = make_graphed_callables([layer], samples(1))
    for run in (graphed, layer):
        run(x).sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((WIDTH, WIDTH), 1.0 * ROWS))
        ddp.zero_grad()


def test_dropout_draws_anew_and_backward_takes_the_mask_of_its_forward():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        module[1].weight.copy_(torch.eye(64))
    x = torch.ones(4, 64, requires_grad=True)
    (graphed,) = make_graphed_callables([module], [(x,)])
    masks = []
    for _ in range(2):
        x = torch.ones(4, 64, requires_grad=True)
        y = graphed(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        masks.append(y.detach().clone())
    assert not torch.equal(*masks)


def test_gradients_without_a_provider_are_the_users():
    """``.grad`` of parameters and inputs stays as it is when the next microbatch is replayed."""
    module = nn.Linear(WIDTH, WIDTH)
    (graphed,) = make_graphed_callables([module], samples(1))
    kept = []
    for k in range(2):
        module.zero_grad()
        x = batch(k, grad=True)
        graphed(x).square().sum().backward()
        kept.append((x, x.grad, module.weight.grad, x.grad.clone(), module.weight.grad.clone()))
    for _, dx, dw, dx_then, dw_then in kept:
        assert torch.equal(dx, dx_then)
        assert torch.equal(dw, dw_then)
    assert not torch.equal(kept[0][1], kept[1][1])


def test_input_gradients_that_a_program_asks_for_are_its_own():
    (graphed,) = make_graphed_callables([nn.Linear(WIDTH, WIDTH)], samples(1))
    kept = []
    for k in range(2):
        x = batch(k, grad=True)
        (dx,) = torch.autograd.grad(graphed(x).square().sum(), x)
        kept.append((dx, dx.clone()))
    assert all(torch.equal(dx, then) for dx, then in kept)
    assert not torch.equal(kept[0][0], kept[1][0])


class Sum(nn.Module):
    """Its backward gives both inputs the gradient of its output as it is."""

    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_that_two_layers_get_stays_until_the_second_reads_it(microbatches):
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = [*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Sum()]
        calls = layers * microbatches
        if graphed:
            given = [*samples(3), (batch(grad=True), batch(grad=True))] * microbatches
            calls = make_graphed_callables(layers, given, order=[1, -1] * microbatches)
        for k in range(2):
            x, first = batch(k, grad=True), 4 * k % len(calls)
            run = calls[first : first + 4]
            run[3](run[0](x), run[2](run[1](x))).square().sum().backward()
        outcomes.append([param.grad for layer in layers for param in layer.parameters()])
    assert all(map(torch.equal, *outcomes))


# ---- Providers of others, tied weights. ----


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.sampled(4)
def test_a_foreign_provider_sees_what_it_sees_eagerly(flag, delayed):
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layer = LayerNormMLP(WIDTH, 16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        provider = ForeignProvider(layer, flag=flag)
        run = make_graphed_callables([layer], samples(1))[0] if graphed else layer
        for k in range(3):
            run(batch(k, grad=True)).square().mean().backward()
            if delayed:
                run.backward_dw()
        outcomes.append((provider, [param.main_grad for param in layer.parameters()], layer))
    (eager, expected, _), (seen, found, layer) = outcomes
    assert all(map(torch.equal, expected, found))
    assert sorted(eager.seen) == sorted(seen.seen)
    for name, given in seen.placeholders:
        assert given.shape == layer.get_parameter(name).shape
        assert not given.any()


@pytest.mark.parametrize("delayed", [True, False])
def test_a_tied_weight_is_overwritten_once(delayed):
    outcomes = []
    for graphed in (False, True):
        layers = linears(3, delay_wgrad_compute=delayed)
        layers[2].weight = layers[0].weight
        if delayed:
            layers[2].mark_delayed_weights()
        ddp = DistributedDataParallel(layers)
        order = [1, 1, -1, -1.5, -1, -1.5] if delayed else [1, 1, -1, -1]
        schedule = parse_order(order, num_layers_per_chunk=[3])
        chunks = [list(layers)]
        if graphed:
            chunks = graphed_chunks(make_graphed_callables(list(layers), samples(6), order=order), schedule)
        executor = ScheduleExecutor(schedule, chunks)
        for step in range(2):
            executor.run([batch(step, grad=True), batch(9, grad=True)], lambda y, microbatch: y.square().mean())
            ddp.finish_grad_sync()
            outcomes.append([param.main_grad.clone() for param in layers.parameters()])
            ddp.zero_grad_buffer()
    half = len(outcomes) // 2
    for eager, replayed in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(map(torch.equal, eager, replayed))


def test_the_first_write_of_an_order_is_captured_as_an_overwrite_and_no_other():
    """So that no replay of an ordinary iteration has to mend anything: see ``Delivery.open``."""
    (layer,) = linears(1)
    ddp = DistributedDataParallel(nn.ModuleList([layer]))
    calls = make_graphed_callables([layer], samples(3), order=[1, 1, 1, -1, -1, -1.5, -1, -1.5, -1.5])
    assert [call._graphs._later[0].overwrites for call in calls] == [(True,), (False,), (False,)]
    assert ddp.is_clear


def test_a_cast_from_before_the_capture_is_made_anew_in_replays():
    """Autocast keeps casts of weights until its block ends."""
    layer = nn.Linear(WIDTH, WIDTH)
    ((x,),) = samples(1)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        (call,) = make_graphed_callables([layer], [(x,)])
        with torch.no_grad():
            layer.weight.mul_(2)
        replayed = call(x).detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(replayed, layer(x))


# ---- Outputs that a call does not use. ----


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True}
        self.body, self.one, self.other = (Linear(WIDTH, WIDTH, **options) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.one(x), self.other(x)


@pytest.mark.parametrize("first", [True, False], ids=["the first is left out", "the second is left out"])
def test_an_output_that_a_later_loss_leaves_out_has_no_gradient_of_before(first):
    def run(graphed):
        net = TwoHeads()
        ddp = DistributedDataParallel(net)
        (call,) = make_graphed_callables([net], samples(1)) if graphed else [net]
        found = []
        for step, both in enumerate((True, False, True, False)):
            x = batch(step, grad=True)
            outputs = call(x)
            loss = outputs[first].square().sum()
            (loss + outputs[not first].square().sum() if both else loss).backward()
            ddp.finish_grad_sync()
            found += [x.grad, *(param.main_grad.clone() for param in net.parameters())]
            ddp.zero_grad_buffer()
        return found

    for ours, eager in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, eager)
