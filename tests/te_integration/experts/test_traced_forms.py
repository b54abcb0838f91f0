"""What a compiler takes of modules with experts into its graph, run by Python: all that the eager way computes."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_models import tiny
from torch import Tensor, nn
from traced_forms import traced

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel
from maingrad.te_integration import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    TokenDispatcher,
    WgradQueue,
    autocast,
    convert_linears,
)

EXPERTS, ROWS = 3, 6


def hugging_face(name: str, *, fuse: bool = True) -> Any:
    experts = tiny(name, layers=1).model.layers[0].mlp.experts
    convert_linears(experts)
    experts.fuse_wgrad_accumulation = fuse
    return experts


MODULES: dict[str, Callable[[], nn.Module]] = {
    "scaled biases": lambda: GroupedLinear(EXPERTS, 8, 5, scale_bias=True),
    "packed": lambda: GroupedLinear(
        EXPERTS, 8, 5, scale_bias=True, single_grouped_weight=True, single_grouped_bias=True
    ),
    "two layers": lambda: GroupedMLP(EXPERTS, 8, 5),
    "two layers, fused": lambda: GroupedMLP(EXPERTS, 8, 5, fuse_wgrad_accumulation=True),
    "two layers, scaled biases": lambda: GroupedMLP(EXPERTS, 8, 5, scale_bias=True),
    "mixtral": lambda: hugging_face("mixtral"),
    "gpt_oss": lambda: hugging_face("gpt_oss"),  # transposed weights, and biases
    "gpt_oss, unfused": lambda: hugging_face("gpt_oss", fuse=False),
    "fused": lambda: GroupedLinear(EXPERTS, 8, 5, scale_bias=True, fuse_wgrad_accumulation=True),
}


def arguments_of(module: Any) -> tuple[Tensor, Any, Tensor]:
    """Rows or tokens, where they go, and their probabilities."""
    if isinstance(module, GroupedLinear | GroupedMLP):
        return torch.randn(ROWS, 8), torch.tensor([1, 2, 3]), torch.rand(ROWS)
    features = module.down_proj.shape[-1 if module.is_transposed else -2]
    return torch.randn(ROWS, features), torch.arange(2 * ROWS).view(ROWS, 2) % 4, torch.rand(ROWS, 2)


FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "weights": lambda name: "bias" not in name,
    "biases": lambda name: "bias" in name,
    "one expert": lambda name: name.endswith("weight1"),
    "all parameters": lambda name: True,
    "the input": lambda name: False,
    "probabilities": lambda name: False,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("lowered", [False, True], ids=["", "autocast"])
@pytest.mark.sampled(12)
def test_the_traced_form_computes_what_the_eager_one_does(name: str, frozen: str, lowered: bool) -> None:
    def run(mode: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        module = MODULES[name]()
        for local, param in module.named_parameters():
            nn.init.normal_(param, std=0.3)
            param.requires_grad_(not FROZEN[frozen](local))
        is_trained = any(param.requires_grad for param in module.parameters())
        model = DistributedDataParallel(module) if is_trained else None
        x, where, probs = arguments_of(module)
        x.requires_grad_(frozen != "the input")
        probs.requires_grad_(frozen != "probabilities")
        with mode() as broken, torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            y = module(x, where, probs)
        assert not broken
        y.square().sum().backward()
        if model is not None:
            model.finish_grad_sync()
        params = [getattr(param, "main_grad", None) for param in module.parameters()]
        return [y.detach(), x.grad, probs.grad, *params]

    for found, expected in zip(run(traced), run(contextlib.nullcontext), strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert expected.any()
            torch.testing.assert_close(found, expected, rtol=2e-2 if lowered else None, atol=2e-2 if lowered else None)


@pytest.mark.parametrize("hooked", ["weight0", "weight2"])
def test_a_hook_on_the_weight_of_any_expert_sees_its_gradient(hooked: str) -> None:
    found = []
    for mode in (traced, contextlib.nullcontext):
        torch.manual_seed(0)
        module: Any = GroupedLinear(EXPERTS, 8, 5, fuse_wgrad_accumulation=True)
        model = DistributedDataParallel(module)
        module.get_parameter(hooked).register_hook(lambda grad: 3 * grad)
        with mode():
            y = module(torch.randn(ROWS, 8), torch.tensor([1, 2, 3]))
        y.square().sum().backward()
        model.finish_grad_sync()
        found.append([param.main_grad for param in module.parameters()])
    for inside, eager in zip(*found, strict=True):
        assert eager.any()
        torch.testing.assert_close(inside, eager)


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_each_layer_has_its_own_way_to_deliver(layer: str) -> None:
    """A hook sees the gradient of its weight by autograd; the other layer's goes into ``main_grad`` at once."""
    found = []
    for mode in (traced, contextlib.nullcontext):
        torch.manual_seed(0)
        module: Any = GroupedMLP(EXPERTS, 8, 5, fuse_wgrad_accumulation=True, single_grouped_weight=True)
        model, seen = DistributedDataParallel(module), []
        module.get_parameter(f"{layer}_weight").register_hook(lambda grad, seen=seen: seen.append(3 * grad) or seen[0])
        with mode() as broken:
            y = module(torch.randn(ROWS, 8), torch.tensor([1, 2, 3]))
        assert not broken
        y.square().sum().backward()
        model.finish_grad_sync()
        writes = {record.name: record.num_fused_writes for record in model.records if "weight" in record.name}
        assert writes == {"fc1_weight": layer == "fc2", "fc2_weight": layer == "fc1"}
        torch.testing.assert_close(module.get_parameter(f"{layer}_weight").main_grad, *seen)
        found.append([param.main_grad for param in module.parameters()])
    for inside, eager in zip(*found, strict=True):
        assert eager.any()
        torch.testing.assert_close(inside, eager)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_bias_gradient_is_summed_in_the_dtype_of_the_bias(mode: Any, packed: bool) -> None:
    """Under autocast too: bf16 has 256 and 258, and none between."""
    module: Any = GroupedLinear(1, 8, 5, single_grouped_bias=packed)
    with torch.autocast("cpu", torch.bfloat16), mode():
        y = module(torch.ones(257, 8), torch.tensor([257]))
    y.sum().backward()
    assert module.parameters_named(module.layer.bias_names)[0].grad.eq(257).all()


