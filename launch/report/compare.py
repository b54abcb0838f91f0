"""Two runs over the same tokens: their validation losses at the same steps, as CSV, table and picture."""

from dataclasses import dataclass
from pathlib import Path

from ..config.run import Config, ConfigError
from ..plan.parameter_count import count_parameters
from .curves import draw_loss
from .drawing import save
from .figures import compared
from .run_folder import RunFolder, read_runs
from .table import Column, markdown_table, write_table

__all__ = ["ComparedPoint", "compare_runs"]

_SAME = {
    "train": ("steps", "max_seconds", "global_batch_size", "sequence_length", "eval_sequences", "seed"),
    "data": ("source", "paths", "validation_paths", "validation_fraction", "max_tokens"),
}
"""Keys that decide which tokens are read in which step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPoint:
    """One line of the table: both runs after the same number of steps. Losses are in nats per token."""

    step: int
    tokens: int
    """Tokens that each run has read until this step."""
    base_loss: float | None
    """Validation loss of the first run; None: no number."""
    loss: float | None
    difference: float | None
    """``loss - base_loss``: negative where the second run is better."""


def compare_runs(base: Path, other: Path, out_dir: Path, stem: str) -> str:
    """Write ``stem.csv``, ``stem.md`` and ``stem.png`` into ``out_dir``; returns the table.

    Raises ``ConfigError`` for folders without a finished run, and for runs that did not read the same tokens in the
    same steps. The notes under the table list all other differences between the runs' settings.
    """
    first, second = read_runs([base, other])
    config, other_config = _finished(first), _finished(second)
    _check_same_tokens(first, second, config, other_config)
    losses, other_losses = dict(first.points("loss", "validation")), dict(second.points("loss", "validation"))
    points = []
    for step in losses.keys() & other_losses.keys():
        one, two = losses[step], other_losses[step]
        difference = None if one is None or two is None else two - one
        tokens = step * config.train.global_batch_size * config.train.sequence_length
        points.append(ComparedPoint(step=step, tokens=tokens, base_loss=one, loss=two, difference=difference))
    points.sort(key=lambda point: point.step)
    columns: list[Column] = [
        ("step", "{row.step}"),
        ("tokens", lambda point: f"{point.tokens / 1e6:.2f} M"),
        (first.label, lambda point: _number(point.base_loss)),
        (second.label, lambda point: _number(point.loss)),
        ("difference", lambda point: _number(point.difference, "+")),
    ]
    last = points[-1].difference
    side = "below" if last is not None and last < 0 else "above"
    verdict = "in no number" if last is None else f"{abs(last):.4f} nats per {first.unit} {side} {first.label}"
    title = f"{second.label} ends {verdict}"
    picture = draw_loss([first, second], title)
    if picture is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        save(picture, out_dir / f"{stem}.png")
    rows = [row for row in compared([first.settings, second.settings]) if row.differs]
    settings: list[Column] = [
        ("key", "{row.key}"),
        (first.label, "{row.cells[0].text}"),
        (second.label, "{row.cells[1].text}"),
    ]
    train = config.train
    return write_table(
        out_dir,
        stem,
        points,
        title=title,
        setting=(
            f"{_sizes(first.label, config)}. {_sizes(second.label, other_config)}. Both {max(losses)} steps of "
            f"{train.global_batch_size} sequences of {train.sequence_length} tokens, the same ones in the same order, "
            f"on {first.world_size} process(es); loss on {train.eval_sequences} held-back sequences in nats per "
            f"{first.unit}; torch {first.versions.get('torch')}. Made by `maingrad report --compare {base} {other}`."
        ),
        columns=columns,
        notes="\n".join([f"![Both validation losses over steps]({stem}.png)", "", *markdown_table(rows, settings)]),
    )


def _finished(run: RunFolder) -> Config:
    if run.config is None:
        raise ConfigError(f"'{run.path}': {' '.join(note for note in run.notes if 'resolved_config' in note)}")
    if run.end.get("kind") != "final":
        raise ConfigError(f"the run in '{run.path}' has not come to its end; train it again, or wait for it")
    return run.config


def _check_same_tokens(first: RunFolder, second: RunFolder, config: Config, other: Config) -> None:
    for section, keys in _SAME.items():
        for key in keys:
            one, two = (getattr(getattr(each, section), key) for each in (config, other))
            if one != two:
                raise ConfigError(
                    f"{first.label} has {section}.{key} = {one!r} and {second.label} {two!r}: runs are compared over "
                    f"the same tokens in the same steps"
                )
    ends = [max([0, *(step for step, _ in run.points("step", "validation"))]) for run in (first, second)]
    if ends[0] != ends[1] or not ends[0]:
        raise ConfigError(
            f"{first.label} ended after {ends[0]} steps and {second.label} after {ends[1]}: without train.max_seconds "
            f"both take train.steps"
        )


def _sizes(label: str, config: Config) -> str:
    count = count_parameters(config.model)
    total, active = count.total / 1e6, count.active / 1e6
    return f"**{label}**: {total:.3f} M parameters, {active:.3f} M of them active in a token"


def _number(value: float | None, sign: str = "") -> str:
    return "no number" if value is None else f"{value:{sign}.4f}"
