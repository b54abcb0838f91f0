"""Two runs over the same tokens: their validation losses at the same steps, as CSV, table and picture."""

from pathlib import Path
from typing import Any

from ..config.run import Config, ConfigError
from ..plan.parameter_count import count_parameters
from .curves import draw_loss
from .drawing import save
from .figures import differing, side_by_side
from .run_folder import RunFolder, read_runs
from .table import Column, markdown_table, write_table

__all__ = ["compare_runs"]

_SAME = {
    *("train.steps", "train.max_seconds", "train.global_batch_size", "train.sequence_length", "train.eval_sequences"),
    *("train.seed", "data.source", "data.paths", "data.validation_paths", "data.validation_fraction"),
    "data.max_tokens",
}
"""Keys that decide which tokens are read in which step."""


def compare_runs(base: Path, other: Path, out_dir: Path, stem: str) -> str:
    """Write ``stem.csv``, ``stem.md`` and ``stem.png`` into ``out_dir``; returns the table.

    A row of the CSV is a step, the tokens that each run has read until then, the validation losses of the first and of
    the second run in nats per token, and ``difference``: negative where the second run is better.

    Raises ``ConfigError`` for folders without a finished run, and for runs that did not read the same tokens in the
    same steps. The notes under the table list all other differences between the runs' settings.
    """
    runs = read_runs([base, other], RunFolder)
    configs = [_finished(run) for run in runs]
    settings = differing(side_by_side([run.settings for run in runs]))
    _check_same_tokens(runs, settings)
    first, second = (run.label for run in runs)
    unit, train = runs[0].unit, configs[0].train
    losses, other_losses = (dict(run.points("loss", "validation")) for run in runs)
    points: list[dict[str, Any]] = []
    for step in sorted(losses.keys() & other_losses.keys()):
        one, two = losses[step], other_losses[step]
        difference = None if one is None or two is None else two - one
        tokens = step * train.global_batch_size * train.sequence_length
        points.append({"step": step, "tokens": tokens, "base_loss": one, "loss": two, "difference": difference})
    last = points[-1]["difference"]
    side = "below" if last is not None and last < 0 else "above"
    verdict = "in no number" if last is None else f"{abs(last):.4f} nats per {unit} {side} {first}"
    title = f"{second} ends {verdict}"
    out_dir.mkdir(parents=True, exist_ok=True)
    picture = draw_loss(runs, title)
    if picture is not None:
        save(picture, out_dir / f"{stem}.png")
    columns: list[Column] = [
        ("step", "{row[step]}"),
        ("tokens", lambda point: f"{point['tokens'] / 1e6:.2f} M"),
        (first, lambda point: _number(point["base_loss"])),
        (second, lambda point: _number(point["loss"])),
        ("difference", lambda point: _number(point["difference"], "+")),
    ]
    return write_table(
        out_dir,
        stem,
        points,
        title,
        f"{_sizes(first, configs[0])}. {_sizes(second, configs[1])}. Both {max(losses)} steps of "
        f"{train.global_batch_size} sequences of {train.sequence_length} tokens, the same ones in the same order, "
        f"on {runs[0].world_size} process(es); loss on {train.eval_sequences} held-back sequences in nats per "
        f"{unit}; torch {runs[0].versions.get('torch')}. Made by `maingrad report --compare {base} {other}`.",
        markdown_table(points, columns),
        f"![Both validation losses over steps]({stem}.png)",
        markdown_table(settings.items(), [("key", "{row[0]}"), (first, "{row[1][0]}"), (second, "{row[1][1]}")]),
    )


def _finished(run: RunFolder) -> Config:
    if run.config is None:
        raise ConfigError(f"'{run.path}': {' '.join(note for note in run.notes if 'resolved_config' in note)}")
    if run.end.get("kind") != "final":
        raise ConfigError(f"the run in '{run.path}' has not come to its end; train it again, or wait for it")
    return run.config


def _check_same_tokens(runs: list[RunFolder], settings: dict[str, list[str]]) -> None:
    first, second = (run.label for run in runs)
    for key in settings.keys() & _SAME:
        one, two = settings[key]
        raise ConfigError(
            f"{first} has {key} = {one} and {second} {two}: runs are compared over the same tokens in the same steps"
        )
    ends = [max([0, *(step for step, _ in run.points("step", "validation"))]) for run in runs]
    if ends[0] != ends[1] or not ends[0]:
        raise ConfigError(
            f"{first} ended after {ends[0]} steps and {second} after {ends[1]}: without train.max_seconds both take "
            f"train.steps"
        )


def _sizes(label: str, config: Config) -> str:
    count = count_parameters(config.model)
    total, active = count.total / 1e6, count.active / 1e6
    return f"**{label}**: {total:.3f} M parameters, {active:.3f} M of them active in a token"


def _number(value: float | None, sign: str = "") -> str:
    return "no number" if value is None else f"{value:{sign}.4f}"
