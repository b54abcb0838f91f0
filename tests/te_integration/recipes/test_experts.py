"""``GroupedLinear`` under ``autocast(recipe=...)``: each expert against fp64 on its own quantised operands."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.kernels.quantized import dequantize, quantize
from maingrad.launch import simulate
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GroupedLinear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    WgradQueue,
    autocast,
    delayed_wgrad,
)
from maingrad.te_integration.dense.linear import ProductUse
from maingrad.te_integration.experts.quantized_grouped_linear import quantized_grouped_linear
from maingrad.te_integration.recipes import Operand, Recipe

RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "current, E4M3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "block": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(disable_stochastic_rounding=True),  # what an oracle can draw, too
}
K, N = 48, 80
SPLITS = ([37, 0, 130, 3], [20, 20, 20, 20], [0, 0, 5, 1], [129, 31, 0, 17])
"""Of four microbatches."""
PADDING = 2
HANDLINGS = ("fused", "plain", "delayed", "queue", "frozen")


def layer_of(**options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16, **options}
    layer = GroupedLinear(4, K, N, **options)
    with torch.no_grad():
        for expert in range(4):  # magnitudes of experts differ, so that a scale of others' is noticed
            for params in (weights_of(layer), biases_of(layer)):
                params[expert].mul_(4.0**expert)
    return layer


def weights_of(layer: GroupedLinear) -> list[Tensor]:
    return each_of(layer, layer.weight_names, lambda param: param.detach())


def biases_of(layer: GroupedLinear) -> list[Tensor]:
    names = layer.layer.bias_names
    found = each_of(layer, names, lambda param: param.detach())
    return found or [torch.zeros(N)] * 4


def each_of(layer: GroupedLinear, names: Sequence[str], take: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = [take(getattr(layer, name)) for name in names if getattr(layer, name) is not None]
    return list(found[0].unbind()) if len(found) == 1 and found[0].shape[0] == 4 else found


def batch(number: int, dtype: torch.dtype = torch.bfloat16, padding: int = PADDING) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their splits, and the gradient of the output; NaN in pad rows. Each expert has magnitudes of its own."""
    draws = torch.Generator().manual_seed(number)
    splits = torch.tensor(SPLITS[number])
    sizes = torch.repeat_interleave(4.0 ** -torch.arange(4), splits)[:, None]
    x, dy = (torch.randn(int(splits.sum()), width, generator=draws) * sizes for width in (K, N))
    if padding:
        x, dy = (torch.cat([each, torch.full((padding, each.shape[1]), torch.nan)]) for each in (x, dy))
    return x.to(dtype).requires_grad_(), splits, dy.to(dtype)