def dispatching(transport: dict[str, Any]) -> Any:
    experts = hugging_face("mixtral")
    experts.dispatcher = TokenDispatcher(4, WORLD_OF_ONE, **transport)
    return experts


CAPACITY = {"transport": "capacity", "capacity": 2 * ROWS}
BREAKS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "splits on the host": (lambda: GroupedLinear(EXPERTS, 8, 5), {"where": [1, 2, 3]}, ["GroupedLinear._forward"]),
    "splits on the host, two layers": (
        lambda: GroupedMLP(EXPERTS, 8, 5),
        {"where": [1, 2, 3]},
        ["GroupedMLP._forward"],
    ),
    "a recipe": (
        lambda: GroupedLinear(EXPERTS, 32, 32, params_dtype=torch.bfloat16),
        {"x": torch.linspace(-1, 1, 32 * ROWS).view(ROWS, 32).bfloat16(), "recipe": Float8BlockScaling()},
        ["GroupedLinear._forward"],
    ),
    "experts of transformers under a recipe": (
        lambda: hugging_face("mixtral").bfloat16(),
        {"recipe": Float8BlockScaling(), "x": torch.ones(ROWS, 32, dtype=torch.bfloat16)},
        ["FusedExperts.forward"],
    ),
    "a dispatcher that needs the host": (lambda: dispatching({}), {}, ["FusedExperts.forward"]),
    "a dispatcher of a graph": (lambda: dispatching(CAPACITY), {}, []),
}


@pytest.mark.parametrize("what", BREAKS)
def test_what_a_graph_cannot_hold_is_a_break(what: str) -> None:
    make, given, expected = BREAKS[what]
    found = []
    for mode in (contextlib.nullcontext, traced):
        torch.manual_seed(0)
        module = make()
        for param in module.parameters():
            nn.init.normal_(param, std=0.3)
        x, where, probs = arguments_of(module)
        x = given.get("x", x).detach().requires_grad_()
        more = () if isinstance(module, GroupedLinear) else (probs,)
        kept = DistributedDataParallel(module)
        with mode() as broken, autocast("recipe" in given, recipe=given.get("recipe")):
            y = module(x, given.get("where", where), *more)
        assert (broken or []) == (expected if mode is traced else [])
        y.float().square().sum().backward()
        kept.finish_grad_sync()
        assert x.grad is not None and x.grad.any()
        found.append([y.detach(), x.grad])
    for eager, inside in zip(*found, strict=True):
        torch.testing.assert_close(inside, eager)


@pytest.mark.parametrize("memory", [("out",), ("grad_input",), ("out", "grad_input")])
def test_a_break_takes_all_arguments_along(memory: tuple[str, ...]) -> None:
    """The caller's memory, which no graph writes, and the scales of the biases."""
    places = {"out": torch.full((ROWS, 5), torch.nan), "grad_input": torch.full((ROWS, 8), torch.nan)}
    found = []
    for mode, given in ((traced, {name: places[name] for name in memory}), (contextlib.nullcontext, {})):
        torch.manual_seed(0)
        module: Any = MODULES["scaled biases"]()
        x, splits, scales = arguments_of(module)
        x.requires_grad_()
        with mode() as broken:
            y = module(x, splits, scales, **given)
        assert broken == (["GroupedLinear._forward"] if given else None)
        y.square().sum().backward()
        found.append({"out": y.detach(), "grad_input": x.grad})
    for name, expected in found[1].items():
        assert torch.equal(found[0][name], expected)
        assert name not in memory or torch.equal(places[name], expected)


