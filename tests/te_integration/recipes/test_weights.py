"""Quantised copies of weights serve one iteration, and nobody sees a copy of weights that were."""

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from traced_forms import traced

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.kernels.quantized import operands
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormMLP,
    Linear,
    autocast,
)

RECIPES = [Float8CurrentScaling(), Float8BlockScaling()]


def wrapped() -> tuple[Linear, DistributedDataParallel]:
    torch.manual_seed(0)
    layer = Linear(64, 96, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    return layer, DistributedDataParallel(layer)


def batch(seed: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forward_backward(model: nn.Module, recipe: Any, seed: int) -> tuple[Tensor, Tensor]:
    x = batch(seed).requires_grad_()
    with autocast(recipe=recipe):
        y = model(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def check(model: DistributedDataParallel, layer: Linear, recipe: Any, seed: int, *, last: bool = False) -> None:
    """One microbatch has the results of a plain layer that was made with these weights a moment ago."""
    fresh = Linear(64, 96, dtype=torch.bfloat16)
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    with contextlib.nullcontext() if last else model.no_sync():
        found = forward_backward(model, recipe, seed)
    for mine, other in zip(found, forward_backward(fresh, recipe, seed), strict=True):
        assert torch.equal(mine, other)


def change(layer: Linear) -> None:
    """As a fused optimizer does: no version is raised."""
    layer.weight.data.mul_(1.5)


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of all matrices that are quantised."""
    shapes: list[tuple[int, ...]] = []
    quantize = operands.quantize

    def count(x: Tensor, spec: Any, **options: Any) -> Any:
        shapes.append(tuple(x.shape))
        return quantize(x, spec, **options)

    with mock.patch.object(operands, "quantize", count):
        yield shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_quantised_once_an_iteration(recipe: Any) -> None:
    _, model = wrapped()
    for _ in range(2):
        with counted() as shapes:
            for microbatch in range(3):
                with contextlib.nullcontext() if microbatch == 2 else model.no_sync():
                    forward_backward(model, recipe, microbatch)
        assert shapes.count((96, 64)) == 1 and shapes.count((64, 96)) == 1
        model.finish_grad_sync()
        model.zero_grad_buffer()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_optimizer_step_is_seen(recipe: Any) -> None:
    layer, model = wrapped()
    optimizer = DistributedOptimizer(model, lr=0.1)
    for iteration in range(3):
        for microbatch in range(3):
            check(model, layer, recipe, microbatch, last=microbatch == 2)
        model.finish_grad_sync()
        if iteration == 1:
            change(layer)
        else:
            optimizer.step()
        model.zero_grad_buffer()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_metric_that_trains_between_reduction_and_step(recipe: Any) -> None:
    layer, model = wrapped()
    for _ in range(2):
        check(model, layer, recipe, 0)
        check(model, layer, recipe, 1, last=True)
        model.finish_grad_sync()
        with autocast(recipe=recipe):
            model(batch(2))  # nobody wrote no_grad
        change(layer)
        fresh = Linear(64, 96, dtype=torch.bfloat16)
        fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
        with autocast(recipe=recipe):
            assert torch.equal(model(batch(2)), fresh(batch(2))), "the step is seen before gradients are cleared"
        model.zero_grad_buffer()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_line_search_before_the_first_backward(recipe: Any) -> None:
    layer, model = wrapped()
    losses = []
    for _ in range(3):
        with autocast(recipe=recipe):
            losses.append(model(batch(0)).float().square().mean())
        change(layer)
    assert losses[0] < losses[1] < losses[2]
    del losses
    check(model, layer, recipe, 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_swapped_weights_are_evaluated_between_microbatches(recipe: Any) -> None:
    layer, model = wrapped()
    check(model, layer, recipe, 0)
    mine, average = layer.weight.detach().clone(), layer.weight.detach() * 2
    layer.weight.data.copy_(average)
    with torch.no_grad(), autocast(recipe=recipe):
        teacher = model(batch(1))
    layer.weight.data.copy_(mine)
    with torch.no_grad(), autocast(recipe=recipe):
        student = model(batch(1))
    assert not torch.equal(teacher, student)
    check(model, layer, recipe, 1, last=True)


def test_another_recipe_and_changed_weights_between_microbatches() -> None:
    layer, model = wrapped()
    check(model, layer, RECIPES[0], 0)
    check(model, layer, RECIPES[1], 0)
    with torch.no_grad():
        layer.weight.mul_(2)  # raises the version
    check(model, layer, RECIPES[1], 0)
    layer.weight.data = layer.weight.data * 2
    check(model, layer, RECIPES[1], 0)


def test_gradients_that_are_cleared_between_forward_and_backward() -> None:
    layer, model = wrapped()
    for seed in range(2):
        fresh = Linear(64, 96, dtype=torch.bfloat16)
        fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
        x, y = (batch(seed).requires_grad_() for _ in range(2))
        with autocast(recipe=RECIPES[0]):
            losses = [each(given).float().square().mean() for each, given in ((model, x), (fresh, y))]
        model.zero_grad()
        for loss in losses:
            loss.backward()
        model.finish_grad_sync()
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
        change(layer)


def test_a_backward_of_an_earlier_recipe_keeps_nothing_for_a_forward() -> None:
    layer, model = wrapped()
    outputs = []
    for recipe in RECIPES:
        with autocast(recipe=recipe):
            outputs.append(model(batch(0)))
    with model.no_sync():
        outputs[0].float().sum().backward()
    for recipe in RECIPES:
        check(model, layer, recipe, 0)


def test_a_slice_without_a_gradient_so_far_may_change() -> None:
    layer = Linear(64, 96, parameters_split=("q", "k"), fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    model, fresh = DistributedDataParallel(layer), Linear(64, 96, parameters_split=("q", "k"), dtype=torch.bfloat16)
    for _ in range(2):
        fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
        with autocast(recipe=RECIPES[0]):
            output, expected = model(batch(0)), fresh(batch(0))
        assert torch.equal(output, expected)
        with model.no_sync():
            output.float().sum().backward(inputs=[layer.q_weight])
        layer.k_weight.data.mul_(1.5)  # nobody is told
    with torch.no_grad():
        for seed in range(2):
            with model.no_sync(), torch.enable_grad():
                forward_backward(model, RECIPES[0], seed)
            layer.k_weight.mul_(2)  # raises the version
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    with autocast(recipe=RECIPES[0]):
        assert torch.equal(model(batch(0)), fresh(batch(0)))


def test_inputs_of_an_iteration_that_need_a_gradient_and_inputs_that_do_not() -> None:
    layer, model = wrapped()
    with autocast(recipe=RECIPES[0]):
        x = batch(0).requires_grad_()
        first, second = model(x), model(batch(1))
        with model.no_sync():
            (first.float().sum() + second.float().sum()).backward()
        check(model, layer, RECIPES[0], 2)
        fresh = copy.deepcopy(layer.requires_grad_(False))
        y = x.detach().requires_grad_()
        fresh(y).float().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.grad)


def test_another_dtype_of_products_between_microbatches() -> None:
    layer = Linear(64, 96, fuse_wgrad_accumulation=True)
    model, found = DistributedDataParallel(layer), []
    for mine in (model, copy.deepcopy(layer)):
        for dtype in (torch.bfloat16, torch.float16):
            with autocast(recipe=RECIPES[0]), torch.autocast("cpu", dtype):
                y = mine(batch(0).float())
            if mine is model:
                with model.no_sync():
                    y.float().sum().backward()
            found.append(y)
    assert all(map(torch.equal, found[:2], found[2:]))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
@pytest.mark.parametrize("first", [False, True], ids=["", "of the first layer"])
def test_the_forwards_that_train_share_a_copy(mode: Any, first: bool) -> None:
    """That of the first layer too, whose input needs no gradient."""
    _, model = wrapped()
    with counted() as shapes, model.no_sync():
        for seed in range(3):
            with autocast(recipe=RECIPES[0]), mode():
                y = model(batch(seed).requires_grad_(not first))
            y.float().sum().backward()
    assert shapes.count((96, 64)) == 1 and shapes.count((64, 96)) == (0 if first else 1)


def test_one_weight_of_two_layers_that_store_it_differently() -> None:
    """One multiplies by the transpose of what the other multiplies by: neither takes the other's copy."""
    layers: list[Any] = [Linear(64, 64, bias=False, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)]
    layers += [copy.deepcopy(layers[0])]
    layers[1].weight, layers[1].transposed = layers[0].weight, True
    model = DistributedDataParallel(nn.ModuleList(layers))
    with model.no_sync(), autocast(recipe=RECIPES[0]):
        layers[0](batch(0)).float().sum().backward()
        for layer in layers:
            plain = Linear(64, 64, bias=False, dtype=torch.bfloat16)
            plain.weight.data.copy_(layer.weight.t() if layer.transposed else layer.weight)
            assert torch.equal(layer(batch(1)), plain(batch(1)))


def test_one_weight_of_two_modules_whose_delayed_scales_differ() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    layers: list[Any] = [Linear(64, 64, bias=False, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)]
    layers += [copy.deepcopy(layers[0])]
    layers[1].weight = layers[0].weight
    model = DistributedDataParallel(nn.ModuleList(layers))
    for _ in range(2):
        with model.no_sync(), autocast(recipe=recipe):
            layers[0](batch(0)).float().sum().backward()
            found = layers[1](batch(1))
        model.finish_grad_sync()
        model.zero_grad_buffer()
    assert layers[0].fp8_scale[1] != layers[1].fp8_scale[1] == 1.0
    plain = Linear(64, 64, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict({"weight": layers[0].weight})
    with autocast(recipe=recipe):
        assert torch.equal(found, plain(batch(1)))


def test_one_weight_of_two_products_whose_delayed_scales_differ() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    mlp, plain = (LayerNormMLP(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2))
    mlp.fuse_wgrad_accumulation = True
    for each in (mlp, plain):
        each.fc2_weight = each.fc1_weight
    model = DistributedDataParallel(mlp)
    forward_backward(model, recipe, 0)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    mlp.fp8_scale[4] = 16.0  # of the second product's weight
    plain.load_state_dict(copy.deepcopy(mlp.state_dict()))
    with model.no_sync():
        forward_backward(model, recipe, 1)
        with autocast(recipe=recipe):
            assert torch.equal(model(batch(2)), plain(batch(2)))


def test_nothing_is_quantised_for_a_backward_that_cannot_come() -> None:
    _, model = wrapped()
    for mode in (contextlib.nullcontext, traced):
        with counted() as shapes, torch.no_grad(), autocast(recipe=RECIPES[0]), mode():
            model(batch(0).requires_grad_())
        assert sorted(shapes) == [(8, 64), (96, 64)]


@pytest.mark.in_turn
def test_copies_go_with_the_iteration() -> None:
    """The memory is free again when the gradient is reduced."""
    _, model = wrapped()
    before = alive_elements()
    forward_backward(model, RECIPES[0], 0)
    model.finish_grad_sync()
    assert alive_elements() == before


def alive_elements() -> int:
    gc.collect()
    return sum(
        tensor.numel()
        for tensor in gc.get_objects()
        if isinstance(tensor, Tensor) and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )
