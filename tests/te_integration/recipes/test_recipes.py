"""Dense modules under ``autocast(recipe=...)``: where gradients go, and how exact they are."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_oracle import SPECS
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.kernels.quantized import Element, dequantize, quantize
from maingrad.launch import simulate
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    WgradQueue,
    autocast,
    convert_linears,
    delayed_wgrad,
)
from maingrad.te_integration.recipes import recipe_named

RECIPES = {
    "current": (Float8CurrentScaling(), 0.1),
    "current, E4M3": (Float8CurrentScaling(fp8_format=Format.E4M3), 0.08),
    "block": (Float8BlockScaling(), 0.08),
    "MXFP8": (MXFP8BlockScaling(), 0.08),
    "NVFP4": (NVFP4BlockScaling(), 0.35),
    "NVFP4, plain": (
        NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        0.35,
    ),
}
"""Recipes, and bounds of the relative error of gradients against bf16."""
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **options: Linear(48, 80, **OPTIONS, **options),
    "no bias": lambda **options: Linear(48, 80, bias=False, **OPTIONS, **options),
    "split": lambda **options: Linear(48, 96, parameters_split=["q", "k", "v"], **OPTIONS, **options),
    "norm": lambda **options: LayerNormLinear(48, 80, normalization="RMSNorm", **OPTIONS, **options),
    "mlp": lambda **options: LayerNormMLP(48, 64, activation="swiglu", **OPTIONS, **options),
    "recomputed mlp": lambda **options: LayerNormMLP(48, 64, checkpoint=True, **OPTIONS, **options),
}
HANDLINGS = ("fused", "unfused", "delayed", "queue", "frozen first", "frozen input")


def batches(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(3, 11, 48, generator=draws).bfloat16() for _ in range(count)]


def gradients(make: Callable[..., nn.Module], recipe: Any, handling: str, count: int = 4) -> dict[str, Tensor]:
    """Of all parameters, and of the inputs, summed over microbatches; by our wrapper."""
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": handling != "unfused", "delay_wgrad_compute": handling == "delayed"}
    module = make(**options)
    if handling == "frozen first":
        next(iter(module.parameters())).requires_grad_(False)
    model = DistributedDataParallel(module)
    queue = WgradQueue()
    found: dict[str, Tensor] = {}
    torch.manual_seed(1)
    for number, x in enumerate(batches(count)):
        x = x.requires_grad_(handling != "frozen input")
        with autocast(recipe is not None, recipe=recipe):
            if handling == "queue":
                with delayed_wgrad(queue):
                    y = model(x)
            else:
                y = model(x)
        with model.no_sync():
            y.float().square().mean().backward()
        if x.grad is not None:
            found[f"input {number}"] = x.grad.float()
    queue.drain()
    while handling == "delayed" and module.need_backward_dw():
        module.backward_dw()
    model.finish_grad_sync()
    flags = [getattr(param, "grad_added_to_main_grad", None) for param in module.parameters()]
    assert not any(flags)  # the provider has taken note of each
    found |= {name: param.main_grad.clone() for name, param in module.named_parameters() if hasattr(param, "main_grad")}
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


CASES = [
    case
    for case in itertools.product(MODULES, RECIPES, HANDLINGS)
    if case[::2] != ("no bias", "frozen first")  # which leaves nothing to train
]


@pytest.mark.parametrize(("module", "recipe", "handling"), CASES)
@pytest.mark.sampled(16)
def test_gradients_are_near_those_of_bf16(module: str, recipe: str, handling: str) -> None:
    low, bound = RECIPES[recipe]
    found = gradients(MODULES[module], low, handling)
    plain = gradients(MODULES[module], None, handling)
    assert found.keys() == plain.keys()
    worst = 3 if "mlp" in module else 2  # two products, and an activation between them
    wrong = {name: error(found[name], plain[name]) for name in plain}
    assert {name: each for name, each in wrong.items() if each > worst * bound} == {}
    weights = [each for name, each in wrong.items() if "weight" in name and "norm" not in name]
    assert all(each > 0.005 for each in weights)  # they are of quantised operands


@pytest.mark.parametrize("handling", [each for each in HANDLINGS if "frozen" not in each])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "NVFP4"])
@pytest.mark.sampled(5)
def test_all_handlings_give_one_gradient(recipe: str, handling: str) -> None:
    """But for the rounding of autograd's bf16 sums."""
    low, _ = RECIPES[recipe]
    fused, other = (gradients(MODULES["split"], low, each) for each in ("fused", handling))
    for name in fused:
        assert error(other[name], fused[name]) < (4e-3 if handling == "unfused" else 1e-6)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("NVFP4", "current, E4M3")])
