"""Writes ``report.html``, a page that needs no other file and no network, and the pictures of a run."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jinja2

from ... import __version__
from ..config.run import ConfigError
from ..data.replacing import replacing
from ..plan.tables import format_bytes
from ..training.watching.progress import format_duration, format_rate
from .curves import RUN_COLOURS, apart, draw_curves, draw_loss
from .derived import derive
from .drawing import save, svg
from .overlap import chrome_trace, hidden_share, overlap_lines
from .run_folder import Point, RunFolder, read_runs
from .side_by_side import differing, environment, side_by_side
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
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"bytes": format_bytes, "rate": format_rate, "duration": format_duration}
_MOST_ROWS = 200  # of the table of values


def write_page(runs: Sequence[RunFolder], target: Path, *, peak_tflops: float | None = None) -> Path:
    """Write the page of runs to ``target``; returns ``target``.

    peak_tflops  of one device, for MFU; None: dense bf16 of a known GPU

    Raises ``ConfigError`` for a peak that is not positive.
    """
    if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
        raise ConfigError(f"--peak-tflops {peak_tflops}: must be positive")
    for run in runs:
        derive(run, peak_tflops)
    drawn = {"loss": draw_loss(runs)}
    for key, (_, unit) in _CURVES.items():
        drawn[key] = draw_curves([run.points(key) for run in runs], unit)
    page = _TEMPLATES.get_template("page.html.j2").render(
        runs=runs,
        title=", ".join(run.label for run in runs),
        colours=RUN_COLOURS,
        numbers=[run.numbers for run in runs],
        charts={key: svg(figure, f"{key} over steps") for key, figure in drawn.items() if figure},
        titles={key: title for key, (title, _) in _CURVES.items()},
        values=[_values(run) for run in runs],
        steps=[run.timeline and svg(draw_step(run.timeline), "One step") for run in runs],
        settings=side_by_side([run.settings for run in runs]),
        environment=side_by_side([environment(run) for run in runs]),
        differing=differing,
        hidden_share=hidden_share,
        version=__version__,
        today=time.strftime("%Y-%m-%d"),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, errors="backslashreplace") as file:
        file.write(page)
    return target


def _values(run: RunFolder) -> tuple[list[int], dict[str, dict[int, float | None]]]:
    """The numbers that the curves show: the steps of the table's rows, and by title a column's value at each step."""
    named: dict[str, list[Point]] = {
        "training loss": run.points("loss"),
        "validation loss": run.points("loss", "validation"),
        **{title: run.points(key) for key, (title, _) in _CURVES.items()},
    }
    columns = {title: dict(points) for title, points in named.items() if points}
    steps = sorted({step for column in columns.values() for step in column})
    return steps[-1 :: -1 - len(steps) // _MOST_ROWS][::-1], columns  # the last step among them


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
    for line in overlap_lines(run.timeline) if run.timeline else ():
        print(line)
    gap = run.end.get("nats_below_bigram")
    title = "Loss over steps" if gap is None else f"Validation ends {apart(-gap, run.unit, 'the bigram model')}"
    loss = draw_loss([run], title)
    if loss:
        print(save(loss, out_dir / "loss.png"))
    if run.timeline:
        print(save(draw_step(run.timeline), out_dir / "overlap.png"))
        with replacing(out_dir / "overlap.json") as file:
            json.dump(chrome_trace(run.timeline), file)
        print(out_dir / "overlap.json", flush=True)
