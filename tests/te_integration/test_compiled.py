"""Fused layers under ``torch.compile(fullgraph=True)``: eager's gradients, and each product written once.

What programs do around compiled layers is drawn from what loses or repeats side effects in graphs: recompute, equal
calls, results that nobody reads, tied weights, gradients of inputs alone, failed and repeated backwards.
"""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from foreign import ForeignProvider
from modules import ALL_FACTORIES, FEATURES, make
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import (
    GroupedLinear,
    Linear,
    WgradQueue,
    convert_linears,
    delayed_wgrad,
    unconvert,
)
from maingrad.te_integration.dense import compiled_wgrad


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def wrap(model: nn.Module, **config: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, DistributedDataParallelConfig(**config))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(seed))


def counting() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


def grads(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {record.name: record.view.clone() for record in ddp.records}


def writes(ddp: DistributedDataParallel) -> dict[str, int]:
    return {record.name: record.num_fused_writes for record in ddp.records}


def iteration(ddp: DistributedDataParallel, run: Callable[[Tensor], Tensor], microbatches: int = 2) -> None:
    for index in range(microbatches):
        with ddp.no_sync() if index < microbatches - 1 else nullcontext():
            run(batch(index)).square().mean().backward()
            for module in ddp.modules():
                if hasattr(module, "backward_dw"):
                    module.backward_dw()
    ddp.finish_grad_sync()


def assert_alike(ddp: DistributedDataParallel, eager: DistributedDataParallel, *, exactly: bool = True) -> None:
    theirs = grads(eager)
    assert grads(ddp).keys() == theirs.keys()
    for name, grad in grads(ddp).items():
        if exactly:
            assert torch.equal(grad, theirs[name]), name
        else:
            torch.testing.assert_close(grad, theirs[name], msg=name)
    assert writes(ddp) == writes(eager)


class Stack(nn.Module):
    """Three modules of one kind, each a block of its own."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(kind, seed=seed, **options) for seed in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x.sin()).cos()
        return x


KINDS = [*ALL_FACTORIES, "split Linear"]
MODES: dict[str, dict[str, Any]] = {
    "fused": {"fuse": True},
    "delayed": {"fuse": True, "delay": True},
    "delayed, unfused": {"fuse": False, "delay": True},
    "plain": {"fuse": False},
}


def stack(kind: str, **options: Any) -> Stack:
    if kind != "split Linear":
        return Stack(kind, **options)
    return Stack("Linear", parameters_split=("q", "k"), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [False, True], ids=["by block", "whole"])
@pytest.mark.sampled(1)
def test_gradients_are_eagers_in_one_graph_for_all_blocks(kind: str, mode: str, whole: bool) -> None:
    """Blocks after the first have inputs that need gradients: a second graph. Nothing else compiles again."""
    model = stack(kind, **MODES[mode])
    ddp_of_eager = wrap(copy.deepcopy(model))
    count = counting()
    for module in (model,) if whole else model.blocks:
        module.compile(backend=count, fullgraph=True)
    ddp = wrap(model, bucket_size=100)
    for _ in range(3):
        iteration(ddp, ddp)
        iteration(ddp_of_eager, ddp_of_eager)
        assert_alike(ddp, ddp_of_eager, exactly="MLP" not in kind)
        for each in (ddp, ddp_of_eager):
            each.zero_grad_buffer()
    assert count.frame_count == (1 if whole else 2)
    assert any(writes(ddp).values()) == MODES[mode]["fuse"]


# ---- Once, and in order. Each program runs eagerly and compiled. ----

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Pair(nn.Module):
    """Two layers, the second of which may have the first's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True)
        self.second = Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True)
        if tied:
            self.second.weight = self.first.weight


def recompute_inside(model: Pair, compile: Compile) -> None:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: model.second(model.first(x).sin()).cos(), x, use_reentrant=False)
        return y

    compile(run)(batch()).sum().backward()


def recompute_of_random_numbers_inside(model: Pair, compile: Compile) -> None:
    def block(x: Tensor) -> Tensor:
        return x + nn.functional.dropout(model.second(model.first(x).sin()), 0.0, training=True)

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y

    compile(run)(batch().requires_grad_()).sum().backward()


