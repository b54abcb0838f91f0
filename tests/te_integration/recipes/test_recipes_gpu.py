"""Recipes on a GPU: kernels with the bits of the reference, products near fp64, training as eager and as a graph."""

import dataclasses

import pytest
import torch
from quant_oracle import SPECS, check_copy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.kernels.quantized import (
    Quantized,
    dequantize,
    quantize,
    quantize_both,
    scaled_product,
    scaled_wgrad_accumulate,
)
from maingrad.kernels.quantized.quantize import record_amax
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from maingrad.te_integration.recipes import Recipe

pytestmark = pytest.mark.gpu

NATIVE_RECIPES = (Float8CurrentScaling, DelayedScaling, Float8BlockScaling)
RECIPES = (*NATIVE_RECIPES, MXFP8BlockScaling, NVFP4BlockScaling)


@pytest.mark.parametrize("name", SPECS)
def test_bits_are_those_of_the_cpu(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(300, 515, generator=draws) * torch.exp2(torch.randn(300, 515, generator=draws) * 3)
        x[0], x[1, 3], x[2, 5] = 0.0, float("inf"), float("nan")
        x = x.to(dtype)
        spec = dataclasses.replace(SPECS[name], emulated=True)
        found, expected = quantize(x.cuda(), spec), quantize(x, spec)
        for mine, other in zip(found.tensors, expected.tensors, strict=True):
            # As numbers: NaN has two codes in E4M3.
            torch.testing.assert_close(mine.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
        finite = slice(128, None) if spec.block else slice(0, 0)  # no block of a row that is not finite
        product = scaled_product(found, found, torch.float32)[finite, finite].cpu()
        same = scaled_product(expected, expected, torch.float32)[finite, finite]
        assert (product - same).norm() <= 1e-5 * same.norm()


@pytest.mark.parametrize(
    "recipe", [*(recipe(emulate=True) for recipe in RECIPES), *(recipe() for recipe in NATIVE_RECIPES)]
)
def test_training_as_a_graph_is_eager_training(recipe: Recipe) -> None:
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = (LayerNormMLP(256, 512, fuse_wgrad_accumulation=True, dtype=torch.bfloat16) for _ in range(2))
        model = DistributedDataParallel(nn.Sequential(*layers).cuda())
        optimizer = DistributedOptimizer(model, lr=2**-8)

        def train_step(x: Tensor, model=model, optimizer=optimizer) -> Tensor:
            with autocast(recipe=recipe):
                y = model(x)
            loss = (y.float() - 1).square().mean()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        torch.manual_seed(1)
        x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
        outcomes.append(torch.stack([step(x).detach() for _ in range(8)]))
    assert outcomes[0][-1] < outcomes[0][0]
    if isinstance(recipe, NVFP4BlockScaling):  # a graph draws other numbers for the rounding
        torch.testing.assert_close(*outcomes, rtol=0.05, atol=0)
    else:
        assert torch.equal(*outcomes)


def test_without_a_kernel() -> None:
    layer, x = Linear(64, 64, dtype=torch.bfloat16, device="cuda"), torch.ones(16, 64, device="cuda").bfloat16()
    for recipe in (MXFP8BlockScaling, NVFP4BlockScaling):
        with autocast(recipe=recipe()), pytest.raises(RuntimeError, match="emulate=True"):
            layer(x)


NATIVE = ("current", "current, gradients", "block", "block, weights")
SHAPES = ((300, 515), (128, 256), (1, 1), (257, 48), (130, 896), (77, 96), (1024, 2048))


def drawn(rows: int, columns: int, dtype: torch.dtype, *, special: bool = False) -> Tensor:
    draws = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=draws) * torch.exp2(torch.randn(rows, columns, generator=draws) * 3)
    x[0, 0] = 0.0
    if special and rows > 3 and columns > 7:
        x[0], x[1, 3], x[2, 5], x[3:, 7] = 0.0, float("inf"), float("nan"), 1e-40
    return x.to(dtype).cuda()


def assert_bits(found: Quantized | None, expected: Quantized) -> None:
    torch.testing.assert_close(*check_copy(found, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled(100)
def test_the_quantiser_has_the_bits_of_the_reference(name: str, shape: tuple[int, int]) -> None:
    spec = SPECS[name]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for special in (False, True):
            x = drawn(*shape, dtype, special=special)
            for matrix in (x, x.t(), x[:, : max(1, shape[1] // 2)]):
                rows, columns = quantize_both(matrix, spec, spec)
                assert_bits(rows, quantize(matrix, spec))
                assert_bits(columns, quantize(matrix.t(), spec))
                assert_bits(quantize_both(matrix, spec, None)[0], quantize(matrix, spec))
                assert_bits(quantize_both(matrix, None, spec)[1], quantize(matrix.t(), spec))


@pytest.mark.parametrize("name", NATIVE[:2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled(100)
def test_a_given_scale_has_the_bits_of_the_reference(name: str, shape: tuple[int, int]) -> None:
    """And so has the amax that is recorded beside."""
    spec = SPECS[name]
    for dtype in (torch.bfloat16, torch.float16):
        for special in (False, True):
            x = drawn(*shape, dtype, special=special)
            for matrix in (x, x.t(), x[:, : max(1, shape[1] // 2)]):
                for scale in torch.tensor([1.0, 2.7, 3.1e-6, torch.finfo(torch.float32).max], device="cuda"):
                    amax, expected = torch.full((2, 4), -1.0, device="cuda")
                    amax, expected = amax[1], expected[1]
                    rows, columns = quantize_both(matrix, spec, spec, scale=scale, amax=amax)
                    record_amax(matrix, expected)
                    torch.testing.assert_close(amax, expected, rtol=0, atol=0, equal_nan=True)
                    assert_bits(rows, quantize(matrix, spec, scale=scale))
                    assert_bits(columns, quantize(matrix.t(), spec, scale=scale))
                    assert_bits(quantize_both(matrix, spec, None, scale=scale)[0], quantize(matrix, spec, scale=scale))
                    alone = quantize_both(matrix, None, spec, scale=scale)[1]
                    assert_bits(alone, quantize(matrix.t(), spec, scale=scale))


PAIRS = (("current", "current"), ("current, gradients", "current"), ("block", "block, weights"), ("block", "block"))
PRODUCTS = (
    (256, 256, 512),
    (300, 256, 512),
    (1, 256, 256),
    (77, 80, 96),
    (256, 256, 640),
    (515, 300, 200),
    (64, 48, 8192),
)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.sampled(100)
def test_products_are_near_fp64(pair: tuple[str, str], shape: tuple[int, int, int]) -> None:
    """Hopper's promoted sums of 8-bit products err by 2.4e-4 of the result, without promotion by ten times that."""
    rows, features, columns = shape
    left = quantize_both(drawn(rows, columns, torch.bfloat16), SPECS[pair[0]], None)[0]
    right = quantize_both(drawn(features, columns, torch.bfloat16), SPECS[pair[1]], None)[0]
    assert left is not None and right is not None
    exact = dequantize(left, torch.float64) @ dequantize(right, torch.float64).t()
    bias = torch.randn(features, device="cuda")
    for dtype, bound in ((torch.float32, 5e-4), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        if dtype is torch.float16:  # whose range is small
            left, right = left._replace(scale=left.scale * 2**-12), right._replace(scale=right.scale * 2**-8)
            exact = exact * 2**-20
        for fast, wider in ((False, 1), (True, 20)):
            found = scaled_product(left, right, dtype, fast=fast).double()
            assert (found - exact).norm() <= bound * wider * exact.norm()
        found = scaled_product(left, right, dtype, bias.to(dtype)).double()
        assert (found - exact - bias.to(dtype)).norm() <= bound * (exact + bias).norm()
    left, right = left._replace(scale=left.scale * 2**12), right._replace(scale=right.scale * 2**8)
    exact = exact * 2**20
    for dtype, bound in ((torch.float32, 5e-4), (torch.bfloat16, 8e-3)):
        main_grad = torch.full((rows, features), float("nan"), dtype=dtype, device="cuda")
        place = main_grad.data_ptr()
        for count, overwrite in ((1, True), (2, False), (3, False)):
            scaled_wgrad_accumulate(left, right, main_grad, overwrite=overwrite)
            assert (main_grad.double() - count * exact).norm() <= bound * count * exact.norm()
        assert main_grad.data_ptr() == place


def test_rows_of_a_quantised_matrix() -> None:
    """A split linear layer's weight gradients: the parts' rows lie in one matrix, and their scales too."""
    left = quantize_both(drawn(640, 300, torch.bfloat16), None, SPECS["block"])[1]

    assert left is not None
    other = quantize_both(drawn(640, 96, torch.bfloat16), None, SPECS["block"])[1]
    assert other is not None
    product = scaled_product(left, other, torch.float32)
    for start, end in ((0, 128), (128, 300), (100, 150)):
        assert torch.equal(scaled_product(left.rows(start, end), other, torch.float32), product[start:end])


@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_are_near_their_emulation(recipe: type, dtype: torch.dtype) -> None:
    """Odd sizes, a split weight, four microbatches; no wait for the device."""
    found = []
    for emulate in (True, False):
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True, "dtype": dtype, "device": "cuda"}
        model = DistributedDataParallel(Linear(200, 90, parameters_split={"q": 40, "k": 50}, **options))
        torch.manual_seed(1)
        inputs = [batch.requires_grad_() for batch in torch.randn(4, 3, 101, 200, device="cuda", dtype=dtype)]
        grads = torch.randn(4, 3, 101, 90, device="cuda", dtype=dtype)
        outputs = []
        for number, (x, dy) in enumerate(zip(inputs, grads, strict=True)):
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first compiles
            try:
                with model.no_sync():
                    with autocast(recipe=recipe(emulate=emulate)):
                        outputs.append(model(x))
                    outputs[-1].backward(dy)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        parameters = [parameter.main_grad.clone() for parameter in model.parameters()]
        found.append((parameters, [*outputs, *(x.grad for x in inputs)]))
    for emulated, native in zip(found[0][0], found[1][0], strict=True):
        assert (emulated - native).norm() <= 1e-3 * emulated.norm()
    for emulated, native in zip(found[0][1], found[1][1], strict=True):
        assert (emulated - native).norm() <= 8e-3 * emulated.norm()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling])
def test_models_are_near_their_emulation(recipe: type) -> None:
    """Two quantised runs part: an output that is rounded otherwise is quantised to another element."""
    found = []
    for emulate in (True, False):
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16, "device": "cuda"}
        layers = Linear(200, 96, **options), LayerNormMLP(96, 136, activation="swiglu", **options)
        model = DistributedDataParallel(nn.Sequential(*layers, Linear(96, 50, **options)))
        x = torch.randn(303, 200, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
        with autocast(recipe=recipe(emulate=emulate)):
            y = model(x)
        y.float().square().mean().backward()
        model.finish_grad_sync()
        found.append([parameter.main_grad.clone() for parameter in model.parameters()])
    for emulated, native in zip(*found, strict=True):
        assert (emulated - native).norm() <= 0.1 * emulated.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8_format", Format)
def test_delayed_scales_are_those_of_the_emulation(dtype: torch.dtype, fp8_format: Format) -> None:
    """Amaxes and scales bit for bit, results nearly: iterations of two microbatches, an evaluation, a recompute.

    No wait for the device after the first iteration, whose kernels are compiled.
    """
    found = []
    for emulate in (True, False):
        torch.manual_seed(0)
        recipe = DelayedScaling(emulate=emulate, amax_history_len=3, fp8_format=fp8_format)
        layer = Linear(200, 96, fuse_wgrad_accumulation=True, dtype=dtype, device="cuda")
        model = DistributedDataParallel(layer)

        def run(x: Tensor, model=model, recipe=recipe) -> Tensor:
            with autocast(recipe=recipe):
                return model(x)

        draws = torch.Generator(device="cuda").manual_seed(1)
        outputs, states = [], []
        for step in range(5):
            x = torch.randn(2, 120, 200, device="cuda", generator=draws).mul(1 + step % 3).to(dtype).requires_grad_()
            dy = torch.randn(2, 120, 96, device="cuda", generator=draws).mul(2.0 ** -(step % 3)).to(dtype)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                with torch.no_grad():
                    outputs.append(run(x[0] * 100))
                with model.no_sync():
                    y = checkpoint(run, x[0], use_reentrant=False, preserve_rng_state=False)
                    y.backward(dy[0])
                outputs += [y, run(x[1])]
                outputs[-1].backward(dy[1])
                outputs += [layer.weight.main_grad.clone(), x.grad]
                states.append(layer.fp8_amax_history.clone())
                model.finish_grad_sync()
                model.zero_grad_buffer()
                states += [layer.fp8_amax_history.clone(), layer.fp8_scale.clone()]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append((states, outputs))
    for emulated, native in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(emulated, native)
    assert len({tuple(scales.tolist()) for scales in found[1][0][2::3]}) > 2, "scales change"
    for emulated, native in zip(found[0][1], found[1][1], strict=True):
        assert (emulated - native).norm() <= 8e-3 * emulated.norm()


def test_delayed_scaling_reads_each_matrix_once() -> None:
    """Of three matrices, which have two copies each, one kernel makes the copies and records the amax."""
    layer = Linear(512, 256, bias=False, fuse_wgrad_accumulation=True, dtype=torch.bfloat16, device="cuda")
    model = DistributedDataParallel(layer)
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CUDA]) as measured:
            with autocast(recipe=DelayedScaling()):
                y = model(x)
            y.backward(dy)
            torch.cuda.synchronize()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        x.grad = None
    names = [event.key for event in measured.key_averages() for _ in range(event.count)]
    assert sum("tiles_kernel" in name for name in names) == 3, names
    others = ("amax_kernel", "abs_kernel", "AbsFunctor", "at::native::reduce_kernel")
    assert not any(other in name for name in names for other in others), names


def test_saved_bytes() -> None:
    layer = Linear(1024, 1024, fuse_wgrad_accumulation=True, dtype=torch.bfloat16, device="cuda")
    DistributedDataParallel(layer)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    for recipe in (Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
        saved: list[int] = []

        def note(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            if tensor.data_ptr() != layer.weight.data_ptr():
                saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast(recipe=recipe):
            layer(x)
        assert sum(saved) <= 0.55 * x.nbytes
