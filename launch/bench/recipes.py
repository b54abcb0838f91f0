"""Recipes of low precision on one GPU: a linear layer's forward and backward, and the parts that its time is made of.

bf16                     our ``Linear`` without a recipe
Float8CurrentScaling...  our ``Linear`` under the recipe
Transformer Engine, ...  its ``Linear`` with the same shapes, weight gradients fused into fp32 ``main_grad``

A step is several microbatches whose weight gradients are summed in ``main_grad``. Everything is counted: quantising of
inputs, gradients and weights too, and the host's time where that is the longer.
"""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...ddp import DistributedDataParallel
from ...ddp.contract.main_grad import accumulator_of
from ...kernels.quantized import quantize_both, scaled_wgrad_accumulate
from ...kernels.wgrad import wgrad_accumulate
from ...te_integration import Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from ...te_integration.recipes import Recipe
from ..report.table import Column, machine, markdown_table, write_csv, write_table
from .steps import free_memory

__all__ = ["PartRow", "RecipesBench", "StepRow", "bench_recipes", "write_recipes_report"]

_RECIPES: tuple[Recipe, ...] = (Float8CurrentScaling(), Float8BlockScaling())


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipesBench:
    """Sizes of the measurement; the defaults are the published table's."""

    num_tokens: int = 8192
    """Tokens of a microbatch."""
    features: tuple[int, ...] = (4096, 8192)
    """Input and output features of the square layers."""
    num_microbatches: int = 4
    """Microbatches whose weight gradients are summed."""
    num_steps: int = 10
    """Consecutive steps of one measurement."""
    num_rounds: int = 5
    """Rounds; the median counts. Each round measures all rows in turn, so that drift hits them alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Forward and backward of one microbatch, the mean over a step's."""

    features: int
    form: str
    microseconds: float
    """Of one microbatch; the host's time counts where it is the longer."""
    over_bf16: float
    """How many times as fast as our bf16."""
    device_microseconds: float
    """The sum of its kernels' times: what counts where the host is not the slower."""
    device_over_bf16: float
    """How many times as fast as our bf16's kernels."""
    error: float
    """Relative error of the step's weight gradient, against bf16's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """One kernel, or the kernels of one product."""

    features: int
    part: str
    microseconds: float
    rate: float
    """TFLOP/s of a product; of a quantiser its share of a copy's bandwidth."""


def bench_recipes(
    bench: RecipesBench, device: torch.device, log: Callable[[str], None] = lambda _: None
) -> tuple[list[StepRow], list[PartRow]]:
    """Measure every row; on CUDA only."""
    if device.type != "cuda":
        raise ValueError("bench recipes measures kernels: it needs a GPU")
    steps: list[StepRow] = []
    parts: list[PartRow] = []
    for features in bench.features:
        steps += _steps(bench, features, device, log)
        free_memory(device)
        parts += _parts(bench, features, device)
        free_memory(device)
    return steps, parts


def write_recipes_report(steps: list[StepRow], parts: list[PartRow], bench: RecipesBench, folder: Path) -> str:
    """Write ``recipes.md``, ``recipes.csv`` and ``recipes_parts.csv`` into ``folder``; returns the tables."""
    setting = (
        f"{machine()}. A square linear layer without bias, {bench.num_tokens} tokens, {bench.num_microbatches} "
        f"microbatches into fp32 main_grad; forward and backward, all quantising included. Median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events. Made by "
        f"`maingrad bench recipes`."
    )
    columns: list[Column] = [
        ("features", lambda row: f"{row.features}"),
        ("", lambda row: row.form),
        ("us a microbatch", lambda row: f"{row.microseconds:.0f}"),
        ("times as fast as bf16", lambda row: f"{row.over_bf16:.2f}"),
        ("kernels alone, us", lambda row: f"{row.device_microseconds:.0f}"),
        ("times as fast as bf16's", lambda row: f"{row.device_over_bf16:.2f}"),
        ("error of dW against bf16", lambda row: f"{row.error:.3f}"),
    ]
    of_parts: list[Column] = [
        ("features", lambda row: f"{row.features}"),
        ("", lambda row: row.part),
        ("us", lambda row: f"{row.microseconds:.0f}"),
        (
            "TFLOP/s, or share of a copy's bandwidth",
            lambda row: f"{row.rate:.0f}" if row.rate > 5 else f"{row.rate:.2f}",
        ),
    ]
    write_csv(folder, "recipes_parts", parts)
    notes = "\n".join(["## Parts", "", *markdown_table(parts, of_parts)])
    title = "Recipes of low precision: a linear layer"
    return write_table(folder, "recipes", steps, title=title, setting=setting, columns=columns, notes=notes)


