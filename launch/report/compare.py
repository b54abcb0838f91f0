"""Two runs side by side: their validation losses at the same steps, as CSV, table and picture.

Reads ``metrics.jsonl`` and ``resolved_config.json``, which ``maingrad train`` left in the runs' folders.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config.file import config_to_dict, flat, structure_of_run
from ..config.run import Config, ConfigError
from ..plan.parameter_count import ParameterCount, count_parameters
from ..training.metrics import read_metrics
from .drawing import BACKWARD, EXPOSED, INK, dress, plt, save
from .table import Column, write_table

__all__ = ["ComparedPoint", "compare_runs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPoint:
    """One line of the table: both runs after the same number of steps."""

    step: int
    tokens: int
    """Tokens that each run has read until this step."""
    base_loss: float
    """Validation loss of the first run, nats per token."""
    loss: float
    """Validation loss of the second run, nats per token."""
    difference: float
    """``loss - base_loss``: negative where the second run is better."""


class _Run(NamedTuple):
    name: str
    config: Config
    versions: dict[str, Any]
    world_size: int
    unit: str
    parameters: ParameterCount
    validation: dict[int, float]
    training: list[tuple[int, float]]


def compare_runs(base: Path, other: Path, out_dir: Path, stem: str) -> str:
    """Write ``stem.csv``, ``stem.md`` and ``stem.png`` into ``out_dir``; returns the table.

    Raises ``ConfigError`` for folders without a finished run, and for runs that did not read the same tokens in the
    same steps. The notes under the table list all other differences between the runs' settings.
    """
    first, second = _read_run(base), _read_run(other)
    _check_same_tokens(first, second)
    tokens_per_step = first.config.train.global_batch_size * first.config.train.sequence_length
    points = [
        ComparedPoint(
            step=step,
            tokens=step * tokens_per_step,
            base_loss=loss,
            loss=second.validation[step],
            difference=second.validation[step] - loss,
        )
        for step, loss in first.validation.items()
        if step in second.validation
    ]
    columns: list[Column] = [
        ("step", lambda point: str(point.step)),
        ("tokens", lambda point: f"{point.tokens / 1e6:.2f} M"),
        (first.name, lambda point: f"{point.base_loss:.4f}"),
        (second.name, lambda point: f"{point.loss:.4f}"),
        ("difference", lambda point: f"{point.difference:+.4f}"),
    ]
    title = _verdict(first, second, points[-1])
    table = write_table(
        out_dir,
        stem,
        points,
        title=title,
        setting=_setting(first, second, base, other),
        columns=columns,
        notes=_notes(first, second, stem),
    )
    _draw(first, second, title, out_dir / f"{stem}.png")
    return table


def _read_run(folder: Path) -> _Run:
    try:
        resolved = json.loads((folder / "resolved_config.json").read_text(encoding="utf-8"))
        records = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError as error:
        raise ConfigError(f"'{folder}' is not the folder of a run: {error.filename} does not exist") from None
    if not any(record["kind"] == "final" for record in records):
        raise ConfigError(f"the run in '{folder}' has not come to its end; train it again, or wait for it")
    config = structure_of_run(resolved["config"])
    return _Run(
        folder.resolve().name,
        config,
        resolved["versions"],
        resolved["world_size"],
        next((record["unit"] for record in records if record["kind"] == "observed"), "token"),
        count_parameters(config.model),
        {record["step"]: record["loss"] for record in records if record["kind"] == "validation"},
        [(record["step"], record["loss"]) for record in records if record["kind"] == "step"],
    )


def _check_same_tokens(first: _Run, second: _Run) -> None:
    for section, keys in {
        "train": ("steps", "max_seconds", "global_batch_size", "sequence_length", "eval_sequences", "seed"),
        "data": ("source", "paths", "validation_paths", "validation_fraction", "max_tokens"),
    }.items():
        for key in keys:
            one, two = (getattr(getattr(run.config, section), key) for run in (first, second))
            if one != two:
                raise ConfigError(
                    f"{first.name} has {section}.{key} = {one!r} and {second.name} {two!r}: runs are compared over the "
                    f"same tokens in the same steps"
                )
    if max(first.validation) != max(second.validation):
        raise ConfigError(
            f"{first.name} ended after {max(first.validation)} steps and {second.name} after "
            f"{max(second.validation)}: without train.max_seconds both take train.steps"
        )


def _verdict(first: _Run, second: _Run, last: ComparedPoint) -> str:
    side = "below" if last.difference < 0 else "above"
    return f"{second.name} ends {abs(last.difference):.4f} nats per {first.unit} {side} {first.name}"


def _setting(first: _Run, second: _Run, base: Path, other: Path) -> str:
    def sizes(run: _Run) -> str:
        count = run.parameters
        total, active = count.total / 1e6, count.active / 1e6
        return f"**{run.name}**: {total:.3f} M parameters, {active:.3f} M of them active in a token"

    train = first.config.train
    return (
        f"{sizes(first)}. {sizes(second)}. Both {max(first.validation)} steps of {train.global_batch_size} sequences "
        f"of {train.sequence_length} tokens, the same ones in the same order, on {first.world_size} process(es); loss "
        f"on {train.eval_sequences} held-back sequences in nats per {first.unit}; torch {first.versions['torch']}. "
        f"Made by `maingrad report --compare {base} {other}`."
    )


def _notes(first: _Run, second: _Run, stem: str) -> str:
    """Markdown: the picture, and every configuration key in which the runs differ."""
    one, two = flat(config_to_dict(first.config)), flat(config_to_dict(second.config))
    lines = [f"| {key} | {one[key]} | {two[key]} |" for key in one if one[key] != two[key] and key != "train.out_dir"]
    head = [f"| key | {first.name} | {second.name} |", "|---|---|---|"]
    return "\n".join([f"![Both validation losses over steps]({stem}.png)", "", *head, *lines])


def _draw(first: _Run, second: _Run, title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    for run, colour, above in ((first, INK, True), (second, EXPOSED, False)):
        steps, losses = zip(*run.training, strict=True)
        axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.35, label=f"{run.name}, training")
        at, validation = zip(*sorted(run.validation.items()), strict=True)
        axes.plot(
            at, validation, color=colour, linewidth=1.8, marker="o", markersize=4.5, label=f"{run.name}, validation"
        )
        axes.annotate(
            f"{validation[-1]:.3f}", (at[-1], validation[-1]), xytext=(6, 7 if above else -7),
            textcoords="offset points", color=colour, va="center", fontweight="bold",
        )  # fmt: skip
    top = max(max(run.validation.values()) for run in (first, second))
    bottom = min(min(loss for _, loss in run.training) for run in (first, second))
    axes.set_ylim(bottom - 0.1, top + 0.3)
    dress(axes, title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss, nats per {first.unit}")
    axes.grid(axis="y", color=BACKWARD, linewidth=0.8)
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="upper right")
    save(figure, path)