@pytest.mark.sampled(4)
def test_main_grad_is_the_sum_of_exact_products(recipe: str) -> None:
    """Over four microbatches, against fp64 on the operands as the recipe quantises them."""
    low, _ = RECIPES[recipe]
    torch.manual_seed(0)
    layer = Linear(48, 80, bias=False, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    model = DistributedDataParallel(layer)
    total = torch.zeros(80, 48, dtype=torch.float64)
    for x in batches(4):
        x.requires_grad_()
        with autocast(recipe=low):
            y = model(x)
        dy = torch.randn(y.shape).bfloat16()
        with model.no_sync():
            y.backward(dy)
        rows = {"input": x.detach().flatten(0, 1), "grad": dy.flatten(0, 1), "weight": layer.weight.detach()}
        of_rows = {name: exact(value, low.spec(name, columns=False)) for name, value in rows.items()}
        of_columns = {name: exact(value.t(), low.spec(name, columns=True)) for name, value in rows.items()}
        total += of_columns["grad"] @ of_columns["input"].t()
        assert error(y.detach().flatten(0, 1), of_rows["input"] @ of_rows["weight"].t()) < 3e-3
        assert error(x.grad.flatten(0, 1), of_rows["grad"] @ of_columns["weight"].t()) < 3e-3
    model.finish_grad_sync()
    assert error(layer.weight.main_grad, total) < 1e-5


def exact(x: Tensor, spec: Any) -> Tensor:
    return dequantize(quantize(x.contiguous(), spec), torch.float64)


def test_names_are_specs() -> None:
    """The table in docs/reference/recipes.md."""
    for recipe, operand, columns, spec in (
        (Float8CurrentScaling(), "input", False, "current"),
        (Float8CurrentScaling(), "grad", True, "current, gradients"),
        (Float8BlockScaling(), "grad", True, "block"),
        (Float8BlockScaling(), "weight", True, "block, weights"),
        (MXFP8BlockScaling(), "weight", False, "MXFP8"),
        (NVFP4BlockScaling(), "input", False, "NVFP4"),
        (NVFP4BlockScaling(), "weight", True, "NVFP4, weights"),
    ):
        assert recipe.spec(operand, columns=columns) == SPECS[spec]
    rotated = NVFP4BlockScaling().spec("grad", columns=True)
    assert rotated.rotated
    assert rotated.stochastic


OPERANDS = ("input", "weight", "grad")


def forms(recipe: Recipe, what: str) -> list[Any]:
    """An attribute of the specs of input, weight and gradient, each as it is and then transposed."""
    return [getattr(recipe.spec(operand, columns=columns), what) for operand in OPERANDS for columns in (False, True)]


def test_options_are_in_the_specs() -> None:
    e4m3, e5m2 = Element.E4M3, Element.E5M2
    for kind in (Float8CurrentScaling, DelayedScaling):
        assert forms(kind(), "element") == [e4m3] * 4 + [e5m2] * 2
        assert forms(kind(fp8_format=Format.E4M3), "element") == [e4m3] * 6
    assert forms(Float8BlockScaling(), "block") == [(1, 128)] * 2 + [(128, 128)] * 2 + [(1, 128)] * 2
    assert forms(MXFP8BlockScaling(), "block") == [(1, 32)] * 6
    assert forms(NVFP4BlockScaling(), "block") == [(1, 16)] * 2 + [(16, 16)] * 2 + [(1, 16)] * 2
    assert forms(NVFP4BlockScaling(disable_2d_quantization=True), "block") == [(1, 16)] * 6
    assert forms(NVFP4BlockScaling(), "rotated") == [False, True, False, False, False, True]
    assert forms(NVFP4BlockScaling(disable_rht=True), "rotated") == [False] * 6
    assert forms(NVFP4BlockScaling(), "stochastic") == [False] * 4 + [True] * 2
    assert forms(NVFP4BlockScaling(disable_stochastic_rounding=True), "stochastic") == [False] * 6


NAMES: dict[str, type[Recipe]] = {
    "float8_current": Float8CurrentScaling,
    "float8_delayed": DelayedScaling,
    "float8_block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_names_recipes_that_may_be_emulated(name: str) -> None:
    for emulate in (False, True):
        recipe = recipe_named(name, emulate=emulate)
        assert recipe == NAMES[name](emulate=emulate)
        assert forms(recipe, "emulated") == [emulate] * 6
    assert recipe_named("none") is None


def test_what_is_saved_for_backward() -> None:
    """Beside the parameters: half of bf16's bytes, and for 4 bits a quarter."""
    sizes = {}
    for name, (low, _) in {"bf16": (None, 0.0), **RECIPES}.items():
        layer = Linear(256, 256, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
        model = DistributedDataParallel(layer)
        own = {param.data_ptr() for param in layer.parameters()}
        saved: list[Tensor] = []

        def pack(tensor: Tensor, own: set[int] = own, saved: list[Tensor] = saved) -> Tensor:
            if tensor.data_ptr() not in own:
                saved.append(tensor)
            return tensor

        x = torch.randn(512, 256).bfloat16().requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            autocast(low is not None, recipe=low),
        ):
            model(x)
        sizes[name] = sum({each.data_ptr(): each.untyped_storage().nbytes() for each in saved}.values())
    assert sizes["bf16"] == 2 * 512 * 256
    for name in RECIPES:
        assert sizes[name] <= (0.3 if "NVFP4" in name else 0.55) * sizes["bf16"], name


def test_under_torch_s_autocast_and_without_gradients() -> None:
    """fp32 parameters under torch.autocast, and inference: the same output."""
    torch.manual_seed(0)
    layer = Linear(48, 32, fuse_wgrad_accumulation=True)
    half = copy.deepcopy(layer).bfloat16()
    model = DistributedDataParallel(layer)
    x = torch.randn(5, 48)
    with autocast(recipe=Float8CurrentScaling()), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        with torch.no_grad():
            silent = model(x)
    with autocast(recipe=Float8CurrentScaling()), torch.inference_mode():
        inferred = half(x.bfloat16())
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, silent)
    assert torch.equal(y, inferred)
    y.float().sum().backward()
    assert layer.weight.main_grad.abs().sum() > 0


def test_gradients_of_fp32_parameters_are_not_rounded_to_half_precision() -> None:
    fused = Linear(48, 32, fuse_wgrad_accumulation=True)
    plain = Linear(48, 32)
    plain.load_state_dict(fused.state_dict())
    x, dy = torch.randn(5, 48), torch.randn(5, 32).bfloat16()
    wrapped = DistributedDataParallel(fused)
    for model in (wrapped, plain):
        with autocast(recipe=Float8CurrentScaling()), torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(dy)
    for grad in (plain.bias.grad, fused.bias.main_grad):
        torch.testing.assert_close(grad, dy.float().sum(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain.weight.grad, fused.weight.main_grad, rtol=1e-6, atol=1e-6)


def test_converted_models() -> None:
    """``nn.Linear`` and Conv1D (weights [K, N]) of a model that users have."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), conv1d(48, 64)).bfloat16()
    twin = copy.deepcopy(model)
    convert_linears(model)
    ddp = DistributedDataParallel(model)
    x = batches(1)[0]
    with autocast(recipe=MXFP8BlockScaling()):
        y = ddp(x)
    y.float().square().mean().backward()
    ddp.finish_grad_sync()
    twin(x).float().square().mean().backward()
    for converted, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert 0 < error(converted.main_grad, plain.grad) < 0.2


@pytest.mark.in_turn
def test_training_is_alike_on_any_number_of_ranks() -> None:
    """ZeRO-1 with overlap, delayed weight gradients and recompute: losses fall, and every rank has one model."""

    def program() -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        layers = (
            LayerNormMLP(
                48, 64, checkpoint=number == 1, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, **OPTIONS
            )
            for number in range(2)
        )
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        model = DistributedDataParallel(nn.Sequential(*layers), config)
        optimizer = DistributedOptimizer(model, lr=1e-2)
        losses = []
        for _ in range(6):
            for last, x in zip((False, True), batches(2), strict=True):
                with autocast(recipe=Float8BlockScaling()):
                    y = model(x)
                loss = (y.float() - 1).square().mean()
                if last:
                    loss.backward()
                else:
                    with model.no_sync():
                        loss.backward()
            for layer in reversed(model.module):
                while layer.need_backward_dw():
                    layer.backward_dw()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            losses.append(loss.item())
        return losses, [param.detach().float().clone() for param in model.module.parameters()]

    ranks = simulate(program, 2)
    alone = simulate(program, 1)[0]
    for losses, weights in ranks:
        assert losses[-1] < 0.7 * losses[0]
        assert losses == pytest.approx(alone[0], rel=2e-2)
        assert all(map(torch.equal, weights, ranks[0][1]))
