"""Recipes of low precision on one GPU: a layer's forward and backward, and the parts that its time is made of.

    python docs/benchmarks/recipes.py

bf16                     our layer without a recipe
Float8CurrentScaling...  our layer under the recipe
Transformer Engine, ...  its ``Linear`` with the same shapes, weight gradients fused into fp32 ``main_grad``

A step is several microbatches whose weight gradients are summed in ``main_grad``. Everything is counted: quantising of
inputs, gradients and weights too, and the host's time where that is the longer.

Legend: E experts, T rows of all experts, N output features, K input features.
"""

import importlib.util
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from harness import ConfigError, Options, free_memory, log, run_script, take_turns, the_device
from tables import Column, Measurement, machine, table, write_csv, write_table
from trace_digest import activities_of

from maingrad import DistributedDataParallel, GroupedLinear, Linear
from maingrad.ddp.contract.main_grad import accumulator_of
from maingrad.kernels import grouped_dgrad, grouped_linear, grouped_wgrad_accumulate
from maingrad.kernels.quantized import (
    quantize_both,
    quantize_experts,
    quantize_grouped_both,
    scaled_grouped_product,
    scaled_grouped_wgrad_accumulate,
    scaled_wgrad_accumulate,
)
from maingrad.kernels.wgrad import wgrad_accumulate
from maingrad.launch.report.intervals import length
from maingrad.launch.tuning.problems import GroupedOperands, parse_shape
from maingrad.te_integration import Float8BlockScaling, Float8CurrentScaling, autocast

RECIPES = (Float8CurrentScaling(), Float8BlockScaling())
FORMS = {
    "bf16": nullcontext,
    **{type(recipe).__name__: partial(autocast, recipe=recipe) for recipe in RECIPES},
}
"""What a layer's forward runs in, by the form's name."""
COLUMNS = [
    ("layer", "{row.layer}"),
    ("", "{row.form}"),
    ("us a microbatch", "{row.microseconds:.0f}"),
    ("times as fast as bf16", "{row.over_bf16:.2f}"),
    ("kernels alone, us", "{row.device_microseconds:.0f}"),
    ("times as fast as bf16's", "{row.device_over_bf16:.2f}"),
    ("error of dW against bf16", "{row.error:.3f}"),
]
PART_COLUMNS: list[Column] = [
    ("layer", "{row.layer}"),
    ("", "{row.part}"),
    ("us", "{row.microseconds:.0f}"),
    ("TFLOP/s, or share of a copy's bandwidth", lambda row: f"{row.rate:.0f}" if row.rate > 5 else f"{row.rate:.2f}"),
]


@dataclass(frozen=True, kw_only=True)
class RecipesBench(Options):
    """Sizes of the measurement; the defaults are the published table's."""

    num_tokens: int = 8192
    """Tokens of a microbatch."""
    features: tuple[int, ...] = (4096, 8192)
    """Input and output features of the square layers."""
    experts: tuple[str, ...] = ("8x16384x14336x4096", "64x32768x2048x2048")
    """Grouped layers, as EXPERTSxROWSxNxK: all rows of a microbatch, output features, input features."""
    num_microbatches: int = 4
    """Microbatches whose weight gradients are summed."""
    num_steps: int = 10
    """Consecutive steps of one measurement."""
    num_rounds: int = 5
    """Rounds; the median counts. Each round measures all rows in turn, so that drift hits them alike."""


# ---- Times of calls on one GPU: by the clock, and of the device's work alone. ----


def device_microseconds(step):
    """The sum of the times of all kernels of a call, from a profiler's trace."""
    return length((each.start, each.end) for each in activities_of(step))