def recompute_outside(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x).sin()).cos())
    checkpoint(run, batch(), use_reentrant=False).sum().backward()


def recompute_reentrant(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x).sin()).cos())
    checkpoint(run, batch().requires_grad_(), use_reentrant=True).sum().backward()


def saved_tensors_copied(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x).sin()).cos())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = run(batch()).sum()
    loss.backward()


def equal_calls(model: Pair, compile: Compile) -> None:
    """Two products of the same operands: one is not the other."""
    compile(lambda x: model.first(x) + model.first(x))(batch()).sum().backward()


def result_unread(model: Pair, compile: Compile) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return model.first(x), model.second(x)

    compile(run)(batch())[0].sum().backward()


def result_ignored_in_the_graph(model: Pair, compile: Compile) -> None:
    def run(x: Tensor) -> Tensor:
        model.second(x)
        return model.first(x)

    compile(run)(batch()).sum().backward()


def input_gradients_alone(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    x = batch().requires_grad_()
    torch.autograd.grad(run(x).sum(), x)
    run(batch(1)).sum().backward()


def inputs_of_backward(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    x = batch().requires_grad_()
    run(x).sum().backward(inputs=[x])
    run(x).sum().backward()


def two_forwards_then_backwards(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    losses = [run(batch(seed)).sum() for seed in range(2)]
    for loss in losses:  # F0 F1 B0 B1
        loss.backward()


def a_weight_frozen_meanwhile(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    run(batch()).sum().backward()
    with torch.no_grad():
        run(batch(1))
    run(batch(2)).sum().backward()


def an_exception_between(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    with pytest.raises((RuntimeError, ValueError)):
        run(torch.randn(2, FEATURES + 1))
    run(batch()).sum().backward()


def other_shapes(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    for rows in (2, 5, 7):
        run(torch.ones(rows, 3, FEATURES)).sum().backward()


def in_autocast(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x).sin()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(batch()).sum()
    loss.backward()


def autocast_inside(model: Pair, compile: Compile) -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.second(model.first(x).sin())

    compile(run)(batch()).sum().backward()


def a_computed_weight(model: Pair, compile: Compile) -> None:
    """Its gradient flows on, to the parameter that it is computed from."""

    def run(x: Tensor) -> Tensor:
        computed = {"weight": model.first.weight.sin()}
        y: Tensor = model.second(torch.func.functional_call(model.first, computed, (x,)))
        return y

    compile(run)(batch()).sum().backward()


def a_transform_inside(model: Pair, compile: Compile) -> None:
    """A gradient of the input, by torch.func, whose result meets the weight again."""

    def run(x: Tensor) -> Tensor:
        y: Tensor = model.second(torch.func.grad(lambda x: model.first(x).sin().sum())(x))
        return y

    compile(run)(batch()).sum().backward()


def vectorised_inside(model: Pair, compile: Compile) -> None:
    compile(lambda x: torch.func.vmap(lambda row: model.second(model.first(row).sin()))(x))(batch()).sum().backward()


def the_weight_is_an_input(model: Pair, compile: Compile) -> None:
    compile(lambda: model.second(model.first(model.first.weight).sin()))().sum().backward()


def fused_no_more_in_backward(model: Pair, compile: Compile) -> None:
    """Like eager, compiled code keeps to what the forward has announced."""
    loss = compile(lambda x: model.second(model.first(x)))(batch()).sum()
    model.first.fuse_wgrad_accumulation = False
    loss.backward()


def under_inference_between(model: Pair, compile: Compile) -> None:
    run = compile(lambda x: model.second(model.first(x)))
    with torch.inference_mode():
        run(batch())
    run(batch()).sum().backward()


PROGRAMS = [
    recompute_inside,
    recompute_of_random_numbers_inside,
    recompute_outside,
    recompute_reentrant,
    saved_tensors_copied,
    equal_calls,
    result_unread,
    result_ignored_in_the_graph,
    input_gradients_alone,
    inputs_of_backward,
    two_forwards_then_backwards,
    a_weight_frozen_meanwhile,
    an_exception_between,
    other_shapes,
    in_autocast,
    autocast_inside,
    a_computed_weight,
    under_inference_between,
    a_transform_inside,
    vectorised_inside,
    the_weight_is_an_input,
    fused_no_more_in_backward,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("first_overwrites", [True, False], ids=["", "adds"])
@pytest.mark.sampled(1)
def test_each_product_is_written_once(program: Any, tied: bool, first_overwrites: bool) -> None:
    results = []
    for compile in (lambda run: run, lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)):
        model = Pair(tied)
        ddp = wrap(model)
        with ddp.no_sync():
            if not first_overwrites:
                (model.first(batch(7)) + model.second(batch(8))).sum().backward()
            program(model, compile)
        ddp.finish_grad_sync()
        results.append((grads(ddp), writes(ddp)))
        torch.compiler.reset()
    (expected, expected_writes), (found, found_writes) = results
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=name)
    if program is not result_unread:  # a compiled backward gets zeros for it, where eager's does not run
        assert found_writes == expected_writes


def test_a_converted_layer_is_written_once() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES))
    convert_linears(model)
    ddp, eager = wrap(model), wrap(copy.deepcopy(model))
    iteration(ddp, torch.compile(ddp.module, backend="aot_eager", fullgraph=True), microbatches=1)
    iteration(eager, eager, microbatches=1)
    assert_alike(ddp, eager)


def test_gradients_of_inputs_alone_write_nothing() -> None:
    model = Pair()
    ddp = wrap(model)
    x = batch().requires_grad_()
    torch.autograd.grad(torch.compile(model.first, backend="aot_eager", fullgraph=True)(x).sum(), x)
    assert not any(writes(ddp).values())


@pytest.mark.in_turn
def test_two_products_write_two_weights() -> None:
    model = make("LayerNormMLP", fuse=True)
    ddp, eager = wrap(model), wrap(copy.deepcopy(model))
    iteration(ddp, torch.compile(model, backend="aot_eager", fullgraph=True), microbatches=1)
    iteration(eager, eager, microbatches=1)
    assert_alike(ddp, eager, exactly=False)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.sampled(1)
def test_experts_share_weights_and_biases(fuse: bool) -> None:
    results = []
    for compile in (lambda run: run, lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        layer = GroupedLinear(3, FEATURES, FEATURES, fuse_wgrad_accumulation=fuse)
        layer.weight2, layer.bias1 = layer.weight0, layer.bias0
        ddp = wrap(layer)
        run = compile(lambda x, splits, layer=layer: layer(x, splits).sin())
        with ddp.no_sync():
            for splits in ([2, 2, 2], [0, 1, 5]):
                run(batch(), torch.tensor(splits)).sum().backward()
        ddp.finish_grad_sync()
        results.append(grads(ddp))
    eager, compiled_ = results
    for name, grad in eager.items():
        torch.testing.assert_close(compiled_[name], grad, msg=name)


def test_an_expert_layer_in_a_transform_is_refused() -> None:
    layer = GroupedLinear(3, FEATURES, FEATURES, fuse_wgrad_accumulation=True)
    wrap(layer)
    run = torch.compile(
        lambda x, splits: torch.func.grad(lambda x: layer(x, splits).sum())(x), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(RuntimeError, match=r"no rules for torch\.func"):
        run(batch(), torch.tensor([2, 2, 2]))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.sampled(1)
def test_a_product_is_one_node_of_the_traced_graph(fuse: bool) -> None:
    """Like nn.Linear's: a compiler that traced its Python would take half as long again for a layer."""
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output"))
        return graph

    layers = [Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=fuse) for _ in range(3)]
    model = nn.Sequential(*layers)
    ddp = wrap(model)
    torch.compile(ddp.module, backend=backend, fullgraph=True)(batch()).sum().backward()
    assert len(found) == len(layers)


# ---- What is refused, by name. ----


def test_a_gradient_that_is_returned_is_refused() -> None:
    model = Pair()
    ddp = wrap(model)
    run = torch.compile(model.first, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"Linear\(.*autograd.grad\(loss, weight\) of a compiled fused layer"):
        torch.autograd.grad(run(batch()).sum(), model.first.weight)
    assert not any(writes(ddp).values())


def test_without_a_provider_the_error_is_eagers() -> None:
    layer = Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"needs weight\.main_grad, and nobody provided it"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(batch()).sum().backward()


@pytest.mark.in_turn
@pytest.mark.parametrize("keeps_code", [False, True])
def test_a_module_freed_before_backward_is_an_error(keeps_code: bool) -> None:
    layer = Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True)
    ddp = wrap(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    loss = compiled(batch().requires_grad_()).sum()
    if not keeps_code:
        torch.compiler.reset()
    del compiled
    del layer, ddp
    gc.collect()
    with pytest.raises(RuntimeError, match="a module was freed between its compiled forward and the backward"):
        loss.backward()


# ---- What changes after the compilation. ----


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.sampled(1)
def test_a_hook_on_the_weight_gets_its_gradient(after: bool) -> None:
    model = Pair()
    plain = copy.deepcopy(model)
    of_plain, ddp = wrap(plain), wrap(model)
    run = torch.compile(model.first, backend="aot_eager", fullgraph=True)
    if after:
        with ddp.no_sync():
            run(batch()).sum().backward()
        ddp.zero_grad_buffer()
    seen: list[Tensor] = []
    model.first.weight.register_hook(seen.append)
    run(batch()).sum().backward()
    plain.first(batch()).sum().backward()
    for each in (of_plain, ddp):
        each.finish_grad_sync()
    assert len(seen) == 1
    torch.testing.assert_close(model.first.weight.main_grad, plain.first.weight.main_grad)
    torch.testing.assert_close(seen[0], plain.first.weight.main_grad)


def test_a_hook_between_forward_and_backward_is_refused() -> None:
    model = Pair()
    wrap(model)
    loss = torch.compile(model.first, backend="aot_eager", fullgraph=True)(batch()).sum()
    model.first.weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"got a hook \(register_hook\) after the layer was compiled"):
        loss.backward()


@pytest.mark.in_turn
def test_frozen_thawed_unconverted_wrapped_again() -> None:
    """Each change takes effect in the next forward, as it does without a compiler."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    convert_linears(model)
    run = torch.compile(model, backend="aot_eager")
    for frozen in (True, False):
        model[1].weight.requires_grad_(not frozen)
        ddp = wrap(model)
        run(batch()).sum().backward()
        ddp.finish_grad_sync()
        assert writes(ddp)["0.weight"] == 1
        assert writes(ddp).get("1.weight") == (None if frozen else 1)
        ddp.unwrap()
    model.zero_grad()
    unconvert(model)
    run(batch()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.sampled(1)
def test_a_copy_writes_its_own_gradient(way: str) -> None:
    model = nn.Sequential(Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    ddp = wrap(model)
    run(batch()).sum().backward()
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(ddp.unwrap()))
    of_twin = wrap(twin)
    torch.compile(twin, backend="aot_eager", fullgraph=True)(batch()).sum().backward()
    assert writes(of_twin)["0.weight"] == 1


@pytest.mark.in_turn
def test_a_parametrized_weight_has_an_ordinary_gradient() -> None:
    layer = Linear(FEATURES, FEATURES, fuse_wgrad_accumulation=True)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    plain = copy.deepcopy(layer)
    plain(batch()).sum().backward()
    ddp = wrap(layer)
    torch.compile(layer, backend="aot_eager")(batch()).sum().backward()
    ddp.finish_grad_sync()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for name, grad in grads(ddp).items():
        torch.testing.assert_close(grad, expected[name])


# ---- What stays a graph break. ----


@pytest.mark.in_turn
def test_a_block_that_delays_is_a_break_and_still_delays() -> None:
    model, queue = Pair(), WgradQueue()
    ddp = wrap(model)
    run = torch.compile(lambda x: model.second(model.first(x)), backend="aot_eager")
    with delayed_wgrad(queue):
        loss = run(batch()).sum()
    loss.backward()
    assert len(queue) == 2
    queue.drain()
    ddp.finish_grad_sync()
    expected = grads(ddp)
    ddp.zero_grad_buffer()
    run(batch()).sum().backward()
    ddp.finish_grad_sync()
    for name, grad in grads(ddp).items():
        torch.testing.assert_close(grad, expected[name], msg=name)


@pytest.mark.in_turn
def test_a_foreign_provider_gets_its_placeholder() -> None:
    model = Pair()
    provider = ForeignProvider(model)
    torch.compile(lambda x: model.second(model.first(x)), backend="aot_eager")(batch()).sum().backward()
    assert {name for name, _ in provider.placeholders} == {"first.weight", "second.weight"}


@pytest.mark.in_turn
def test_compiled_autograd_may_be_switched_on_for_code_that_is_compiled_already() -> None:
    """The layers leave the graph for as long: their operator would be dropped in silence."""
    model = Pair()
    wrap(model)
    run = torch.compile(lambda x: model.second(model.first(x)), backend="aot_eager")
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    run(batch())
    assert not breaks
    with torch._dynamo.config.patch(compiled_autograd=True):
        run(batch())
    found = dict(breaks)
    assert found, "each layer is a break"
    run(batch())
    assert breaks == found, "and in the graph again"


@pytest.mark.slow  # half a minute: compiled autograd traces the wrapper's hooks as well
@pytest.mark.parametrize("kind", ["Linear", "GroupedMLP"])
def test_compiled_autograd_makes_a_layer_a_break(kind: str) -> None:
    """Compiled autograd would drop the operator in silence."""
    model = Stack(kind, fuse=True)
    ddp = wrap(model)
    model(batch()).square().sum().backward()
    ddp.finish_grad_sync()
    expected, expected_writes = grads(ddp), writes(ddp)
    ddp.zero_grad_buffer()

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(batch())
    ddp.finish_grad_sync()
    for name, grad in grads(ddp).items():
        torch.testing.assert_close(grad, expected[name], msg=name)
    assert writes(ddp) == {name: 2 * count for name, count in expected_writes.items()}


@pytest.mark.in_turn
def test_without_effects_of_operators_a_layer_is_a_break_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a torch that names its parts differently. The import warns; a warning in traced code would break graphs."""
    monkeypatch.setattr(compiled_wgrad, "wgrad", None)
    model = Pair()
    ddp = wrap(model)
    run = torch.compile(lambda x: model.second(model.first(x)), backend="aot_eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(batch()).sum().backward()
        run(batch()).sum()
    assert not any("is a graph break" in str(warning.message) for warning in seen)
    assert writes(ddp) == {"first.weight": 1, "first.bias": 0, "second.weight": 1, "second.bias": 0}


def train_on_a_gpu(mode: str | None) -> None:
    """Trains compiled blocks beside eager ones: gradients and numbers of writes must agree."""
    model = Stack("LayerNormMLP", fuse=True).cuda().bfloat16()
    eager = wrap(copy.deepcopy(model))
    for block in model.blocks:
        block.compile(fullgraph=True, mode=mode)
    ddp = wrap(model)
    for _ in range(5):
        for each in (ddp, eager):
            each.zero_grad_buffer()
            for index in range(2):
                with each.no_sync() if index == 0 else nullcontext():
                    torch.compiler.cudagraph_mark_step_begin()
                    each(batch(index).cuda().bfloat16()).square().mean().backward()
            each.finish_grad_sync()
        for name, grad in grads(ddp).items():
            torch.testing.assert_close(grad, grads(eager)[name], msg=name, rtol=2**-5, atol=2**-8)
    assert writes(ddp) == writes(eager)


@pytest.mark.gpu
def test_inductor_on_a_gpu() -> None:
    train_on_a_gpu(None)


@pytest.mark.gpu
def test_graphs_of_torch_s_own_are_refused() -> None:
    """They would replay a write without its bookkeeping."""
    with pytest.raises(RuntimeError, match="own CUDA graphs"):
        train_on_a_gpu("reduce-overhead")
