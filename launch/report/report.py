"""Pictures of a run, drawn from its ``metrics.jsonl`` alone.

``loss.png``     training and validation loss, and the bigram model's loss as the line to beat
``overlap.png``  one step: its reductions and all-gathers, beside the computation under which they run
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..training.metrics import read_metrics
from .drawing import BACKWARD, EXPOSED, HIDDEN, INK, TRAIN, dress, plt, save
from .overlap import overlap_lines
from .overlap_plot import draw_overlap

__all__ = ["draw_report", "last_timeline", "print_report"]


def draw_report(out_dir: Path) -> list[Path]:
    """Draw what the records in ``out_dir`` allow; returns the pictures' paths."""
    records = read_metrics(out_dir / "metrics.jsonl")
    paths = []
    if any(record["kind"] == "step" for record in records):
        paths.append(_draw_loss(records, out_dir / "loss.png"))
    timeline = last_timeline(out_dir)
    if timeline is not None:
        paths.append(draw_overlap(timeline, out_dir / "overlap.png"))
    return paths


def print_report(out_dir: Path) -> None:
    """Draw the pictures of a run, and print how much communication its recorded step overlapped."""
    for line in overlap_lines(last_timeline(out_dir)):
        print(line)
    for path in draw_report(out_dir):
        print(path, flush=True)


def last_timeline(out_dir: Path) -> dict[str, Any] | None:
    """The last ``timeline`` record of the run in ``out_dir``; None where the run has none."""
    records = read_metrics(out_dir / "metrics.jsonl")
    return next((r for r in reversed(records) if r["kind"] == "timeline" and r["buckets"]), None)


def _draw_loss(records: Sequence[dict[str, Any]], path: Path) -> Path:
    """Loss over steps: every logged training loss, its running mean, the validation losses and the bigram line."""
    steps = [record for record in records if record["kind"] == "step"]
    validations = [record for record in records if record["kind"] == "validation"]
    bigram = next((record["bigram_loss"] for record in records if record["kind"] == "final"), None)
    unit = next((record["unit"] for record in records if record["kind"] == "observed"), "token")

    figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    x, y = [record["step"] for record in steps], [record["loss"] for record in steps]
    axes.plot(x, y, color=TRAIN if len(y) > 200 else HIDDEN, linewidth=1.5, label="training")
    if len(y) > 200:  # a curve of few points needs no running mean
        axes.plot(x, _centred_mean(y, len(y) // 100), color=HIDDEN, linewidth=2, label="training, smoothed")
    if validations:
        at, losses = [record["step"] for record in validations], [record["loss"] for record in validations]
        axes.plot(at, losses, color=EXPOSED, linewidth=1.5, marker="o", markersize=5, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}", (at[-1], losses[-1]), xytext=(6, 0), textcoords="offset points", color=EXPOSED,
            va="center", fontweight="bold",
        )  # fmt: skip
    if bigram is not None:
        axes.axhline(bigram, color=INK, linewidth=1.2, linestyle=(0, (5, 4)))
        axes.annotate(
            f"{unit}-bigram counts on the same data: {bigram:.3f}", (1.0, bigram), xycoords=("axes fraction", "data"),
            xytext=(-4, 5), textcoords="offset points", color=INK, ha="right",
        )  # fmt: skip
        # The untrained model's loss would squeeze everything of interest into the lower third.
        axes.set_ylim(top=min(max(y), bigram + 1.2))
    title = "Loss over steps"
    if bigram is not None and validations:
        gap = bigram - validations[-1]["loss"]
        title = f"Validation ends {abs(gap):.2f} nats per {unit} {'below' if gap >= 0 else 'above'} the bigram model"
    dress(axes, title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss, nats per {unit}")
    axes.grid(axis="y", color=BACKWARD, linewidth=0.8)
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="upper center" if bigram is None else "upper right")
    return save(figure, path)


def _centred_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of the values up to ``reach`` places before and after each one."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
