"""Validation losses of the GPT of ``launch/configs/stdlib.toml`` with each form of optimizer state, over several seeds.

    python docs/benchmarks/state_curves.py --seeds 0 1 2

bf16 parameters, one GPU; a seed has the same weights and batches in all forms. Runs are added to state_curves.csv in
``--out-dir``; without ``--seeds`` none is made. Prints the table of the file, and draws state_curves.png. Compact state
with fp32 moments has the bits of full state, and so no row.
"""

import csv
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import Options, log, run_script

from maingrad.launch.config.file import load_config
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

CONFIG = Path(__file__).resolve().parents[2] / "launch" / "configs" / "stdlib.toml"
FORMS = {
    "full": (),
    "compact, bf16 moments": ("--optimizer.state", "compact"),
    "compact, 8-bit moments": ("--optimizer.state", "compact", "--optimizer.moment-dtype", "uint8"),
}


@dataclass(frozen=True, kw_only=True)
class CurveOptions(Options):
    """Which runs are made."""

    seeds: tuple[int, ...] = ()
    """Seeds of weights and batches."""
    steps: int = 450
    """Steps of a run."""
    device: str = "cuda"
    """``cpu`` shows that the script runs."""


def losses_of(options, form, seed):
    """Validation losses by step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model.param-dtype": "bfloat16",
            "train.device": options.device,
            "train.steps": options.steps,
            "train.seed": seed,
            "train.out-dir": folder,
            "train.max-seconds": 600.0,
            "train.cuda-graph": str(options.device == "cuda").lower(),
            "optimizer.warmup-steps": min(30, options.steps // 4),
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        train(load_config(CONFIG, [*words, *FORMS[form]]))
        records = read_metrics(Path(folder) / "metrics.jsonl")
    return {each["step"]: each["loss"] for each in records if each["kind"] == "validation"}


# ---- What the file has: the picture and the table. ----


def draw(curves, path):
    """Losses of each form, and their ratio to those of full state, as means over seeds."""
    from maingrad.launch.report.drawing import save, styled

    return save(styled(_figure)(curves), path)


def _figure(curves):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, ratios = figure.subplots(1, 2)
    for form in FORMS:
        mine, full = _points(curves, form), _points(curves, "full")
        steps = sorted(mine[0])
        over = [[100 * (one[step] / other[step] - 1) for one, other in zip(mine, full, strict=True)] for step in steps]
        losses.plot(steps, [statistics.mean(one[step] for one in mine) for step in steps], label=form)
        ratios.plot(steps, [statistics.mean(each) for each in over], label=form)
    losses.set(xlabel="step", ylabel="validation loss, nats a byte", yscale="log")
    ratios.set(xlabel="step", ylabel="over full state, same seeds, %")
    losses.legend()
    return figure


def _points(curves, form):
    """Validation losses by step, of each seed in order."""
    return [curves[key] for key in sorted(curves) if key[0] == form]


def table_of(curves):
    """Last losses, and their mean over those of full state with the standard error of this mean."""
    lines = ["| state | seeds | validation loss | over full state, same seeds | standard error |"]
    lines.append("|---|---|---|---|---|")
    last = {form: [points[max(points)] for points in _points(curves, form)] for form in FORMS}
    for form, mine in last.items():
        over = [100 * (loss / full - 1) for loss, full in zip(mine, last["full"], strict=True)]
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        compared = "| |" if form == "full" else f"| {statistics.mean(over):+.2f} % | {error:.2f} |"
        lines.append(f"| {form} | {len(mine)} | {statistics.mean(mine):.4f} {compared}")
    return "\n".join(lines)


def read_curves(path):
    """Validation losses by form and seed, then by step; none where there is no file."""
    curves: dict[tuple[str, int], dict[int, float]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                point = {int(row["step"]): float(row["validation_loss"])}
                curves.setdefault((row["form"], int(row["seed"])), {}).update(point)
    return curves


def write_curves(curves, path):
    """Write what ``read_curves`` reads."""
    with path.open("w", newline="") as file:
        rows = ((form, seed, *point) for (form, seed), points in curves.items() for point in points.items())
        csv.writer(file, lineterminator="\n").writerows([("form", "seed", "step", "validation_loss"), *rows])


def run(options):
    """Train all forms with all seeds."""
    options.out_dir.mkdir(parents=True, exist_ok=True)
    path = options.out_dir / "state_curves.csv"
    curves = read_curves(path)
    for seed in options.seeds:
        for form in FORMS:
            curves[form, seed] = losses_of(options, form, seed)
            log(f"seed {seed}, {form}: {curves[form, seed]}")
        write_curves(curves, path)
    log(table_of(curves))
    draw(curves, path.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(run_script(CurveOptions, run))
