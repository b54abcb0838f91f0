"""Quantised copies of experts' weights serve one iteration, and nobody sees copies of weights that were."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from maingrad.te_integration.experts import quantized_grouped_linear as products

RECIPES = [
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]
SPLITS = torch.tensor([5, 0, 11])
FORMS = pytest.mark.parametrize("packed", [False, True], ids=["discrete", "packed"])
ALL = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def make(*, packed: bool, fused: bool = True) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(3, 48, 32, fuse_wgrad_accumulation=fused, single_grouped_weight=packed, dtype=torch.bfloat16)


def wrapped(*, packed: bool) -> tuple[GroupedLinear, DistributedDataParallel]:
    layer = make(packed=packed)
    return layer, DistributedDataParallel(layer)


def batch(seed: int) -> Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forward_backward(model: nn.Module, recipe: Any, seed: int) -> list[Tensor]:
    x = batch(seed).requires_grad_()
    with autocast(recipe=recipe):
        y = model(x, SPLITS)
    y.float().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def check(
    model: DistributedDataParallel, layer: GroupedLinear, recipe: Any, seed: int, *, packed: bool, last: bool = False
) -> None:
    """One microbatch has the results of a plain layer that was made with these weights a moment ago."""
    fresh = make(packed=packed, fused=False)
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    with contextlib.nullcontext() if last else model.no_sync():
        found = forward_backward(model, recipe, seed)
    assert all(map(torch.equal, found, forward_backward(fresh, recipe, seed)))


def change(layer: GroupedLinear, expert: int = 2) -> None:
    """As a fused optimizer does: no version is raised."""
    weights = [param for name, param in layer.named_parameters() if name.startswith("weight")]
    (weights[0].data[expert] if len(weights) == 1 else weights[expert].data).mul_(1.5)


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[bool, bool]]]:
    """Each time that weights are quantised: whether as they are, and whether transposed."""
    calls: list[tuple[bool, bool]] = []
    quantise = products.quantize_experts

    def count(matrices: Any, rows: Any, columns: Any) -> Any:
        calls.append((rows is not None, columns is not None))
        return quantise(matrices, rows, columns)

    with mock.patch.object(products, "quantize_experts", count):
        yield calls


@FORMS
@ALL
def test_weights_are_quantised_once_an_iteration(recipe: Any, packed: bool) -> None:
    _, model = wrapped(packed=packed)
    for _ in range(2):
        with counted() as calls:
            for microbatch in range(3):
                with contextlib.nullcontext() if microbatch == 2 else model.no_sync():
                    forward_backward(model, recipe, microbatch)
        assert calls == [(True, True)]
        model.finish_grad_sync()
        model.zero_grad_buffer()


@FORMS
@ALL
@pytest.mark.sampled(1)
def test_every_step_is_seen(recipe: Any, packed: bool) -> None:
    layer, model = wrapped(packed=packed)
    optimizer = DistributedOptimizer(model, lr=0.1)
    for iteration in range(3):
        for microbatch in range(2):
            check(model, layer, recipe, microbatch, packed=packed, last=microbatch == 1)
        model.finish_grad_sync()
        if iteration == 1:
            change(layer)
        else:
            optimizer.step()
        model.zero_grad_buffer()


@FORMS
@ALL
def test_a_change_of_any_expert_before_the_first_gradient(recipe: Any, packed: bool) -> None:
    layer, model = wrapped(packed=packed)
    for expert in (0, 2):
        with autocast(recipe=recipe):
            model(batch(0), SPLITS)  # a metric that nobody wrapped in no_grad
        change(layer, expert)
    check(model, layer, recipe, 1, packed=packed)


@FORMS
@ALL
@pytest.mark.sampled(1)
def test_what_changes_between_microbatches(recipe: Any, packed: bool) -> None:
    """Weights that are swapped in for an evaluation, another recipe, and writes that raise a version."""
    layer, model = wrapped(packed=packed)
    check(model, layer, recipe, 0, packed=packed)
    kept = {name: param.detach().clone() for name, param in layer.named_parameters()}
    change(layer)
    with torch.no_grad(), autocast(recipe=recipe):
        teacher = model(batch(1), SPLITS)
    for name, param in layer.named_parameters():
        param.data.copy_(kept[name])
    with torch.no_grad(), autocast(recipe=recipe):
        student = model(batch(1), SPLITS)
    assert not torch.equal(teacher, student)
    check(model, layer, RECIPES[RECIPES.index(recipe) - 1], 1, packed=packed)
    check(model, layer, recipe, 1, packed=packed)
    with torch.no_grad():  # the last expert's alone
        [param for name, param in layer.named_parameters() if name.startswith("weight")][-1].mul_(2)
    check(model, layer, recipe, 2, packed=packed, last=True)


@pytest.mark.parametrize("frozen", [0, 2])
def test_beside_a_frozen_expert(frozen: int) -> None:
    layer = make(packed=False)
    layer.get_parameter(f"weight{frozen}").requires_grad_(False)
    model = DistributedDataParallel(layer)
    for iteration in range(2):
        for microbatch in range(2):
            check(model, layer, RECIPES[1], microbatch, packed=False, last=microbatch == 1)
        model.finish_grad_sync()
        change(layer, frozen if iteration else 1)
        model.zero_grad_buffer()


def test_a_gradient_of_one_expert_speaks_for_none_of_the_others() -> None:
    """The first expert's weight is another layer's too, whose backward comes first."""
    layer = make(packed=False)
    other = Linear(48, 32, bias=False, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    other.weight = layer.get_parameter("weight0")
    layer.other = other
    model = DistributedDataParallel(layer)
    with model.no_sync():
        with autocast(recipe=RECIPES[0]):
            loss = other(batch(1)).float().square().mean()
            model(batch(0), SPLITS)
        change(layer)
        loss.backward()
        x = batch(2)
        with autocast(recipe=RECIPES[0]):
            found = model(x, SPLITS)
    fresh = make(packed=False, fused=False)
    fresh.load_state_dict({name: value for name, value in layer.state_dict().items() if "other" not in name})
    with autocast(recipe=RECIPES[0]):
        assert torch.equal(found, fresh(x, SPLITS))


@FORMS
def test_another_dtype_of_products_between_microbatches(packed: bool) -> None:
    torch.manual_seed(0)
    layer = GroupedLinear(3, 48, 32, fuse_wgrad_accumulation=True, single_grouped_weight=packed)
    model, found = DistributedDataParallel(layer), []
    for mine in (model, copy.deepcopy(layer)):
        for dtype in (torch.bfloat16, torch.float16):
            with autocast(recipe=RECIPES[0]), torch.autocast("cpu", dtype):
                y = mine(batch(0).float(), SPLITS)
            if mine is model:
                with model.no_sync():
                    y.float().sum().backward()
            found.append(y)
    assert all(map(torch.equal, found[:2], found[2:]))


def test_one_weight_of_two_layers_that_store_it_differently() -> None:
    """One multiplies by the transposes of what the other multiplies by: neither takes the other's copies."""
    options: dict[str, Any] = {"single_grouped_weight": True, "bias": False, "dtype": torch.bfloat16}
    layers: list[Any] = [GroupedLinear(3, 48, 48, fuse_wgrad_accumulation=True, **options) for _ in range(2)]
    layers[1].weight, layers[1].transposed = layers[0].weight, True
    model = DistributedDataParallel(nn.ModuleList(layers))
    with model.no_sync(), autocast(recipe=RECIPES[0]):
        layers[0](batch(0), SPLITS).float().sum().backward()
        for layer in layers:
            plain = GroupedLinear(3, 48, 48, **options)
            plain.weight.data.copy_(layer.weight.transpose(1, 2) if layer.transposed else layer.weight)
            assert torch.equal(layer(batch(1), SPLITS), plain(batch(1), SPLITS))