class Exact:
    """fp64 on the operands that the recipe quantises, expert by expert."""

    def __init__(self, recipe: Recipe, layer: GroupedLinear, dtype: torch.dtype = torch.bfloat16) -> None:
        self.recipe = recipe
        self.weights = [weight.to(dtype) for weight in weights_of(layer)]
        self.biases = [bias.to(dtype).double() for bias in biases_of(layer)]
        self.wgrads = [torch.zeros(N, K, dtype=torch.float64) for _ in range(4)]

    def add(self, x: Tensor, splits: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the gradient of x; adds to the weight gradients."""
        ys, dxs = [], []
        for expert, (part, grad) in enumerate(
            zip(*(each.detach().split(splits.tolist()) for each in (x, dy)), strict=True)
        ):
            if not len(part):
                continue
            weight = self.weights[expert]
            ys.append(self.of(part, "input") @ self.of(weight, "weight").t() + self.biases[expert])
            dxs.append(self.of(grad, "grad") @ self.of(weight, "weight", columns=True).t())
            self.wgrads[expert] += self.of(grad, "grad", columns=True) @ self.of(part, "input", columns=True).t()
        return torch.cat(ys), torch.cat(dxs)

    def of(self, matrix: Tensor, operand: Operand, *, columns: bool = False) -> Tensor:
        spec = self.recipe.spec(operand, columns=columns)
        return dequantize(quantize(matrix.t().contiguous() if columns else matrix, spec), torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- Numbers. ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sampled(1)
def test_main_grad_is_the_sum_of_exact_products(recipe: str, packed: bool) -> None:
    """Over four microbatches with other splits each."""
    layer = layer_of(single_grouped_weight=packed)
    model = DistributedDataParallel(layer)
    for name in layer.weight_names:
        getattr(layer, name).main_grad.data.fill_(torch.nan)  # the first write overwrites
    exact = Exact(RECIPES[recipe], layer)
    for number in range(4):
        x, splits, dy = batch(number)
        filled = int(splits.sum())
        y_exact, dx_exact = exact.add(x[:filled], splits, dy[:filled])
        with autocast(recipe=RECIPES[recipe]):
            y = model(x, splits)
        with model.no_sync():
            y.backward(dy)
        assert error(y.detach()[:filled], y_exact) < 3e-3
        assert error(x.grad[:filled], dx_exact) < 3e-3
        assert y[filled:].count_nonzero() == 0
        assert x.grad[filled:].count_nonzero() == 0
    model.finish_grad_sync()
    for found, expected in zip(each_of(layer, layer.weight_names, lambda p: p.main_grad), exact.wgrads, strict=True):
        assert error(found, expected) < 1e-5


CELLS = list(
    itertools.product(
        [name for name in RECIPES if name != "current, E4M3"],
        (torch.bfloat16, torch.float16, torch.float32),
        ("tensor", "list"),
        (False, True),
        HANDLINGS,
    )
)


@pytest.mark.in_turn
@pytest.mark.parametrize(("recipe", "dtype", "splits_as", "packed", "handling"), CELLS)
@pytest.mark.sampled(60)
def test_every_cell_of_the_table(recipe: str, dtype: torch.dtype, splits_as: str, packed: bool, handling: str) -> None:
    """Right, whatever is asked for: by the recipe in half precision, and without it in fp32, with a warning."""
    low = RECIPES[recipe]
    layer = layer_of(
        dtype=dtype,
        single_grouped_weight=packed,
        fuse_wgrad_accumulation=handling != "plain",
        delay_wgrad_compute=handling == "delayed",
    )
    frozen = {layer.weight_names[-1]} if handling == "frozen" else set()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    model = DistributedDataParallel(layer)
    exact = Exact(low, layer, dtype)
    queue = WgradQueue()
    for number in (0, 3):
        x, splits, dy = batch(number, dtype, padding=0)
        given: Any = splits if splits_as == "tensor" else splits.tolist()
        with warnings.catch_warnings(record=True) as caught, autocast(recipe=low):
            warnings.simplefilter("always")
            if handling == "queue":
                with delayed_wgrad(queue):
                    y = model(x, given)
            else:
                y = model(x, given)
        assert any("as without a recipe" in str(each.message) for each in caught) is (dtype is torch.float32)
        with model.no_sync():
            y.backward(dy)
        if dtype is not torch.float32:
            expected, dx = exact.add(x, splits, dy)
            assert error(y.detach(), expected) < 3e-3
            assert error(x.grad, dx) < 3e-3
            continue
        parts = zip(*(each.detach().double().split(splits.tolist()) for each in (x, dy)), strict=True)
        for expert, (one, other) in enumerate(parts):
            exact.wgrads[expert] += other.t() @ one
    queue.drain()
    while layer.need_backward_dw():
        layer.backward_dw()
    model.finish_grad_sync()
    bound = 1e-5 if handling != "plain" or dtype is torch.float32 else 5e-3  # autograd sums in the parameters' dtype
    trained = [name for name in layer.weight_names if name not in frozen]
    found = each_of(layer, trained, lambda param: param.main_grad) if trained else []
    for grad, wgrad in zip(found, exact.wgrads, strict=False):
        assert error(grad, wgrad) < bound
    for name in frozen:
        assert getattr(layer, name).grad is None


def test_random_rounding_is_near_bf16() -> None:
    """NVFP4 with its defaults: rounding of gradients at random, and the transform, for each expert."""
    grads = []
    for recipe in (None, NVFP4BlockScaling()):
        layer = layer_of()
        model = DistributedDataParallel(layer)
        x, splits, dy = batch(0)
        with autocast(recipe is not None, recipe=recipe):
            y = model(x, splits)
        y.backward(dy)
        model.finish_grad_sync()
        grads.append([x.grad[: int(splits.sum())], *(param.main_grad for param in layer.parameters())])
    for plain, found in zip(*grads, strict=True):
        if plain.norm():
            assert error(found, plain) < 0.35
        else:
            assert found.norm() == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_scaled_biases_and_buffers(recipe: str) -> None:
    """``bias_scales``, ``out`` and ``grad_input``: as without a recipe, but for the products."""
    layer = layer_of(scale_bias=True, single_grouped_bias=True)
    model = DistributedDataParallel(layer)
    x, splits, dy = batch(0)
    scales = torch.rand(len(x)).requires_grad_()
    filled = int(splits.sum())
    exact = Exact(RECIPES[recipe], layer)
    biases, exact.biases = exact.biases, [torch.zeros(N)] * 4
    y_exact, dx_exact = exact.add(x[:filled], splits, dy[:filled])
    of_rows = torch.cat([bias.expand(int(rows), N) for bias, rows in zip(biases, splits, strict=True)])
    y_exact += scales.detach()[:filled, None] * of_rows
    out, grad_input = torch.empty(len(x), N).bfloat16(), torch.empty(len(x), K).bfloat16()
    with autocast(recipe=RECIPES[recipe]):
        y = model(x, splits, scales, out=out, grad_input=grad_input)
    y.backward(dy)
    model.finish_grad_sync()
    assert y.data_ptr() == out.data_ptr()
    assert error(out[:filled], y_exact) < 3e-3
    assert error(grad_input[:filled], dx_exact) < 3e-3
    assert torch.equal(x.grad, grad_input)
    assert error(scales.grad[:filled], (dy[:filled].double() * of_rows).sum(1)) < 1e-5
    for expert, (s, rows) in enumerate(
        zip(*(each[:filled].split(splits.tolist()) for each in (scales.detach(), dy)), strict=True)
    ):
        db = (s[:, None].double() * rows.double()).sum(0)
        torch.testing.assert_close(layer.bias.main_grad[expert].double(), db, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("needs_scale", [False, True])
def test_only_what_is_asked_for_is_computed(needs_x: bool, needs_scale: bool) -> None:
    """Each set of gradients has the same values."""
    found: list[list[Tensor | None]] = []
    for x_too, scale_too in ((needs_x, needs_scale), (True, True)):
        layer = layer_of(scale_bias=True)
        model = DistributedDataParallel(layer)
        x, splits, dy = batch(0, padding=0)
        x = x.detach().requires_grad_(x_too)
        scales = torch.ones(len(x)).requires_grad_(scale_too)
        with autocast(recipe=Float8BlockScaling()):
            y = model(x, splits, scales)
        y.backward(dy)
        model.finish_grad_sync()
        found.append([x.grad, scales.grad, *(param.main_grad for param in layer.parameters())])
    assert (found[0][0] is not None, found[0][1] is not None) == (needs_x, needs_scale)
    for some, every in zip(*found, strict=True):
        assert some is None or torch.equal(some, every)


def test_experts_that_share_a_weight() -> None:
    layer = layer_of(bias=False)
    layer.weight2 = layer.weight0
    model = DistributedDataParallel(layer)
    exact = Exact(MXFP8BlockScaling(), layer)
    x, splits, dy = batch(0, padding=0)
    exact.add(x, splits, dy)
    with autocast(recipe=MXFP8BlockScaling()):
        y = model(x, splits)
    y.backward(dy)
    model.finish_grad_sync()
    assert error(layer.weight0.main_grad, exact.wgrads[0] + exact.wgrads[2]) < 1e-5
    assert error(layer.weight3.main_grad, exact.wgrads[3]) < 1e-5


def test_gradients_reduced_in_bf16() -> None:
    """``main_grad`` in the weights' dtype."""
    layer = layer_of()
    model = DistributedDataParallel(layer, DistributedDataParallelConfig(grad_reduce_in_fp32=False))
    exact = Exact(Float8BlockScaling(), layer)
    x, splits, dy = batch(0, padding=0)
    for _ in range(2):
        exact.add(x, splits, dy)
        with autocast(recipe=Float8BlockScaling()):
            y = model(x, splits)
        with model.no_sync():
            y.backward(dy)
    model.finish_grad_sync()
    assert layer.weight0.main_grad.dtype is torch.bfloat16
    for expert in (0, 2, 3):
        assert error(getattr(layer, f"weight{expert}").main_grad, exact.wgrads[expert]) < 5e-3


# ---- What the provider sees, and what is kept. ----


@pytest.mark.parametrize("delay", [False, True])
def test_flags_and_launches_are_those_of_bf16(delay: bool) -> None:
    def program(recipe: Recipe | None) -> list[Any]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(
            GroupedLinear(2, 16, 16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, dtype=torch.bfloat16)
            for _ in range(3)
        )
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=600)
        model = DistributedDataParallel(layers, config)
        seen: list[Any] = []
        with model.record_timeline() as timeline:
            for last in (False, True):
                x = torch.randn(6, 16).bfloat16()
                with autocast(recipe is not None, recipe=recipe):
                    for layer in layers:
                        x = layer(x, torch.tensor([4, 2]))
                if last:
                    x.float().square().sum().backward()
                else:
                    with model.no_sync():
                        x.float().square().sum().backward()
                for layer in reversed(layers):
                    layer.backward_dw()
                seen.append([(r.name, r.num_fused_writes) for r in model.records])
                seen.append([getattr(param, "grad_added_to_main_grad", None) for param in layers.parameters()])
                seen.append([param.grad is None for param in layers.parameters()])
            model.finish_grad_sync()
        seen.append([(span.bucket, span.collective) for span in timeline.buckets])
        return seen

    for plain, found in zip(simulate(program, 2, None), simulate(program, 2, Float8BlockScaling()), strict=True):
        assert found == plain


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["bf16", *RECIPES])
@pytest.mark.sampled(1)
def test_what_is_kept_for_the_weight_gradient(name: str, waits: bool) -> None:
    """Of the input in the graph; of both operands in a queue: half of bf16's bytes, and a quarter for 4 bits."""
    rows, width, experts = 16384, 128, 4
    layer = GroupedLinear(experts, width, width, fuse_wgrad_accumulation=True, dtype=torch.bfloat16, bias=False)
    model = DistributedDataParallel(layer)
    own = {param.data_ptr() for param in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(rows, width).bfloat16().requires_grad_()
    recipe, queue = RECIPES.get(name), WgradQueue()
    splits = torch.tensor([1, 8191, 4192, 4000])
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(recipe is not None, recipe=recipe),
        delayed_wgrad(queue),
    ):
        y = model(x, splits)
    operands = 1
    if waits:
        y.backward(torch.randn(rows, width).bfloat16())
        (entry,) = queue._entries
        kept = {each.data_ptr(): each.untyped_storage().nbytes() for each in tensors_in(entry._operands)}
        operands = 2
    found, plain = sum(kept.values()), operands * 2 * rows * width
    if name == "bf16":
        assert plain <= found <= plain + 100
    else:
        assert found <= (0.3 if name == "NVFP4" else 0.55) * plain
    queue.drain()


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple) else []


