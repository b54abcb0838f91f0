"""``DelayedScaling`` of modules with several products, of which a part is trained, and of many forwards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GradScaler
from maingrad.te_integration import (
    DelayedScaling,
    Float8CurrentScaling,
    LayerNormMLP,
    Linear,
    autocast,
    convert_linears,
)

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=4)


def run(model: Any, x: Tensor, group: Any = None) -> Tensor:
    with autocast(recipe=RECIPE, amax_reduction_group=group):
        y: Tensor = model(x)
    return y.float().square().sum()


def test_each_product_has_the_limits_of_its_operands() -> None:
    """Inputs and weights are E4M3, gradients E5M2, in the second product too."""
    mlp: Any = LayerNormMLP(32, 48, dtype=BF16)
    model = DistributedDataParallel(mlp)
    run(model, torch.randn(8, 32).to(BF16)).backward()
    model.finish_grad_sync()
    largest = torch.tensor([448.0, 448.0, 57344.0] * 2)
    torch.testing.assert_close(mlp.fp8_scale * mlp.fp8_amax_history[-1], largest)


def test_a_module_that_does_not_run_may_keep_the_recipe_of_an_earlier_iteration() -> None:
    layers = nn.Sequential(Linear(32, 32, dtype=BF16), Linear(32, 32, dtype=BF16))
    model, x = DistributedDataParallel(layers), torch.randn(8, 32).to(BF16)
    run(model, x).backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()
    with autocast(recipe=DelayedScaling(amax_history_len=4, margin=1)):
        y = layers[0](x)
    y.float().square().sum().backward()
    model.finish_grad_sync()
    largest = torch.tensor([448.0, 448.0, 57344.0])
    torch.testing.assert_close(layers[0].fp8_scale * layers[0].fp8_amax_history.amax(0), largest / 2)


def test_a_module_of_which_a_part_is_trained_has_new_scales_after_each_backward() -> None:
    mlp: Any = LayerNormMLP(32, 48, dtype=BF16)
    mlp.fc1_weight.requires_grad_(False)
    x = torch.randn(8, 32).to(BF16)
    run(mlp, x).backward()
    run(mlp, x)
    assert mlp.fp8_scale.ne(1.0).all()


@pytest.mark.parametrize("has_graph", [False, True])
def test_what_a_frozen_module_has_seen_is_forgotten_when_a_part_is_thawed(has_graph: bool) -> None:
    mlp: Any = LayerNormMLP(32, 48, dtype=BF16).requires_grad_(False)
    x = torch.randn(8, 32).to(BF16).requires_grad_(has_graph)
    loss = run(mlp, x)
    if has_graph:
        loss.backward()
    mlp.fc2_weight.requires_grad_(True)
    run(mlp, x)
    assert mlp.fp8_scale.eq(1.0).all() and mlp.fp8_amax_history[0, 3:].eq(-1.0).all()


def test_a_frozen_first_layer_counts_all_microbatches_however_many_they_are() -> None:
    first, second = Linear(16, 16, dtype=BF16).requires_grad_(False), Linear(16, 16, dtype=BF16)
    model = DistributedDataParallel(nn.Sequential(first, second))
    with model.no_sync():
        for number in range(70):
            run(model, torch.full((2, 16), 8.0 if number == 0 else 1.0, dtype=BF16)).backward()
    model.finish_grad_sync()
    assert first.fp8_scale[0] == 448 / 8  # of the first microbatch


def test_a_frozen_first_layer_counts_in_the_second_backward_of_its_forward() -> None:
    """Of which the first one trains nothing."""
    first, second = Linear(16, 16, dtype=BF16).requires_grad_(False), Linear(16, 16, dtype=BF16)
    model = DistributedDataParallel(nn.Sequential(first, second))
    loss = run(model, torch.full((2, 16), 8.0, dtype=BF16))
    torch.autograd.grad(loss, second.bias, retain_graph=True)
    loss.backward()
    model.finish_grad_sync()
    assert first.fp8_scale[0] == 448 / 8


def test_gradients_that_train_nothing_leave_nothing_behind() -> None:
    layer = Linear(16, 16, dtype=BF16)
    model, x = DistributedDataParallel(layer), torch.ones(2, 16, dtype=BF16, requires_grad=True)
    for _ in range(70):
        torch.autograd.grad(run(model, x), x)
    assert len(layer._scaling_use.rows) < 64


def test_embeddings_have_no_scales() -> None:
    model = nn.Sequential(nn.Embedding(4, 16, dtype=BF16), nn.Linear(16, 16, dtype=BF16))
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    run(wrapped, torch.tensor([0, 1])).backward()
    wrapped.finish_grad_sync()
    assert {name for name in model.state_dict() if "fp8" in name} == {"1.fp8_scale", "1.fp8_amax_history"}


def test_one_group_is_that_of_all_modules() -> None:
    layers = nn.Sequential(*(Linear(16, 16, dtype=BF16) for _ in range(2)))

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer, group in zip(self.layers, (None, "others"), strict=True):
                with autocast(recipe=RECIPE, amax_reduction_group=group):
                    x = layer(x)
            return x

    model = DistributedDataParallel(Apart())
    model(torch.ones(2, 16, dtype=BF16)).float().sum().backward()
    with pytest.raises(RuntimeError, match=r"several forms of DelayedScaling.*amax_reduction_group=others"):
        model.finish_grad_sync()


def test_an_iteration_without_a_recipe_leaves_scales_as_they_are() -> None:
    """As one that only evaluates, or of which all quantised layers are off. The next one goes on."""
    found = []
    for pauses in (False, True):
        torch.manual_seed(0)
        layer: Any = Linear(32, 32, dtype=BF16)
        model, x = DistributedDataParallel(layer), torch.randn(8, 32).to(BF16)
        for factor in (1, 2, 3):
            run(model, x * factor).backward()
            model.finish_grad_sync()
            model.zero_grad_buffer()
            if pauses:
                before = layer.fp8_scale.clone()
                model(x * 9).float().square().sum().backward()
                model.finish_grad_sync()
                model.zero_grad_buffer()
                assert torch.equal(layer.fp8_scale, before)
        found.append((layer.fp8_scale, layer.fp8_amax_history))
    assert all(map(torch.equal, *found))


def test_microbatches_of_one_iteration_may_have_other_recipes() -> None:
    """A weight's copies that one keeps serve none of the others."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 16).to(BF16), torch.randn(8, 16).to(BF16)
    recipes = RECIPE, Float8CurrentScaling(), None, RECIPE

    def gradient(*chosen: Any) -> Tensor:
        layer: Any = Linear(16, 16, bias=False, fuse_wgrad_accumulation=True, dtype=BF16)
        layer.load_state_dict({"weight": weight})
        model = DistributedDataParallel(layer)
        for recipe in chosen:
            with autocast(recipe is not None, recipe=recipe):
                y = model(x)
            with model.no_sync():
                y.float().square().sum().backward()
        model.finish_grad_sync()
        return layer.weight.main_grad.clone()

    torch.testing.assert_close(gradient(*recipes), sum(map(gradient, recipes)))


