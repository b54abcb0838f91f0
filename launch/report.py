"""Pictures of a run, drawn from its ``metrics.jsonl`` alone.

``loss.png``     training and validation loss, with the bigram model's as the line to beat
``overlap.png``  one step: when each bucket became ready, was launched and finished, against the backward it hides under
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .drawing import BACKWARD, DRAIN, EXPOSED, HIDDEN, INK, QUIET, READY, TRAIN, dress, plt, save
from .metrics import read_metrics

__all__ = ["OverlapShare", "draw_loss", "draw_overlap", "draw_report", "overlap_share"]


class OverlapShare(NamedTuple):
    """Seconds of one step's collectives, and how many of them lay inside a backward."""

    collective_seconds: float
    hidden_seconds: float

    @property
    def fraction(self) -> float:
        """Hidden part, in [0, 1]; 0 where there was no collective time."""
        return self.hidden_seconds / self.collective_seconds if self.collective_seconds else 0.0


def overlap_share(timeline: dict[str, Any], *, leave_out_last: bool = False) -> OverlapShare:
    """How much collective time (launched to finished, summed over buckets) lies under computation.

    Computation is the backwards of ``timeline``, and the delayed weight gradients that follow them.

    timeline        a ``timeline`` record of ``metrics.jsonl``
    leave_out_last  without the last bucket, which becomes ready as the backward ends and has nothing left to hide under
    """
    buckets = timeline["buckets"][:-1] if leave_out_last else timeline["buckets"]
    total = sum(span["finished"] - span["launched"] for span in buckets)
    hidden = sum(
        max(0.0, min(span["finished"], backward["end"]) - max(span["launched"], backward["start"]))
        for span in buckets
        for backward in (*timeline["backwards"], *timeline["phases"])
    )
    return OverlapShare(total, hidden)


def draw_report(out_dir: Path) -> list[Path]:
    """Draw what the records in ``out_dir`` allow; returns the pictures' paths."""
    records = read_metrics(out_dir / "metrics.jsonl")
    paths = []
    if any(record["kind"] == "step" for record in records):
        paths.append(draw_loss(records, out_dir / "loss.png"))
    timelines = [record for record in records if record["kind"] == "timeline" and record["buckets"]]
    if timelines:
        paths.append(draw_overlap(timelines[-1], out_dir / "overlap.png"))
    return paths


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> Path:
    """Loss over steps: every logged training loss, its running mean, the validation losses and the bigram line."""
    steps = [record for record in records if record["kind"] == "step"]
    validations = [record for record in records if record["kind"] == "validation"]
    bigram = next((record["bigram_loss"] for record in records if record["kind"] == "final"), None)
    unit = next((record["unit"] for record in records if record["kind"] == "observed"), "token")

    figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    x, y = [record["step"] for record in steps], [record["loss"] for record in steps]
    axes.plot(x, y, color=TRAIN if len(y) > 200 else HIDDEN, linewidth=1.5, label="training")
    if len(y) > 200:  # short runs and long log intervals are smooth enough as they are
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


def draw_overlap(timeline: dict[str, Any], path: Path) -> Path:
    """One step's buckets over time: above the whole step, below the final microbatch's backward at full width."""
    buckets = timeline["buckets"]
    synced = next((span for span in timeline["backwards"] if span["synced"]), timeline["backwards"][-1])
    lanes = 1.2 + len(buckets)
    figure, (whole, zoom) = plt.subplots(
        2, 1, figsize=(11, 2.6 + 0.4 * lanes), dpi=150, height_ratios=[0.9, 0.4 * lanes], layout="constrained"
    )
    _draw_whole_step(whole, timeline)
    drain = next((span for span in timeline["phases"] if span["start"] >= synced["end"]), None)
    _draw_buckets(zoom, buckets, synced, drain)
    share, but_last = overlap_share(timeline), overlap_share(timeline, leave_out_last=True)
    rest = f", {but_last.fraction:.0%} of all buckets' but the last" if len(buckets) > 1 else ""
    under = "the backward" if drain is None else "computation"
    collective = buckets[0]["collective"].replace("_", "-")
    if collective == "none":
        dress(whole, "One rank: buckets become ready, and there is nothing to reduce")
        collective = "no collective"
    else:
        dress(whole, f"{share.fraction:.0%} of collective time lies under {under}{rest}")
    figure.legend(
        handles=[
            Line2D(
                [], [], color=READY, marker="o", markersize=6, markeredgecolor="white", label="ready, until launched"
            ),
            Patch(color=HIDDEN, label=f"{collective}, under computation"),
            Patch(color=EXPOSED, label=f"{collective}, exposed"),
        ],
        frameon=False,
        loc="outside lower center",
        ncols=3,
    )
    return save(figure, path)


