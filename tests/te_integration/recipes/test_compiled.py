"""``torch.compile`` under recipes: whole graphs with the results of eager code."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    WgradQueue,
    autocast,
    convert_linears,
    delayed_wgrad,
)

CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
RECIPES = [
    CURRENT,
    pytest.param(BLOCK, marks=pytest.mark.slow),
    pytest.param(MXFP8BlockScaling(), marks=pytest.mark.slow),
    pytest.param(NVFP4BlockScaling(disable_stochastic_rounding=True), marks=pytest.mark.slow),
]


def layers(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16, **options}
    return nn.Sequential(
        Linear(48, 64, **options),
        LayerNormMLP(64, 96, activation="swiglu", **options),
        LayerNormLinear(64, 96, parameters_split=["q", "k", "v"], **options),
    )


def compiled(function: Callable[..., Tensor], *, fullgraph: bool = True) -> tuple[Callable[..., Tensor], list[int]]:
    """``function`` in graphs, and their sizes as they are made."""
    graphs: list[int] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=count, fullgraph=fullgraph, dynamic=False), graphs


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], recipe: Any, iterations: int = 2) -> list[Tensor]:
    """Outputs, gradients of inputs and of weights; two microbatches an iteration."""
    ddp = DistributedDataParallel(model)
    optimizer = DistributedOptimizer(ddp, lr=0.01)
    torch.manual_seed(1)
    found = []
    for _ in range(iterations):
        for microbatch in range(2):
            x = torch.randn(24, 48).bfloat16().requires_grad_()
            with ddp.no_sync() if microbatch == 0 else contextlib.nullcontext():
                with autocast(recipe is not None, recipe=recipe):
                    y = forward(x)
                y.float().square().mean().backward()
            for module in model.modules():
                if hasattr(module, "backward_dw"):
                    module.backward_dw()
            found += [y.detach(), x.grad]
        ddp.finish_grad_sync()
        found += [parameter.main_grad.clone() for parameter in model.parameters()]
        optimizer.step()
        ddp.zero_grad_buffer()
    with torch.no_grad(), autocast(recipe is not None, recipe=recipe):
        found.append(forward(x))
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sampled(3)
def test_whole_graphs_have_the_bits_of_eager_code(recipe: Any) -> None:
    model = layers()
    expected = train(model, model, recipe)
    model = layers()
    forward, graphs = compiled(lambda x: model(x))
    for mine, other in zip(train(model, forward, recipe), expected, strict=True):
        assert torch.equal(mine, other)
    assert len(graphs) == 2  # training, evaluation


class Routed(nn.Module):
    """A layer in bf16 under a router in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = Linear(48, 4, fuse_wgrad_accumulation=True)
        self.layer = Linear(48, 64, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x.float()).softmax(-1)[:, :1]
        return self.layer(x) * gate.bfloat16()  # type: ignore[no-any-return]


@pytest.mark.in_turn
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [32, 0])
@pytest.mark.sampled(1)
def test_a_router_in_fp32_and_inputs_of_no_tokens_stay_in_the_graph(rows: int, recipe: Any) -> None:
    found = []
    for is_compiled in (False, True):
        model = Routed()
        ddp = DistributedDataParallel(model)
        forward, graphs = compiled(lambda x, model=model: model(x)) if is_compiled else (model, [])
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with autocast(recipe=recipe), pytest.warns(RuntimeWarning, match=r"Linear.* computes in torch.float32"):
            y = forward(x)
        y.float().square().sum().backward()
        ddp.finish_grad_sync()
        found.append([y.detach(), x.grad, *(grad.clone() for grad in ddp.reduced_grads())])
        assert len(graphs) == is_compiled
    for ours, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.in_turn