def test_a_dispatcher_of_one_process_changes_nothing() -> None:
    found = []
    for transport in (None, {}, CAPACITY):
        torch.manual_seed(0)
        module = hugging_face("mixtral") if transport is None else dispatching(transport)
        for param in module.parameters():
            nn.init.normal_(param, std=0.3)
        with torch.no_grad():
            found.append(module(*arguments_of(module)))
    assert found[0].any() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("why", ["the host", "a filled wait", "rows in 8 bits"])
def test_both_ways_break_where_one_does(why: str) -> None:
    """What runs meanwhile runs all the same."""
    options: dict[str, Any] = {} if why == "the host" else CAPACITY
    sender = TokenDispatcher(4, WORLD_OF_ONE, quantize_rows=why == "rows in 8 bits", **options)
    queue, order = WgradQueue(fill_waits=True) if why == "a filled wait" else None, []
    x, ids, probs = torch.ones(ROWS, 128), torch.arange(ROWS)[:, None] % 4, torch.rand(ROWS, 1)
    with traced() as broken, autocast(recipe=Float8BlockScaling()):
        rows, _, _, sent = sender.dispatch(x, ids, probs, queue=queue, meanwhile=lambda: order.append("shared"))
        y = sender.combine(rows, sent, meanwhile=lambda: order.append("half"))
    assert broken == ["TokenDispatcher.dispatch", "TokenDispatcher.combine"]
    assert order == ["shared", "half"] and y.eq(1).all()


def test_a_dispatcher_that_is_gone_before_the_backward_is_missed_by_name() -> None:
    sender, x = TokenDispatcher(4, WORLD_OF_ONE, **CAPACITY), torch.ones(ROWS, 8, requires_grad=True)
    with traced():
        rows, _, _, sent = sender.dispatch(x, torch.arange(ROWS)[:, None] % 4, torch.rand(ROWS, 1))
        loss = sender.combine(rows, sent).sum()
    del sender, sent
    with pytest.raises(RuntimeError, match="a TokenDispatcher was freed between its compiled forward and the backward"):
        loss.backward()


@pytest.mark.parametrize("transport", [{}, CAPACITY], ids=["the host", "capacity"])
def test_a_queue_of_the_experts_own_fills_the_waits(transport: dict[str, Any]) -> None:
    """No graph holds that: the forward is a graph break."""
    for mode in (contextlib.nullcontext, traced):
        experts, queue = dispatching(transport), WgradQueue(fill_waits=True)
        kept, experts.wgrad_queue = DistributedDataParallel(experts), queue
        x, *others = arguments_of(experts)
        with mode() as broken:
            y = experts(x.requires_grad_(), *others)
        assert (broken or []) == (["FusedExperts.forward"] if mode is traced else [])
        y.sum().backward()
        assert len(queue) == 1, "of two: the other was computed on the rows' way back"
        queue.drain()
        kept.finish_grad_sync()


def test_rows_travel_in_8_bits_where_the_program_asks_for_it_alone() -> None:
    x, ids, probs = torch.full((ROWS, 128), 1.0 + 2.0**-7), torch.arange(ROWS)[:, None] % 4, torch.ones(ROWS, 1)
    x[:, 0] = 1.0
    with autocast(recipe=Float8BlockScaling()):
        rows, *_ = TokenDispatcher(4, WORLD_OF_ONE, **CAPACITY).dispatch(x.bfloat16(), ids, probs)
    assert rows[:ROWS].eq(x[0].bfloat16()).all()


def test_derivatives_of_gradients_are_refused_where_rows_travel() -> None:
    sender, x, probs = TokenDispatcher(4, WORLD_OF_ONE), torch.ones(ROWS, 8), torch.rand(ROWS, 1)
    rows, _, _, sent = sender.dispatch(x.requires_grad_(), torch.arange(ROWS)[:, None] % 4, probs)
    for output in (rows, sender.combine(rows, sent)):
        with pytest.raises(RuntimeError, match=r"TokenDispatcher: second derivatives \(create_graph=True\)"):
            torch.autograd.grad(output.square().sum(), x, create_graph=True, retain_graph=True)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
@pytest.mark.parametrize("packed", [False, True])
def test_under_autocast_a_weight_gradient_is_rounded_to_the_dtype_of_the_weight(mode: Any, packed: bool) -> None:
    """Once: bf16 has 256 and 258, and none between."""
    layer = GroupedLinear(2, 8, 5, bias=False, single_grouped_weight=packed)
    with torch.autocast("cpu", torch.bfloat16), mode():
        output = layer(torch.ones(2 * 257, 8), torch.tensor([257, 257]))
    output.sum().backward()
    for param in layer.parameters():
        assert param.grad is not None and param.grad.eq(257).all()
