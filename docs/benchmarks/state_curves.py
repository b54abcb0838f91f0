"""Validation losses of the GPT of ``launch/configs/stdlib.toml`` with each form of optimizer state, over several seeds.

    python docs/benchmarks/state_curves.py --seeds 0 1 2 3 4 5 6 7 8 9 10 11

bf16 parameters, one GPU; a seed has the same weights and batches in all rows. Runs are added to state_curves.csv in
``--out-dir``; without ``--seeds`` none is made. Prints and writes the table of the file (state_curves.md), and draws
state_curves.png. Compact state with fp32 moments has the bits of full state, and so no row.

Two runs of one seed in different arithmetic part after some hundred steps, as if they had different batches. What is
compared is made to depend on that as little as can be, and the rest is measured:

- The learning rate ends at zero, so that the last weights are no point of a random walk.
- The loss of a run is the mean of its last ``--late`` validations, over ``--sequences`` sequences each.
- Rows are compared seed by seed, and means have standard errors.
- A control has full state too, and sums the same batch in another order: its true difference is zero, so its row shows
  what the noise alone does.
"""

import csv
import gc
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Options, log, run_script, versions

from maingrad.launch.config.file import load_config
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

CONFIG = Path(__file__).resolve().parents[2] / "launch" / "configs" / "stdlib.toml"
CONTROL = "full, sums in another order"
FORMS = {
    "full": (),
    CONTROL: ("--train.num-microbatches", "2"),
    "compact, bf16 moments": ("--optimizer.state", "compact"),
    "compact, 8-bit moments": ("--optimizer.state", "compact", "--optimizer.moment-dtype", "uint8"),
}


@dataclass(frozen=True, kw_only=True)
class CurveOptions(Options):
    """Which runs are made."""

    seeds: tuple[int, ...] = ()
    """Seeds of weights and batches."""
    steps: int = 600
    """Steps of a run."""
    batch: int = 64
    """Sequences of a step; an even number."""
    late: int = 5
    """Validations at the end of a run whose mean is its loss."""
    sequences: int = 2048
    """Sequences of the validation set."""
    device: str = "cuda"
    """``cpu`` shows that the script runs, with a small batch and few sequences: bf16 is slow there."""


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
            "train.global-batch-size": options.batch,
            "train.num-microbatches": 1,
            "train.eval-every": max(1, options.steps // 30),
            "train.eval-sequences": options.sequences,
            "train.log-every": options.steps,
            "optimizer.warmup-steps": min(30, options.steps // 4),
            "optimizer.min-lr-ratio": 0.0,
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        train(load_config(CONFIG, [*words, *FORMS[form]]))
        records = read_metrics(Path(folder) / "metrics.jsonl")
    return {each["step"]: each["loss"] for each in records if each["kind"] == "validation"}


# ---- What the file has: the picture and the table. ----


def draw(curves, path):
    """Losses of each form, and their ratio to those of full state with its standard error, as means over seeds."""
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
        means = [statistics.mean(each) for each in over]
        errors = [statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0 for each in over]
        losses.plot(steps, [statistics.mean(one[step] for one in mine) for step in steps], label=form)
        (line,) = ratios.plot(steps, means, label=form)
        bounds = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        ratios.fill_between(steps, *bounds, color=line.get_color(), alpha=0.2, linewidth=0)
    losses.set(xlabel="step", ylabel="validation loss, nats a byte")
    ratios.set(xlabel="step", ylabel="over full state, same seeds, %, with standard errors")
    losses.legend()
    return figure


def _points(curves, form):
    """Validation losses by step, of each seed in order."""
    return [curves[key] for key in sorted(curves) if key[0] == form]


def table_of(curves, late):
    """Mean losses of all forms, and by how much they are over those of full state with the same seeds."""
    lines = ["| state | seeds | validation loss | over full state, same seeds | standard error | deviation of a seed |"]
    lines.append("|---|---|---|---|---|---|")
    losses = {form: [_late_loss(points, late) for points in _points(curves, form)] for form in FORMS}
    for form, mine in losses.items():
        over = [100 * (loss / full - 1) for loss, full in zip(mine, losses["full"], strict=True)]
        deviation = statistics.stdev(over) if len(over) > 1 else math.nan
        numbers = f"{statistics.mean(over):+.3f} % | {deviation / math.sqrt(len(over)):.3f} % | {deviation:.2f} % |"
        compared = "| | |" if form == "full" else numbers
        lines.append(f"| {form} | {len(mine)} | {statistics.mean(mine):.4f} | {compared}")
    return "\n".join(lines)


def _late_loss(points, late):
    """The loss of a run: the mean of its last ``late`` validations."""
    return statistics.mean(points[step] for step in sorted(points)[-late:])


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
            began = time.monotonic()
            curves[form, seed] = losses_of(options, form, seed)
            gc.collect()  # what a graph keeps goes with its cycle of references
            seconds = time.monotonic() - began
            log(f"seed {seed}, {form}: {_late_loss(curves[form, seed], options.late):.4f}, in {seconds:.1f} s")
        write_curves(curves, path)
    log(table := table_of(curves, options.late))
    steps = max(map(max, curves.values()))
    path.with_suffix(".md").write_text(f"{table}\n\n{versions()}; {steps} steps.\n")
    draw(curves, path.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(run_script(CurveOptions, run))