def time_calls(step, count):
    """Microseconds of a call, the mean of consecutive ones."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count * 1e3


def time_captured(run, count=20):
    """Microseconds of the device's work of a call; the host's time does not count."""
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    return statistics.median(time_calls(graph.replay, 1) for _ in range(5)) / count


class Parts:
    """Measures the parts of one layer, a row each. The first row is a copy of a tensor, which gives a bandwidth.

    copied, name  the tensor, and what it is
    flops         floating-point operations of each product
    count         calls that are captured for one measurement
    """

    def __init__(self, layer, copied, name, *, flops, count=20):
        self.layer, self.flops, self.count = layer, flops, count
        self.rows = []
        microseconds = time_captured(partial(torch.empty_like(copied).copy_, copied))
        self.bandwidth = 4 * copied.numel() / microseconds
        self._add(f"copy of {name}", microseconds, 1.0)

    def product(self, part, run):
        """Measure a product of ``flops``."""
        microseconds = time_captured(run, self.count)
        self._add(part, microseconds, self.flops / microseconds / 1e6)

    def quantiser(self, part, x, spec, run):
        """Measure a quantiser of ``x`` that makes two copies. With one scale for a tensor it reads ``x`` twice."""
        microseconds = time_captured(run, self.count)
        nbytes = (6 if spec.block is None else 4) * x.numel()
        self._add(part, microseconds, nbytes / microseconds / self.bandwidth)

    def _add(self, part, microseconds, rate):
        self.rows.append(Measurement(layer=self.layer, part=part, microseconds=microseconds, rate=rate))


def step_rows(bench, layer, forms, log):
    """Measure the ``forms`` of a step in turn; each returns the weight's accumulator, and "bf16" is one of them.

    microseconds         of one microbatch; the host's time counts where it is the longer
    device_microseconds  the sum of its kernels' times: what counts where the host is not the slower
    error                relative error of the step's weight gradient, against bf16's
    """
    exact = forms["bf16"]().clone()
    errors, busy = {}, {}
    for form, step in forms.items():
        for _ in range(3):
            found = step()
        errors[form] = float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))
        busy[form] = device_microseconds(step) / bench.num_microbatches

    def measure(form):
        forms[form]()
        return time_calls(forms[form], bench.num_steps) / bench.num_microbatches

    times = take_turns(bench.num_rounds, forms, measure)
    rows = []
    for form, each in times.items():
        row = Measurement(
            layer=layer,
            form=form,
            microseconds=statistics.median(each),
            over_bf16=statistics.median(times["bf16"]) / statistics.median(each),
            device_microseconds=busy[form],
            device_over_bf16=busy["bf16"] / busy[form],
            error=errors[form],
        )
        log(f"{layer}: {form} {row.microseconds:.0f} us a microbatch, {row.over_bf16:.2f}")
        rows.append(row)
    return rows


# ---- Square linear layers, beside Transformer Engine where it is installed. ----


def linear_steps(bench, features, device):
    """One step of a square layer, by its form."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    shape = bench.num_microbatches, bench.num_tokens, features
    inputs = [x.requires_grad_() for x in torch.randn(*shape, **options)]
    grads = list(torch.randn(*shape, **options))
    weight = torch.randn(features, features, **options) / features**0.5
    model = DistributedDataParallel(Linear(features, features, bias=False, fuse_wgrad_accumulation=True, **options))
    forms = {form: layer_step(model, weight, inputs, grads, around) for form, around in FORMS.items()}
    return forms | _transformer_engine(weight, inputs, grads)


def layer_step(
    model,
    weight,
    inputs,
    grads,
    around,
    *others,
    **first,
):
    """One step of ``model``, whose forwards run in ``around()``; it returns the weight's accumulator.

    others  what the layer takes beside the input
    first   the layer's argument that marks a first microbatch
    """
    (parameter,) = model.parameters()
    with torch.no_grad():
        parameter.copy_(weight)

    def step():
        model.zero_grad_buffer()
        for number, (x, dy) in enumerate(zip(inputs, grads, strict=True)):
            x.grad = None
            with model.no_sync():
                with around():
                    y = model(x, *others, **dict.fromkeys(first, number == 0))
                y.backward(dy)
        return accumulator_of(parameter, "bench recipes")

    return step


def _transformer_engine(weight, inputs, grads):
    """Steps of Transformer Engine's ``Linear``, where it is installed, in our wrapper."""
    if importlib.util.find_spec("transformer_engine") is None:
        return {}
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    features = weight.shape[0]
    found = {}
    for name in (None, "Float8CurrentScaling", "Float8BlockScaling"):
        layer = te.Linear(
            features,
            features,
            bias=False,
            params_dtype=torch.bfloat16,
            device=weight.device,
            fuse_wgrad_accumulation=True,
        )
        around = nullcontext if name is None else partial(te.autocast, enabled=True, recipe=getattr(recipes, name)())
        found[f"Transformer Engine, {name or 'bf16'}"] = layer_step(
            DistributedDataParallel(layer), weight, inputs, grads, around, is_first_microbatch=True
        )
    return found


def linear_parts(bench, features, device):
    """The quantiser and the weight gradient of a square layer."""
    x = torch.randn(bench.num_tokens, features, device=device, dtype=torch.bfloat16)
    main_grad = torch.zeros(features, features, device=device)
    parts = Parts(f"{features}", x, "x", flops=2 * bench.num_tokens * features**2)
    parts.product("bf16 weight gradient, later", lambda: wgrad_accumulate(x, x, main_grad))
    for recipe in RECIPES:
        name = type(recipe).__name__
        of_input, of_grad = recipe.spec("input", columns=False), recipe.spec("grad", columns=True)
        parts.quantiser(f"{name}, quantiser, both copies", x, of_input, partial(quantize_both, x, of_input, of_input))
        right, left = quantize_both(x, None, of_input)[1], quantize_both(x, None, of_grad)[1]
        assert left is not None and right is not None, "both were asked for"
        for moment, overwrite in (("first", True), ("later", False)):
            run = partial(scaled_wgrad_accumulate, left, right, main_grad, overwrite=overwrite)
            parts.product(f"{name}, weight gradient, {moment}", run)
    return parts.rows


