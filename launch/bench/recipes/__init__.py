"""Recipes of low precision on one GPU: a layer's forward and backward, and the parts that its time is made of.

bf16                     our layer without a recipe
Float8CurrentScaling...  our layer under the recipe
Transformer Engine, ...  its ``Linear`` with the same shapes, weight gradients fused into fp32 ``main_grad``

A step is several microbatches whose weight gradients are summed in ``main_grad``. Everything is counted: quantising of
inputs, gradients and weights too, and the host's time where that is the longer.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from ...report.table import Column, machine, markdown_table, write_csv, write_table
from ..kernels.problems import parse_shape
from ..steps import free_memory
from .experts import expert_parts, expert_steps
from .linear import linear_parts, linear_steps
from .rows import PartRow as PartRow
from .rows import RecipesBench as RecipesBench
from .rows import StepRow as StepRow
from .rows import step_rows

__all__ = ["PartRow", "RecipesBench", "StepRow", "bench_recipes", "write_recipes_report"]


def bench_recipes(
    bench: RecipesBench, device: torch.device, log: Callable[[str], None]
) -> tuple[list[StepRow], list[PartRow]]:
    """Measure every row; on CUDA only."""
    if device.type != "cuda":
        raise ValueError("bench recipes measures kernels: it needs a GPU")
    steps: list[StepRow] = []
    parts: list[PartRow] = []
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


def write_recipes_report(steps: list[StepRow], parts: list[PartRow], bench: RecipesBench, folder: Path) -> str:
    """Write ``recipes.md``, ``recipes.csv`` and ``recipes_parts.csv`` into ``folder``; returns the tables."""
    setting = (
        f"{machine()}. Square linear layers without bias, {bench.num_tokens} tokens, and grouped layers (experts x "
        f"rows x output features x input features, uneven splits); {bench.num_microbatches} microbatches into fp32 "
        f"main_grad; forward and backward, all quantising included. Median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events. Made by "
        f"`maingrad bench recipes`."
    )
    columns: list[Column] = [
        ("layer", "{row.layer}"),
        ("", "{row.form}"),
        ("us a microbatch", "{row.microseconds:.0f}"),
        ("times as fast as bf16", "{row.over_bf16:.2f}"),
        ("kernels alone, us", "{row.device_microseconds:.0f}"),
        ("times as fast as bf16's", "{row.device_over_bf16:.2f}"),
        ("error of dW against bf16", "{row.error:.3f}"),
    ]
    of_parts: list[Column] = [
        ("layer", "{row.layer}"),
        ("", "{row.part}"),
        ("us", "{row.microseconds:.0f}"),
        (
            "TFLOP/s, or share of a copy's bandwidth",
            lambda row: f"{row.rate:.0f}" if row.rate > 5 else f"{row.rate:.2f}",
        ),
    ]
    write_csv(folder, "recipes_parts", parts)
    notes = "\n".join(["## Parts", "", *markdown_table(parts, of_parts)])
    title = "Recipes of low precision: linear and grouped layers"
    return write_table(folder, "recipes", steps, title=title, setting=setting, columns=columns, notes=notes)