# ---- Refused by name, before the first product. ----


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a product ran")

    for name in ("scaled_grouped_product", "quantize_grouped_both", "quantize_experts"):
        monkeypatch.setattr(f"maingrad.te_integration.experts.quantized_grouped_linear.{name}", fail)


class Other(Recipe):
    """A recipe that experts do not know."""

    def spec(self, operand: Operand, *, columns: bool) -> Any:
        raise AssertionError("not asked")


def test_recipes_of_others_are_refused(no_products: None) -> None:
    layer = layer_of()
    x, splits, _ = batch(0)
    with (
        autocast(recipe=Other()),
        pytest.raises(RuntimeError, match=r"GroupedLinear\(.*Other is not supported"),
    ):
        layer(x, splits)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpus_without_a_kernel_are_refused(
    no_products: None, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors on a GPU, which this machine need not have; a module would look for the GPU."""
    monkeypatch.setattr("maingrad.kernels.quantized.operands.capability_of", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for recipe in RECIPES.values():
        if capability == (9, 0) and isinstance(recipe, Float8CurrentScaling | Float8BlockScaling):
            continue
        with FakeTensorMode():
            weights = torch.empty(2, 64, 64, dtype=torch.bfloat16, device="cuda")
            x, offsets = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(3, device="cuda")
            use = ProductUse([weights], ["weight"], GroupedWgrad([weights]), "GroupedLinear", fused=False)
            with pytest.raises(RuntimeError, match=r"GroupedLinear: .* with experts on a GPU needs .*emulate=True"):
                quantized_grouped_linear(x, weights, None, offsets, use, recipe=recipe)


def test_transforms_and_wrong_shapes_are_refused(no_products: None) -> None:
    layer = layer_of()
    x, splits, _ = batch(0)
    with autocast(recipe=MXFP8BlockScaling()):
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            torch.func.vmap(lambda each: layer(each, splits))(x[None])
        with pytest.raises(ValueError, match="takes 48 features"):
            layer(x[:, :40], splits)
        with pytest.raises(ValueError, match=r"the input is torch.float16"):
            layer(x.half(), splits)
        with pytest.raises(ValueError, match="out must be"):
            layer(x, splits, out=torch.empty(2, N).bfloat16())


def test_second_derivatives_are_refused() -> None:
    layer = layer_of()
    model = DistributedDataParallel(layer)
    layer.weight0.main_grad.data.fill_(7.0)
    x, splits, _ = batch(0, padding=0)
    with autocast(recipe=MXFP8BlockScaling()):
        y = model(x, splits)
    with pytest.raises(RuntimeError, match=r"GroupedLinear\(.*second derivatives"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)
    assert torch.equal(layer.weight0.main_grad, torch.full((N, K), 7.0))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_that_are_asked_for_are_returned_and_not_written(packed: bool) -> None:
    layer = layer_of(single_grouped_weight=packed)
    model = DistributedDataParallel(layer)
    exact = Exact(Float8BlockScaling(), layer)
    x, splits, dy = batch(0, padding=0)
    exact.add(x, splits, dy)
    for name in layer.weight_names:
        getattr(layer, name).main_grad.data.fill_(7.0)
    with autocast(recipe=Float8BlockScaling()):
        y = model(x, splits)
    wanted = [getattr(layer, name) for name in layer.weight_names]
    grads = torch.autograd.grad(y, [*wanted, x], dy)
    parts = list(grads[0].unbind()) if packed else list(grads[:-1])
    for expert in (0, 2, 3):
        assert parts[expert].dtype is torch.bfloat16
        assert error(parts[expert], exact.wgrads[expert]) < 5e-3
    assert parts[1].count_nonzero() == 0
    for weight in wanted:
        assert torch.equal(weight.main_grad, torch.full_like(weight.main_grad, 7.0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_overflow_in_fp16_stays_visible(recipe: str) -> None:
    """Inf in a gradient makes its expert's gradients NaN, and no other's."""
    layer = layer_of(dtype=torch.float16)
    model = DistributedDataParallel(layer)
    x, splits, dy = batch(0, torch.float16, padding=0)
    dy[40, 3] = float("inf")  # of the third expert
    with autocast(recipe=RECIPES[recipe]):
        y = model(x, splits)
    y.backward(dy)
    model.finish_grad_sync()
    assert layer.weight2.main_grad.isnan().any()
    assert not x.grad[40].isfinite().any()
    for expert in (0, 1, 3):
        assert getattr(layer, f"weight{expert}").main_grad.isfinite().all()
    assert x.grad[:37].isfinite().all()


# ---- Without anything to quantise, and without gradients. ----


@pytest.mark.parametrize("rows", [0, 5])
def test_no_rows(rows: int) -> None:
    """Of any expert; pad rows may be there."""
    layer = layer_of(bias=False)
    model = DistributedDataParallel(layer)
    x = torch.full((rows, K), torch.nan).bfloat16().requires_grad_()
    for name in layer.weight_names:
        getattr(layer, name).main_grad.data.fill_(torch.nan)
    with autocast(recipe=NVFP4BlockScaling()):
        y = model(x, torch.zeros(4, dtype=torch.int64))
    y.float().sum().backward()
    model.finish_grad_sync()
    assert y.shape == (rows, N)
    assert y.count_nonzero() == 0
    assert x.grad.count_nonzero() == 0
    for name in layer.weight_names:
        assert getattr(layer, name).main_grad.count_nonzero() == 0


def test_under_torch_s_autocast_and_without_gradients() -> None:
    layer = layer_of(dtype=torch.float32)
    half = layer_of()
    model = DistributedDataParallel(layer)
    x, splits, dy = batch(0, torch.float32, padding=0)
    with autocast(recipe=Float8CurrentScaling()), torch.autocast("cpu", torch.bfloat16):
        y = model(x, splits)
        with torch.no_grad():
            silent = model(x, splits)
    half.load_state_dict(layer.state_dict())
    with autocast(recipe=Float8CurrentScaling()), torch.inference_mode():
        inferred = half(x.bfloat16(), splits)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, silent)
    assert torch.equal(y, inferred)
    exact = Exact(Float8CurrentScaling(), layer)
    exact.add(x.bfloat16(), splits, dy.bfloat16())
    y.backward(dy.bfloat16())
    model.finish_grad_sync()
    assert x.grad.dtype is torch.float32
    for expert in (0, 2, 3):
        assert error(getattr(layer, f"weight{expert}").main_grad, exact.wgrads[expert]) < 1e-5
