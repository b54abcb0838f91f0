"""Two runs over the same tokens: their validation losses at the same steps, as CSV, table and picture."""

from pathlib import Path
from typing import Any

from ..config.run import Config, ConfigError
from ..plan.parameter_count import count_parameters
from .curves import apart, draw_loss
from .drawing import save
from .run_folder import RunFolder, read_runs
from .side_by_side import differing, side_by_side
from .table import markdown_table, write_table

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
    runs = read_runs([base, other])
    configs = [_finished(run) for run in runs]
    settings = differing(side_by_side([run.settings for run in runs]))
    _check_same_tokens(runs, settings)
    labels, unit, train = [run.label for run in runs], runs[0].unit, configs[0].train
    losses, other_losses = (dict(run.points("loss", "validation")) for run in runs)
    points: list[dict[str, Any]] = []
    for step in sorted(losses.keys() & other_losses.keys()):
        one, two = losses[step], other_losses[step]
        difference = None if one is None or two is None else two - one
        tokens = step * train.global_batch_size * train.sequence_length
        points.append({"step": step, "tokens": tokens, "base_loss": one, "loss": two, "difference": difference})
    last = points[-1]["difference"]
    title = f"{labels[1]} ends {'in no number' if last is None else apart(last, unit, labels[0])}"
    out_dir.mkdir(parents=True, exist_ok=True)
    picture = draw_loss(runs, title)
    if picture is not None:
        save(picture, out_dir / f"{stem}.png")
    rows = [
        [str(step), f"{tokens / 1e6:.2f} M", *("no number" if value is None else f"{value:.4f}" for value in values)]
        for step, tokens, *values in (point.values() for point in points)
    ]
    sizes = (_size(label, config) for label, config in zip(labels, configs, strict=True))
    return write_table(
        out_dir,
        stem,
        points,
        title,
        f"{' '.join(sizes)} Both {max(losses)} steps of "
        f"{train.global_batch_size} sequences of {train.sequence_length} tokens, the same ones in the same order, "
        f"on {runs[0].world_size} process(es); loss on {train.eval_sequences} held-back sequences in nats per "
        f"{unit}; torch {runs[0].versions.get('torch')}. Made by `maingrad report --compare {base} {other}`.",
        markdown_table(["step", "tokens", *labels, "difference"], rows),
        f"![Both validation losses over steps]({stem}.png)",
        markdown_table(["key", *labels], [[key, *texts] for key, texts in settings.items()]),
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
    ends = [max([0, *dict(run.points("step", "validation"))]) for run in runs]
    if ends[0] != ends[1] or not ends[0]:
        raise ConfigError(
            f"{first} ended after {ends[0]} steps and {second} after {ends[1]}: without train.max_seconds both take "
            f"train.steps"
        )


def _size(label: str, config: Config) -> str:
    count = count_parameters(config.model)
    return f"**{label}**: {count.total / 1e6:.3f} M parameters, {count.active / 1e6:.3f} M of them active in a token."