@FORMS
def test_what_no_backward_will_read_is_not_quantised(packed: bool) -> None:
    """Transposes of weights for inputs that need no gradient, and any of an evaluation."""
    _, model = wrapped(packed=packed)
    inputs: list[bool] = []
    quantise = products.quantize_grouped_both

    def count(matrix: Any, rows: Any, columns: Any, offsets: Any) -> Any:
        inputs.append(columns is not None)
        return quantise(matrix, rows, columns, offsets)

    with mock.patch.object(products, "quantize_grouped_both", count), counted() as calls, autocast(recipe=RECIPES[0]):
        model(batch(0), SPLITS)
        with torch.no_grad():
            model(batch(0).requires_grad_(), SPLITS)
    assert calls == [(True, False), (True, False)] and inputs == [True, False]


@FORMS
def test_a_gradient_that_overflows_in_fp16_stays_visible(packed: bool) -> None:
    """Elements have no Inf: a loss scaler finds NaN."""
    layer = GroupedLinear(3, 48, 32, bias=False, single_grouped_weight=packed, dtype=torch.float16)
    x = batch(0).half().requires_grad_()
    with autocast(recipe=RECIPES[0]):
        y = layer(x, SPLITS)
    grad = torch.ones_like(y)
    grad[-1, 0] = torch.inf
    y.backward(grad)
    assert x.grad is not None and x.grad.isnan().any()
    assert any(param.grad is not None and param.grad.isnan().any() for param in layer.parameters())


@FORMS
def test_without_a_provider_a_pass_makes_its_own_copies(packed: bool) -> None:
    layer = make(packed=packed, fused=False)
    with counted() as calls:
        forward_backward(layer, RECIPES[0], 0)
        with torch.no_grad(), autocast(recipe=RECIPES[0]):
            layer(batch(1), SPLITS)
    assert calls == [(True, False), (False, True), (True, False)]