def _draw_whole_step(axes: Axes, timeline: dict[str, Any]) -> None:
    backwards, buckets = timeline["backwards"], timeline["buckets"]
    start = backwards[0]["start"]
    whole = max(span["end"] for span in backwards) - start
    for number, span in enumerate(backwards, 1):
        left, width = span["start"] - start, span["end"] - span["start"]
        axes.barh(1, _ms(width), left=_ms(left), height=0.72, color=QUIET if span["synced"] else BACKWARD)
        # Only where it fits: a microbatch may be a small part of the step.
        kind = "" if width < 0.1 * whole else ", reduced" if span["synced"] else ", no_sync"
        if width > 0.015 * whole:
            ink = "white" if span["synced"] else INK
            axes.text(_ms(left + width / 2), 1, f"{number}{kind}", ha="center", va="center", fontsize=8, color=ink)
    for span in timeline["phases"]:
        axes.barh(1, _ms(span["end"] - span["start"]), left=_ms(span["start"] - start), height=0.72, color=DRAIN)
    for span in buckets:
        width = max(span["finished"] - span["launched"], 0.002 * whole)  # at least a hairline
        axes.barh(0, _ms(width), left=_ms(span["launched"] - start), height=0.5, color=HIDDEN)
    axes.set_yticks([1, 0], ["backwards", "collectives"])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=QUIET)
    axes.set_xlabel(f"ms since the first backward of step {timeline['step']}", fontsize=8, color=QUIET)
    axes.margins(x=0.01)


def _draw_buckets(
    axes: Axes, buckets: Sequence[dict[str, Any]], backward: dict[str, Any], drain: dict[str, Any] | None
) -> None:
    """Buckets over the backward and, where weight gradients were delayed, the drain that follows it."""
    origin, entered = backward["start"], backward["end"] - backward["start"]
    end = entered if drain is None else drain["end"] - origin
    last = max(end, *(span["finished"] - origin for span in buckets))
    axes.axvspan(0, _ms(entered), color=BACKWARD, alpha=0.6, linewidth=0)
    if drain is not None:
        axes.axvspan(_ms(entered), _ms(end), color=DRAIN, alpha=0.6, linewidth=0)
        axes.text(_ms(entered + end) / 2, -0.82, "weight gradients", ha="center", va="center", color=INK)
    axes.axvline(_ms(end), color=QUIET, linewidth=1)
    for row, span in enumerate(buckets):
        ready, launched, finished = (span[key] - origin for key in ("ready", "launched", "finished"))
        boundary = min(max(end, launched), finished)
        hairline = 0.0015 * last if finished - launched < 0.0015 * last else 0.0
        axes.plot([_ms(ready), _ms(launched)], [row, row], color=READY, linewidth=1.5, solid_capstyle="butt", zorder=2)
        if launched < end:
            axes.barh(row, _ms(boundary - launched + hairline), left=_ms(launched), height=0.56, color=HIDDEN, zorder=3)
        if finished > end:
            axes.barh(
                row, _ms(finished - boundary + hairline), left=_ms(boundary), height=0.56, color=EXPOSED, zorder=3
            )
        axes.plot(_ms(ready), row, marker="o", markersize=6, color=READY, markeredgecolor="white", zorder=4)
        axes.annotate(
            f"{_ms(finished - launched):.1f} ms", (_ms(max(finished, ready)), row), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK, zorder=5,
        )  # fmt: skip
    axes.set_ylim(len(buckets) - 0.4, -1.2)
    axes.set_xlim(-0.02 * _ms(last), 1.09 * _ms(last))
    what = "backward of the final microbatch" if drain is None else "backward: input gradients"
    axes.text(_ms(entered) / 2, -0.82, what, ha="center", va="center", color=INK)
    axes.set_yticks(range(len(buckets)), [_bucket_label(span) for span in buckets], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms since that backward began")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bucket_label(span: dict[str, Any]) -> str:
    """``bucket 3 (blocks.1.a .. blocks.1.b)`` and its size, on two lines."""
    name, _, parameters = span["bucket"].partition(" (")
    first, _, last = parameters.rstrip(")").partition(" .. ")
    held = f"{first} .. {last}" if last else first
    return f"{name}, {span['nbytes'] / 2**20:.1f} MiB\n{held.replace('.weight', '')}"


def _centred_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of the values up to ``reach`` places before and after each one."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _ms(seconds: float) -> float:
    return seconds * 1e3