def test_amaxes_of_an_iteration_end_with_it() -> None:
    """Of a frozen layer, too, beside which only modules of others are trained."""
    layer: Any = Linear(16, 16, dtype=BF16).requires_grad_(False)
    model = DistributedDataParallel(nn.Sequential(layer, nn.Linear(16, 16, dtype=BF16)))
    for amax in (8.0, 1.0, 2.0):
        run(model, torch.full((2, 16), amax, dtype=BF16)).backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        assert layer.fp8_amax_history[-1, 0] == amax
        assert not layer._scaling_use.rows


def test_a_frozen_module_without_a_wrapper_has_new_scales_too() -> None:
    """As the layers beside adapters."""
    layer: Any = Linear(16, 16, dtype=BF16).requires_grad_(False)
    x = torch.full((2, 16), 8.0, dtype=BF16, requires_grad=True)
    run(layer, x).backward()
    run(layer, x)
    assert layer.fp8_scale[0] == 448 / 8


@pytest.mark.parametrize("waits", [False, True])
def test_all_microbatches_count_however_many_they_are(waits: bool) -> None:
    """Also of a pipeline that fills first, whose forwards wait for their backwards."""
    layer: Any = Linear(16, 16, dtype=BF16)
    model, losses = DistributedDataParallel(layer), []
    with model.no_sync():
        for number in range(70):
            losses.append(run(model, torch.full((2, 16), 8.0 if number == 0 else 1.0, dtype=BF16)))
            if not waits:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
    model.finish_grad_sync()
    assert layer.fp8_scale[0] == 448 / 8  # of the first microbatch


