"""``autocast``: blocks, threads, recompute, and what does not go with a recipe."""

import contextlib
import dataclasses
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    make_graphed_callables,
    recipes,
)
from maingrad.te_integration.dense.quantized_linear import takes_recipe
from maingrad.te_integration.recipes import amax_group_now

CURRENT, BLOCK, DELAYED = Float8CurrentScaling(), Float8BlockScaling(), DelayedScaling()


def layer_of(**options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(64, 32, dtype=torch.bfloat16, **options)


def input_of() -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 3


def test_blocks_nest() -> None:
    layer, x = layer_of(), input_of()
    plain = layer(x)
    with autocast(recipe=CURRENT):
        current = layer(x)
        with autocast(recipe=BLOCK):
            block = layer(x)
            with autocast():
                assert torch.equal(layer(x), current), "the default, whatever is around"
        with autocast(enabled=False):
            assert torch.equal(layer(x), plain)
        assert torch.equal(layer(x), current)
    with autocast():
        assert torch.equal(layer(x), current)
    with autocast(enabled=False, recipe=CURRENT):
        assert torch.equal(layer(x), plain)
    assert torch.equal(layer(x), plain)
    assert not torch.equal(plain, current)
    assert not torch.equal(current, block)
    assert not recipes.may_be_any, "compiled code asks no more"
    layer.ignores_recipes = True
    with autocast(recipe=CURRENT):
        assert torch.equal(layer(x), plain)


def test_a_block_has_its_own_amax_group() -> None:
    """And the block around it has its own again behind it."""
    outer, inner = object(), object()
    with autocast(recipe=DELAYED, amax_reduction_group=outer):
        assert amax_group_now() is outer
        with autocast(recipe=DELAYED, amax_reduction_group=inner):
            assert amax_group_now() is inner
        with autocast(recipe=DELAYED):
            assert amax_group_now() is None
        assert amax_group_now() is outer
    assert amax_group_now() is None


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_gpu_without_a_kernel_is_refused(capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors on a GPU, which this machine need not have. Emulation, and a CPU, need no kernel."""
    monkeypatch.setattr("maingrad.kernels.quantized.operands.capability_of", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    whole = capability is not None and capability >= (8, 9)
    has_kernel = {CURRENT: whole, DELAYED: whole, BLOCK: capability == (9, 0), MXFP8BlockScaling(): False}
    with FakeTensorMode():
        x = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
        for recipe, expected in has_kernel.items():
            assert takes_recipe(dataclasses.replace(recipe, emulate=True), x, "layers.3")
            assert takes_recipe(recipe, torch.empty(8, 64, dtype=torch.bfloat16), "layers.3")
            name = type(recipe).__name__
            refusal = pytest.raises(RuntimeError, match=rf"layers.3: {name} on a GPU needs .*{name}\(emulate=True\)")
            with contextlib.nullcontext() if expected else refusal:
                assert takes_recipe(recipe, x, "layers.3")


def test_a_block_that_raises_ends() -> None:
    layer, x = layer_of(), input_of()
    plain = layer(x)
    with pytest.raises(KeyError), autocast(recipe=CURRENT):
        raise KeyError("the program's own")
    assert torch.equal(layer(x), plain)


def test_blocks_belong_to_a_thread() -> None:
    layer, x = layer_of(), input_of()
    plain, found = layer(x), []
    with autocast(recipe=CURRENT):
        thread = threading.Thread(target=lambda: found.append(layer(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], plain)


def test_backward_has_the_recipe_of_its_forward() -> None:
    gradients = []
    for around in (None, BLOCK):
        layer, x = layer_of(), input_of().requires_grad_()
        with autocast(recipe=CURRENT):
            y = layer(x)
        with autocast(around is not None, recipe=around):
            y.float().sum().backward()
        gradients.append((x.grad, layer.weight.grad))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_fp32_is_not_quantised_and_says_so() -> None:
    layer = Linear(64, 32)
    x = torch.randn(8, 64)
    with warnings.catch_warnings(record=True) as caught, autocast(recipe=CURRENT):
        warnings.simplefilter("default")
        for _ in range(3):
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert ["as without a recipe" in str(each.message) for each in caught] == [True]


@pytest.mark.parametrize("outside", [True, False])
def test_what_is_computed_again_has_the_recipe(outside: bool) -> None:
    gradients = []
    for recomputed in (False, True):
        layer, x = layer_of(fuse_wgrad_accumulation=True), input_of().requires_grad_()
        model = DistributedDataParallel(layer)

        def forward(x: Tensor, layer: Linear = layer) -> Tensor:
            if outside:
                return layer(x).tanh()
            with autocast(recipe=CURRENT):
                return layer(x).tanh()

        with autocast(outside, recipe=CURRENT):
            y = checkpoint(forward, x, use_reentrant=False) if recomputed else forward(x)
        with model.no_sync():
            y.float().square().sum().backward()
        gradients.append((y.detach(), x.grad, layer.weight.main_grad.clone()))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_a_block_around_the_backward_is_not_one_of_what_is_computed_again() -> None:
    gradients = []
    with autocast(recipe=CURRENT):
        kept = checkpoint(layer_of(), input_of().requires_grad_(), use_reentrant=False)  # another region has a recipe
    for around in (False, True):
        layer, x = layer_of(), input_of().requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False).float().square().sum()
        with autocast(around, recipe=CURRENT):
            y.backward()
        gradients.append((x.grad, layer.weight.grad))
    assert all(map(torch.equal, *gradients)) and kept.requires_grad


def test_a_region_with_blocks_of_its_own() -> None:
    """The first layer has the recipe from outside, the second one from inside, and the third none."""
    gradients = []
    for recomputed in (False, True):
        layers = [layer_of(), Linear(32, 32, dtype=torch.bfloat16), Linear(32, 32, dtype=torch.bfloat16)]
        x = input_of().requires_grad_()

        def forward(x: Tensor, layers: list[Linear] = layers) -> Tensor:
            x = layers[0](x)
            with autocast(recipe=BLOCK):
                x = layers[1](x)
            with autocast(enabled=False):
                return layers[2](x).tanh()

        with autocast(recipe=CURRENT):
            y = checkpoint(forward, x, use_reentrant=False) if recomputed else forward(x)
        y.float().square().sum().backward()
        gradients.append((y.detach(), x.grad, *(layer.weight.grad for layer in layers)))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_reentrant_recompute_outside_is_refused() -> None:
    layer, x = layer_of(), input_of().requires_grad_()
    with autocast(recipe=CURRENT):
        y = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.float().sum().backward()

    def inside(x: Tensor) -> Tensor:
        with autocast(recipe=CURRENT):
            return layer(x)

    checkpoint(inside, x, use_reentrant=True).float().sum().backward()
    # An fp32 layer was not quantised, so that nothing is lost outside.
    whole, x = Linear(64, 32), torch.randn(8, 64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="as without a recipe"), autocast(recipe=CURRENT):
        y = checkpoint(whole, x, use_reentrant=True)
    y.sum().backward()
    torch.testing.assert_close(x.grad, whole.weight.sum(0).expand_as(x))
    assert layer.weight.grad is not None


def test_second_derivatives_are_refused() -> None:
    layer, x = layer_of(), input_of().requires_grad_()
    with autocast(recipe=CURRENT):
        y = layer(x)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)
    with autocast(recipe=CURRENT):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert grad.shape == x.shape


def test_gradients_that_are_asked_for_are_not_written() -> None:
    layer, x = layer_of(fuse_wgrad_accumulation=True), input_of()
    model = DistributedDataParallel(layer)
    layer.weight.main_grad.data.fill_(7.0)
    with autocast(recipe=CURRENT):
        y = model(x)
    (grad,) = torch.autograd.grad(y.float().sum(), layer.weight)
    assert grad.abs().sum() > 0
    assert torch.equal(layer.weight.main_grad, torch.full_like(layer.weight.main_grad, 7.0))


def test_transforms_are_refused() -> None:
    layer, x = layer_of(), input_of()
    with autocast(recipe=CURRENT), pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(layer)(x)


def test_arguments() -> None:
    of_others = {"amax_reduction_group": object(), "recipe": CURRENT}
    off = {"calibrating": True, "enabled": False}
    for options in ({"calibrating": True}, off, {"amax_reduction_group": object()}, of_others):
        with pytest.raises(ValueError, match=f"{next(iter(options))}.*DelayedScaling"), autocast(**options):  # type: ignore[arg-type]
            pass
    for enabled in (True, False):
        with pytest.raises(TypeError, match="takes a recipe"), autocast(enabled, recipe=object()):  # type: ignore[arg-type]
            pass


def test_no_tokens() -> None:
    layer = layer_of(fuse_wgrad_accumulation=True)
    model = DistributedDataParallel(layer)
    layer.weight.main_grad.data.fill_(7.0)
    x = torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=CURRENT):
        y = model(x)
    y.sum().backward()
    model.finish_grad_sync()
    assert y.shape == (0, 32)
    assert x.grad.shape == (0, 64)
    assert layer.weight.main_grad.abs().sum() == 0


def test_a_nan_stays_visible() -> None:
    for recipe in (CURRENT, BLOCK, MXFP8BlockScaling(), NVFP4BlockScaling()):
        layer, x = layer_of(), input_of()
        x[3, 5] = float("nan")
        with autocast(recipe=recipe):
            assert layer(x)[3].isnan().all()


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK, MXFP8BlockScaling(), NVFP4BlockScaling()])
def test_a_loss_scaler_sees_an_overflow(recipe: Any) -> None:
    torch.manual_seed(0)
    layer = Linear(64, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with torch.autocast("cpu", torch.float16), autocast(recipe=recipe):
        y = layer(input_of().float())
    scaler.scale(y.float().square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 2.0**23


@pytest.mark.parametrize("overflow", [float("inf"), -float("inf")])
def test_an_overflow_in_fp16_is_seen_in_each_gradient(overflow: float) -> None:
    layer, x = layer_of().half(), input_of().half().requires_grad_()
    with autocast(recipe=CURRENT):
        y = layer(x)
    dy = torch.ones_like(y)
    dy[2, 3] = overflow
    y.backward(dy)
    assert not any(grad.isfinite().all() for grad in (x.grad, layer.weight.grad, layer.bias.grad))


@pytest.mark.parametrize("shape", [(64,), (8, 64), (2, 4, 64), (0, 64), (2, 0, 64)])
def test_outputs_may_change_in_place(shape: tuple[int, ...]) -> None:
    gradients = []
    for in_place in (False, True):
        layer, x = layer_of(), torch.ones(shape).bfloat16().requires_grad_()
        with autocast(recipe=CURRENT):
            y = layer(x)
        assert y.shape == (*shape[:-1], 32)
        y = y.mul_(y.detach() + 2) if in_place else y * (y.detach() + 2)
        y.float().sum().backward()
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_no_outputs() -> None:
    x = input_of().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the initialisation
        layer = Linear(64, 0, dtype=torch.bfloat16)
    with autocast(recipe=CURRENT):
        y = layer(x)
    y.sum().backward()
    assert y.shape == (8, 0)
    assert x.grad.abs().sum() == 0
    assert layer.weight.grad.shape == (0, 64)


def test_graphed_steps_follow_the_recipe() -> None:
    """Inside the function, and around the call: each has a graph of its own."""
    losses = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            LayerNormMLP(64, 64, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, dtype=torch.bfloat16)
        )
        optimizer = DistributedOptimizer(model, lr=2**-7)

        def train_step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            model.module.backward_dw()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step: Any = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        found = []
        for number in range(10):
            with autocast(number % 2 == 0, recipe=BLOCK):
                found.append(step(input_of() + number).detach())
        losses.append(torch.stack(found))
        if graphed:
            assert step.num_graphs == 2
    assert torch.equal(*losses)


def test_graphed_callables_follow_the_recipe() -> None:
    layer = layer_of(fuse_wgrad_accumulation=True)
    model = DistributedDataParallel(layer)
    x = input_of()
    with autocast(recipe=CURRENT):
        (call,) = make_graphed_callables([layer], [(x.clone().requires_grad_(),)])
        eager = layer(x)
        found = call(x.clone().requires_grad_())
        assert torch.equal(found, eager)
        with model.no_sync():
            found.float().sum().backward()
        graphed = layer.weight.main_grad.clone()
        model.zero_grad_buffer()
        with model.no_sync():
            layer(x).float().sum().backward()
        assert torch.equal(graphed, layer.weight.main_grad)
    with pytest.raises(RuntimeError, match="autocast is not as it was captured"):
        call(x.clone().requires_grad_())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_in_fp32_is_rounded_as_autocast_rounds_it(frozen: bool) -> None:
    """1 + 2^-8 becomes 1, to which the product of 2^-9 adds too little for bf16."""
    layer = Linear(32, 16).requires_grad_(not frozen)
    nn.init.constant_(layer.weight, 2.0**-14)
    nn.init.constant_(layer.bias, 1.0 + 2.0**-8)
    with autocast(recipe=CURRENT), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(4, 32)).eq(1.0).all()