def _steps(bench: RecipesBench, features: int, device: torch.device, log: Callable[[str], None]) -> list[StepRow]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shape = bench.num_microbatches, bench.num_tokens, features
    inputs = [x.requires_grad_() for x in torch.randn(*shape, **options)]
    grads = list(torch.randn(*shape, **options))
    weight = torch.randn(features, features, **options) / features**0.5
    model = DistributedDataParallel(Linear(features, features, bias=False, fuse_wgrad_accumulation=True, **options))
    forms = {"bf16": _step(model, weight, inputs, grads, nullcontext)}
    for recipe in _RECIPES:
        forms[type(recipe).__name__] = _step(model, weight, inputs, grads, partial(autocast, recipe=recipe))
    forms.update(_transformer_engine(weight, inputs, grads))
    exact = forms["bf16"]().clone()
    errors, busy = {}, {}
    for form, step in forms.items():
        for _ in range(3):
            found = step()
        errors[form] = float((found - exact).norm() / exact.norm())
        busy[form] = _device_microseconds(step) / bench.num_microbatches
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(bench.num_rounds):
        for form, step in forms.items():
            step()
            times[form].append(_time(step, bench.num_steps) / bench.num_microbatches)
    rows = []
    for form, each in times.items():
        row = StepRow(
            features=features,
            form=form,
            microseconds=statistics.median(each),
            over_bf16=statistics.median(times["bf16"]) / statistics.median(each),
            device_microseconds=busy[form],
            device_over_bf16=busy["bf16"] / busy[form],
            error=errors[form],
        )
        log(f"{features}: {form} {row.microseconds:.0f} us a microbatch, {row.over_bf16:.2f}")
        rows.append(row)
    return rows


def _step(
    model: DistributedDataParallel,
    weight: Tensor,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    around: Callable[[], AbstractContextManager[Any]],
    **first: bool,
) -> Callable[[], Tensor]:
    """One step of ``model``, whose forwards run in ``around()``; it returns the weight's accumulator.

    first  the layer's argument that marks a first microbatch
    """
    (parameter,) = model.parameters()
    with torch.no_grad():
        parameter.copy_(weight)

    def step() -> Tensor:
        model.zero_grad_buffer()
        for number, (x, dy) in enumerate(zip(inputs, grads, strict=True)):
            x.grad = None
            with model.no_sync():
                with around():
                    y = model(x, **dict.fromkeys(first, number == 0))
                y.backward(dy)
        return accumulator_of(parameter, "bench recipes")

    return step


def _transformer_engine(
    weight: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Steps of Transformer Engine's ``Linear``, where it is installed, in our wrapper."""
    if importlib.util.find_spec("transformer_engine") is None:
        return {}
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common import recipe as recipes  # type: ignore[import-not-found]

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
        found[f"Transformer Engine, {name or 'bf16'}"] = _step(
            DistributedDataParallel(layer), weight, inputs, grads, around, is_first_microbatch=True
        )
    return found


def _parts(bench: RecipesBench, features: int, device: torch.device) -> list[PartRow]:
    x = torch.randn(bench.num_tokens, features, device=device, dtype=torch.bfloat16)
    copied = torch.empty_like(x)
    main_grad = torch.zeros(features, features, device=device)
    flops = 2 * bench.num_tokens * features**2
    microseconds = _time_captured(lambda: copied.copy_(x))
    bandwidth = 4 * x.numel() / microseconds
    rows = [PartRow(features=features, part="copy of x", microseconds=microseconds, rate=1.0)]

    def product(part: str, run: Callable[[], Any]) -> None:
        microseconds = _time_captured(run)
        rows.append(PartRow(features=features, part=part, microseconds=microseconds, rate=flops / microseconds / 1e6))

    product("bf16 weight gradient, later", lambda: wgrad_accumulate(x, x, main_grad))
    for recipe in _RECIPES:
        name = type(recipe).__name__
        of_input, of_grad = recipe.spec("input", columns=False), recipe.spec("grad", columns=True)
        microseconds = _time_captured(lambda spec=of_input: quantize_both(x, spec, spec))  # type: ignore[misc]
        nbytes = (6 if of_input.block is None else 4) * x.numel()  # one scale for the tensor: x is read twice
        rows.append(
            PartRow(
                features=features,
                part=f"{name}, quantiser, both copies",
                microseconds=microseconds,
                rate=nbytes / microseconds / bandwidth,
            )
        )
        _, right = quantize_both(x, None, of_input)
        _, left = quantize_both(x, None, of_grad)
        assert left is not None and right is not None
        for moment, overwrite in (("first", True), ("later", False)):
            product(
                f"{name}, weight gradient, {moment}",
                lambda left=left, right=right, overwrite=overwrite: scaled_wgrad_accumulate(  # type: ignore[misc]
                    left, right, main_grad, overwrite=overwrite
                ),
            )
    return rows


def _device_microseconds(step: Callable[[], Any]) -> float:
    """The sum of the times of all kernels of a call, from a profiler's trace."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return float(sum(event.time_range.elapsed_us() for event in kernels))


def _time(step: Callable[[], Any], count: int) -> float:
    """Microseconds of a call, the mean of consecutive ones."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count * 1e3


def _time_captured(run: Callable[[], Any], count: int = 20) -> float:
    """Microseconds of the device's work of a call; the host's time does not count."""
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    return statistics.median(_time(graph.replay, 1) for _ in range(5)) / count