# ---- Grouped layers. ----


def expert_steps(bench, shape: tuple[int, int, int, int], device):
    """One step of a grouped layer with a packed weight, by its form."""
    torch.manual_seed(0)
    num_experts, _, n, k = shape
    operands = GroupedOperands(*shape, torch.bfloat16, device)
    splits = operands.offsets.diff()
    inputs = [torch.randn_like(operands.x).requires_grad_() for _ in range(bench.num_microbatches)]
    grads = [torch.randn_like(operands.dy) for _ in range(bench.num_microbatches)]
    layer = GroupedLinear(
        num_experts,
        k,
        n,
        bias=False,
        fuse_wgrad_accumulation=True,
        single_grouped_weight=True,
        dtype=torch.bfloat16,
        device=device,
    )
    model = DistributedDataParallel(layer)
    weight = operands.weights / k**0.5
    return {form: layer_step(model, weight, inputs, grads, around, splits) for form, around in FORMS.items()}


def expert_parts(shape: tuple[int, int, int, int], device):
    """The quantisers and the three products of a grouped layer."""
    layer = "x".join(map(str, shape))
    at = GroupedOperands(*shape, torch.bfloat16, device)
    _, rows, n, k = shape
    parts = Parts(layer, at.dy, "dy", flops=2 * rows * n * k, count=4)
    product = parts.product
    product("bf16, forward", lambda: grouped_linear(at.x, at.weights, at.offsets, out=at.y))
    product("bf16, dgrad", lambda: grouped_dgrad(at.dy, at.weights, at.offsets, out=at.dx))
    product("bf16, weight gradient, later", lambda: grouped_wgrad_accumulate(at.dy, at.x, at.grads, at.offsets))
    for recipe in RECIPES:
        name = type(recipe).__name__
        of_input, of_weight = recipe.spec("input", columns=False), recipe.spec("weight", columns=False)
        of_grad = recipe.spec("grad", columns=False)
        quantise_dy = partial(quantize_grouped_both, at.dy, of_grad, of_grad, at.offsets)
        quantise_weights = partial(quantize_experts, at.weights, of_weight, of_weight)
        parts.quantiser(f"{name}, quantiser of dy, both copies", at.dy, of_input, quantise_dy)
        parts.quantiser(f"{name}, quantiser of weights, both copies", at.weights, of_input, quantise_weights)
        (dy, dy_columns), (weights, transposes) = quantise_dy(), quantise_weights()
        x, x_columns = quantize_grouped_both(at.x, of_input, of_input, at.offsets)
        assert dy and dy_columns and x and x_columns and weights and transposes, "both copies were asked for"
        product(f"{name}, forward", partial(scaled_grouped_product, x, weights, torch.bfloat16, out=at.y))
        product(f"{name}, dgrad", partial(scaled_grouped_product, dy, transposes, torch.bfloat16, out=at.dx))
        for moment, overwrite in (("first", True), ("later", False)):
            run = partial(scaled_grouped_wgrad_accumulate, dy_columns, x_columns, at.grads, overwrite=overwrite)
            product(f"{name}, weight gradient, {moment}", run)
    return parts.rows


# ---- The script. ----


def bench_recipes(bench, device):
    """Steps of every layer in every form, and their parts; on CUDA only."""
    if device.type != "cuda":
        raise ConfigError("recipes.py measures kernels: it needs a GPU")
    steps, parts = [], []
    for features in bench.features:
        steps += step_rows(bench, f"{features}", linear_steps(bench, features, device), log)
        free_memory(device)
        parts += linear_parts(bench, features, device)
        free_memory(device)
    for text in bench.experts:
        shape = parse_shape(text)
        steps += step_rows(bench, text, expert_steps(bench, shape, device), log)
        free_memory(device)
        parts += expert_parts(shape, device)
        free_memory(device)
    return steps, parts


def write_report(steps, parts, bench):
    """Write ``recipes.md``, ``recipes.csv`` and ``recipes_parts.csv``; returns the Markdown."""
    write_csv(bench.out_dir / "recipes_parts.csv", parts)
    return write_table(
        bench.out_dir,
        "recipes",
        steps,
        "Recipes of low precision: linear and grouped layers",
        f"{machine()}. Square linear layers without bias, {bench.num_tokens} tokens, and grouped layers (experts x "
        f"rows x output features x input features, uneven splits); {bench.num_microbatches} microbatches into fp32 "
        f"main_grad; forward and backward, all quantising included. Median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events. Made by "
        f"`docs/benchmarks/recipes.py`.",
        table(steps, COLUMNS),
        "## Parts",
        table(parts, PART_COLUMNS),
    )


def run(bench):
    steps, parts = bench_recipes(bench, the_device())
    log(write_report(steps, parts, bench))


main = partial(run_script, RecipesBench, run)

if __name__ == "__main__":
    sys.exit(main())
