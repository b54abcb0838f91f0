"""Writes ``report.html``, a page that needs no other file and no network, and the pictures of a run."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ... import __version__
from ..config.run import ConfigError
from ..plan.tables import format_bytes
from ..training.watching.replacing import replacing
from .curves import RUN_COLOURS, draw_curves, draw_loss
from .drawing import save, svg
from .figures import Facts, compared, environment, facts_of, figures, state
from .overlap import chrome_trace, hidden_share, overlap_lines
from .run_folder import read_runs
from .step_picture import draw_step

__all__ = ["print_report", "write_page"]

_CURVES = {
    "tokens_per_second": ("Throughput", "tokens per second, all ranks"),
    "mfu": ("Model FLOPs utilisation", "part of the peak"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", ""),
    "max_expert_load": ("Fullest expert", "rows over an even share"),
    "load_balancing_loss": ("Load-balancing loss", "1 at perfect balance"),
    "router_z_loss": ("Router z-loss", ""),
}
_MOST_ROWS = 200  # of the table of values


def write_page(folders: Sequence[Path], target: Path, *, peak_tflops: float | None = None) -> Path:
    """Write the page of the runs in ``folders`` to ``target``; returns ``target``.

    peak_tflops  of one device, for MFU; None: dense bf16 of a known GPU

    Raises ``ConfigError`` for a peak that is not positive, and for folders without records.
    """
    if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
        raise ConfigError(f"--peak-tflops {peak_tflops}: must be positive")
    runs = [facts_of(run, peak_tflops) for run in read_runs(folders)]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"bytes": format_bytes, "hidden_share": hidden_share}
    drawn = {"loss wide": draw_loss([facts.run for facts in runs])}
    drawn["loss narrow"] = draw_loss([facts.run for facts in runs], size=(4.6, 3.6))  # on a phone
    for key, (_, unit) in _CURVES.items():
        drawn[key] = draw_curves([facts.points(key) for facts in runs], unit)
    page = templates.get_template("page.html.j2").render(
        runs=runs,
        state=state,
        title=" and ".join(facts.run.label for facts in runs) if len(runs) < 3 else f"{len(runs)} runs",
        colours=RUN_COLOURS,
        figures=figures(runs),
        charts={key: svg(figure, f"{key} over steps") for key, figure in drawn.items() if figure},
        titles={key: title for key, (title, _) in _CURVES.items()},
        values=[_values(facts) for facts in runs],
        steps=[facts.run.timeline and svg(draw_step(facts.run.timeline), "One step") for facts in runs],
        settings=compared([facts.run.settings for facts in runs]),
        environment=environment(runs),
        version=__version__,
        today=time.strftime("%Y-%m-%d"),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, errors="backslashreplace") as file:
        file.write(page)
    return target


def _values(facts: Facts) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The numbers that the curves show: their titles, and rows of a step and its values."""
    named = {"training loss": facts.points("loss"), "validation loss": facts.points("loss", "validation")}
    named |= {title: facts.points(key) for key, (title, _) in _CURVES.items()}
    columns = {title: dict(points) for title, points in named.items() if points}
    steps = sorted({step for column in columns.values() for step in column})
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_ROWS)).astype(int))
    return list(columns), [(steps[at], [_text(each, steps[at]) for each in columns.values()]) for at in kept]


def _text(column: dict[int, float | None], step: int) -> str:
    value = column.get(step)
    return f"{value:.5g}" if value is not None else "no number" if step in column else ""


def print_report(out_dir: Path) -> None:
    """Draw the pictures of a run, and print how much communication its recorded step overlapped.

    ``loss.png``      training and validation loss, and the bigram model's loss as the line to beat
    ``overlap.png``   one step: computation, and the collectives under which it runs
    ``overlap.json``  the same step as a Chrome trace
    """
    run = read_runs([out_dir])[0]
    for note in run.notes:
        if note.startswith("'"):  # what is damaged
            print(f"maingrad: left out: {note}", file=sys.stderr)
    for line in overlap_lines(run.timeline):
        print(line)
    loss = draw_loss([run], _verdict(run.end, run.unit))
    if loss:
        print(save(loss, out_dir / "loss.png"))
    if run.timeline:
        print(save(draw_step(run.timeline), out_dir / "overlap.png"))
        with replacing(out_dir / "overlap.json") as file:
            json.dump(chrome_trace(run.timeline), file)
        print(out_dir / "overlap.json", flush=True)


def _verdict(end: dict[str, Any], unit: str) -> str:
    gap = end.get("nats_below_bigram")
    if gap is None:
        return "Loss over steps"
    return f"Validation ends {abs(gap):.2f} nats per {unit} {'below' if gap >= 0 else 'above'} the bigram model"
