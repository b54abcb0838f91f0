"""What ``maingrad bench recipes`` measures, and the rows of its tables."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....te_integration import Float8BlockScaling, Float8CurrentScaling
from ....te_integration.recipes import Recipe
from .timing import device_microseconds, time_calls

__all__ = ["RECIPES", "PartRow", "RecipesBench", "StepRow", "step_rows"]

RECIPES: tuple[Recipe, ...] = (Float8CurrentScaling(), Float8BlockScaling())


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