def test_scales_are_fp32_whatever_dtype_a_program_makes_tensors_in() -> None:
    """Half precision would round amaxes, and take neither their range nor that of scales."""
    found = []
    for default in (torch.float32, BF16):
        torch.manual_seed(0)
        layer: Any = Linear(32, 32, dtype=torch.float16)
        model, x = DistributedDataParallel(layer), torch.randn(8, 32).half()
        torch.set_default_dtype(default)
        try:
            for factor in (1.0, 1.01, 1e-3):
                run(model, x * factor).backward()
                model.finish_grad_sync()
                model.zero_grad_buffer()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((layer.fp8_scale, layer.fp8_amax_history))
    for expected, value in zip(*found, strict=True):
        assert value.dtype is torch.float32
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    ("scales", "history"),
    [
        ((6,), (4, 6)),  # of a module with two products
        ((3,), (4, 6)),
        ((6,), (4, 3)),
        ((3,), (0, 3)),
        ((3,), (3,)),
        ((3,), (4, 1, 3)),
        ((3,), None),
        (None, (4, 3)),
    ],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_state_that_does_not_fit_is_refused(scales: Any, history: Any, has_run: bool) -> None:
    """As a weight of another shape is."""
    layer: Any = Linear(32, 32, dtype=BF16)
    if has_run:
        run(layer, torch.randn(8, 32).to(BF16)).backward()
    shapes = {name: value.shape for name, value in layer.state_dict().items()}
    given = {"fp8_scale": scales, "fp8_amax_history": history}
    state = {name: torch.ones(shape) for name, shape in given.items() if shape is not None}
    with pytest.raises(RuntimeError, match="fp8_"):
        layer.load_state_dict({"weight": layer.weight, "bias": layer.bias, **state})
    assert {name: value.shape for name, value in layer.state_dict().items()} == shapes


def test_a_step_leaves_the_scales_of_its_iteration() -> None:
    layer = Linear(16, 16, fuse_wgrad_accumulation=True, dtype=BF16)
    model = DistributedDataParallel(layer)
    optimizer = DistributedOptimizer(model, lr=0.1)
    for number in range(1, 3):
        run(model, torch.full((2, 16), float(number), dtype=BF16)).backward()
        model.finish_grad_sync()
        optimizer.step()
        assert layer.fp8_scale[0] == 448 / number
        model.zero_grad_buffer()


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_of_a_model_that_ran_under_no_delayed_scaling(overflows: bool) -> None:
    """Another model of the program has done so."""
    other = DistributedDataParallel(Linear(16, 16, dtype=BF16))
    run(other, torch.ones(2, 16, dtype=BF16)).backward()
    other.finish_grad_sync()
    model = DistributedDataParallel(Linear(16, 16))
    optimizer, scaler, before = (
        DistributedOptimizer(model, lr=0.1),
        GradScaler("cpu"),
        model.module.bias.detach().clone(),
    )
    (scaler.scale(model(torch.ones(2, 16)).sum()) * (torch.inf if overflows else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.module.bias, before) is overflows


def test_without_tokens_a_frozen_weight_has_no_gradient() -> None:
    layer = Linear(16, 16, fuse_wgrad_accumulation=True, dtype=BF16)
    layer.weight.requires_grad_(False)
    model = DistributedDataParallel(layer)
    for rows in (0, 2):
        with model.no_sync():
            run(model, torch.full((rows, 16), 4.0, dtype=BF16)).backward()
    model.finish_grad_sync()
    assert layer.weight.grad is None and layer.bias.main_grad.any()
    assert layer.fp8_scale[0] == 448 / 4


def test_layers_that_are_marked_as_experts_have_no_scales() -> None:
    """Other ranks hold other ones: they would not agree."""
    layers: Any = nn.Sequential(Linear(16, 16, dtype=BF16), LayerNormMLP(16, 16, dtype=BF16))
    model = DistributedDataParallel(layers)
    layers[1].fc2_weight.allreduce = False
    with autocast(recipe=RECIPE):
        hidden = layers[0](torch.ones(2, 16, dtype=BF16))
    layers[1](hidden).float().sum().backward()
    model.finish_grad_sync()
    assert {name for name in layers.state_dict() if "fp8" in name} == {"0.fp8_scale", "0.fp8_amax_history"}


def test_amaxes_are_reduced_over_the_group_of_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: reduced.append(group))
    for reduces in (True, False):
        recipe = DelayedScaling(amax_history_len=4, reduce_amax=reduces)
        layers = nn.ModuleList(Linear(16, 16, dtype=BF16) for _ in range(2))
        model = DistributedDataParallel(layers)
        with autocast(recipe=recipe, amax_reduction_group="some ranks"):
            y = layers[1](torch.ones(2, 16, dtype=BF16))  # the first one does not run, and has scales
        y.float().sum().backward()
        model.finish_grad_sync()
        assert reduced == ["some ranks"]