def test_delayed_weight_gradients() -> None:
    model = layers(delay_wgrad_compute=True)
    expected = train(model, model, CURRENT)
    model = layers(delay_wgrad_compute=True)
    forward, _ = compiled(lambda x: model(x))
    for mine, other in zip(train(model, forward, CURRENT), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("how", ["delayed scaling", "queue"])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_layers_with_two_products_may_be_graph_breaks(how: str) -> None:
    """A graph begins behind each break, and the number of the product is an argument there."""
    recipe = DelayedScaling(amax_history_len=2) if how == "delayed scaling" else CURRENT
    queue = WgradQueue()

    def results(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model = DistributedDataParallel(module)
        found = []
        for rows in (8, 8, 6, 5):
            x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).bfloat16()
            with autocast(recipe=recipe), delayed_wgrad(queue) if how == "queue" else contextlib.nullcontext():
                y = forward(x)
            y.float().square().mean().backward()
            queue.drain()
            model.finish_grad_sync()
            found += [y.detach(), *(parameter.main_grad.clone() for parameter in module.parameters())]
            model.zero_grad_buffer()
        return found

    model = layers()
    expected = results(model, model)
    model = layers()
    torch._dynamo.reset()
    for mine, other in zip(results(model, torch.compile(model, backend="aot_eager")), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.in_turn
def test_each_recipe_has_a_graph_and_comes_back_to_it() -> None:
    model = layers()[0]
    ddp = DistributedDataParallel(model)
    forward, graphs = compiled(lambda x: model(x))
    x = torch.randn(8, 48).bfloat16()
    for _ in range(2):
        for recipe in (None, CURRENT, BLOCK, Float8CurrentScaling()):
            with autocast(recipe is not None, recipe=recipe):
                assert torch.equal(forward(x), model(x))
        with autocast(recipe=CURRENT), autocast(enabled=False):
            assert torch.equal(forward(x), model(x))
    assert len(graphs) <= 4
    del ddp


@pytest.mark.in_turn
def test_a_block_in_compiled_code() -> None:
    def step(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with autocast(recipe=BLOCK):
                return model(x) * 2

        return forward

    model = layers()
    expected = train(model, step(model), None)
    model = layers()
    forward, _ = compiled(step(model), fullgraph=False)
    for mine, other in zip(train(model, forward, None), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.in_turn
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.sampled(1)
def test_checkpoints(where: str) -> None:
    """Around compiled layers, whose recompute runs outside of the block; and inside of them."""
    model = layers()
    expected = train(model, model, BLOCK)
    model = layers()
    if where == "around":
        inner, _ = compiled(lambda x: model(x))
        forward = lambda x: checkpoint(inner, x, use_reentrant=False)  # noqa: E731
    else:
        forward, _ = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    for mine, other in zip(train(model, forward, BLOCK), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.in_turn
def test_reentrant_checkpoints_are_refused() -> None:
    model = layers()[:1]
    ddp = DistributedDataParallel(model)
    inner, _ = compiled(lambda x: model(x), fullgraph=False)
    x = torch.randn(8, 48).bfloat16().requires_grad_()
    with autocast(recipe=CURRENT):
        y = checkpoint(inner, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.sum().backward()
    del ddp


@pytest.mark.in_turn
def test_frozen_and_unfused_weights() -> None:
    for change in ("frozen", "unfused", "no input gradient"):
        outcomes = []
        for is_compiled in (False, True):
            model = layers(fuse_wgrad_accumulation=change != "unfused")[::2]
            if change == "frozen":
                model[0].weight.requires_grad_(False)
                model[1].q_weight.requires_grad_(False)
            ddp = DistributedDataParallel(model)
            forward = compiled(lambda x, model=model: model(x), fullgraph=False)[0] if is_compiled else model
            x = torch.linspace(-1, 1, 16 * 48).view(16, 48).bfloat16().requires_grad_(change != "no input gradient")
            with autocast(recipe=CURRENT):
                y = forward(x)
            y.float().square().mean().backward()
            ddp.finish_grad_sync()
            outcomes.append([y] + [each.main_grad.clone() for each in model.parameters() if each.requires_grad])
        for mine, other in zip(*outcomes, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("recipe", [None, CURRENT])
@pytest.mark.sampled(1)
def test_a_layer_whose_weight_is_stored_transposed(recipe: Any) -> None:
    """Hugging Face's ``Conv1D``, converted: its gradient has the weight's shape, not the product's."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = conv1d(48, 48).bfloat16()  # square: a gradient that is not transposed back has this shape too
        net = nn.Sequential(layer)
        convert_linears(net)
        model = DistributedDataParallel(net)
        forward = compiled(net.forward)[0] if compiles else net.forward
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
        with autocast(recipe=recipe) if recipe is not None else contextlib.nullcontext():
            forward(x).float().square().mean().backward()
        found.append([record.view.clone() for record in model.records])
    for mine, eager in zip(*found, strict=True):
        assert eager.any()
        torch.testing.assert_close(mine, eager)


@pytest.mark.in_turn
def test_what_is_saved() -> None:
    """The transposed copy, and no input in bf16; a compiler that recomputes does not quantise twice for it."""
    torch.manual_seed(0)
    layer = Linear(256, 256, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(layer)
    forward, _ = compiled(lambda x: layer(x))
    x = torch.randn(1024, 256).bfloat16().requires_grad_()
    with autocast(recipe=CURRENT):
        forward(x)
        saved: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() != layer.weight.data_ptr():
                saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            forward(x)
    assert sum(saved) <= 0.55 * x.nbytes
    del ddp
