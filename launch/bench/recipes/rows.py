"""What ``maingrad bench recipes`` measures, and the rows of its tables."""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....kernels.quantized import QuantSpec
from ....te_integration import Float8BlockScaling, Float8CurrentScaling, autocast
from ....te_integration.recipes import Recipe
from .timing import device_microseconds, time_calls, time_captured

__all__ = ["FORMS", "RECIPES", "PartRow", "Parts", "RecipesBench", "StepRow", "step_rows"]

RECIPES: tuple[Recipe, ...] = (Float8CurrentScaling(), Float8BlockScaling())
FORMS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": nullcontext,
    **{type(recipe).__name__: partial(autocast, recipe=recipe) for recipe in RECIPES},
}
"""What a layer's forward runs in, by the form's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipesBench:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Forward and backward of one microbatch, the mean over a step's."""

    layer: str
    """Features of a square layer, or EXPERTSxROWSxNxK."""
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

    layer: str
    part: str
    microseconds: float
    rate: float
    """TFLOP/s of a product; of a quantiser its share of a copy's bandwidth."""


class Parts:
    """Measures the parts of one layer, a row each. The first row is a copy of a tensor, which gives a bandwidth.

    copied, name  the tensor, and what it is
    flops         floating-point operations of each product
    count         calls that are captured for one measurement
    """

    def __init__(self, layer: str, copied: Tensor, name: str, *, flops: float, count: int = 20) -> None:
        self.layer, self.flops, self.count = layer, flops, count
        self.rows: list[PartRow] = []
        microseconds = time_captured(partial(torch.empty_like(copied).copy_, copied))
        self.bandwidth = 4 * copied.numel() / microseconds
        self._add(f"copy of {name}", microseconds, 1.0)

    def product(self, part: str, run: Callable[[], object]) -> None:
        """Measure a product of ``flops``."""
        microseconds = time_captured(run, self.count)
        self._add(part, microseconds, self.flops / microseconds / 1e6)

    def quantiser(self, part: str, x: Tensor, spec: QuantSpec, run: Callable[[], object]) -> None:
        """Measure a quantiser of ``x`` that makes two copies. With one scale for a tensor it reads ``x`` twice."""
        microseconds = time_captured(run, self.count)
        nbytes = (6 if spec.block is None else 4) * x.numel()
        self._add(part, microseconds, nbytes / microseconds / self.bandwidth)

    def _add(self, part: str, microseconds: float, rate: float) -> None:
        self.rows.append(PartRow(layer=self.layer, part=part, microseconds=microseconds, rate=rate))


def step_rows(
    bench: RecipesBench, layer: str, forms: Mapping[str, Callable[[], Tensor]], log: Callable[[str], None]
) -> list[StepRow]:
    """Measure the ``forms`` of a step in turn; each returns the weight's accumulator, and "bf16" is one of them."""
    exact = forms["bf16"]().clone()
    errors, busy = {}, {}
    for form, step in forms.items():
        for _ in range(3):
            found = step()
        errors[form] = float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))
        busy[form] = device_microseconds(step) / bench.num_microbatches
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(bench.num_rounds):
        for form, step in forms.items():
            step()
            times[form].append(time_calls(step, bench.num_steps) / bench.num_microbatches)
    rows = []
    for form, each in times.items():
        row = StepRow(
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
