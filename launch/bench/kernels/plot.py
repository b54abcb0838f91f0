"""Bars of time over roofline: a panel for each operation, a group for each shape, a bar for each contender."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from ...report.drawing import BACKWARD, DRAIN, EXPOSED, HIDDEN, INK, QUIET, READY, TRAIN, dress, plt, save
from ...report.table import grouped
from .rivals import OURS, POINTERS

if TYPE_CHECKING:  # bench_kernels imports this file where it draws
    from .measure import KernelRow

__all__ = ["draw_kernels"]

_RIVALS = (EXPOSED, QUIET, READY, DRAIN)
_CLIPPED = 5.0
"""Longer bars end here, with their value on top: a rival at 15 would leave the other bars too short to compare."""


def draw_kernels(rows: Sequence["KernelRow"], path: Path, machine: str) -> Path:
    """Draw ``rows`` into ``path``, with ``machine`` below the panels."""
    ops = grouped(rows, lambda row: row.op)
    columns = 1 if len(ops) == 1 else 2
    height = math.ceil(len(ops) / columns)
    figure, panels = plt.subplots(
        height, columns, figsize=(8.5 * columns, 3.6 * height + 0.4), dpi=120, layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(ops) :]:
        panel.set_visible(False)
    for panel, (op, its_rows) in zip(panels.flat, ops.items(), strict=False):
        _draw_op(panel, op, its_rows)
    figure.supxlabel(f"{machine}; experts x rows x N x K", fontsize=8, color=QUIET)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path)


def _draw_op(axes: Axes, op: str, rows: Sequence["KernelRow"]) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    contenders = grouped(rows, lambda row: row.contender)
    rivals = [name for name in contenders if name not in (OURS, POINTERS)]
    colours = {OURS: HIDDEN, POINTERS: TRAIN} | {name: _RIVALS[i % len(_RIVALS)] for i, name in enumerate(rivals)}
    width = 0.8 / len(contenders)
    for place, (name, mine) in enumerate(contenders.items()):
        at = [shapes.index(row.shape) + (place - (len(contenders) - 1) / 2) * width for row in mine]
        ratios = [row.over_roofline for row in mine]
        axes.bar(at, [min(ratio, _CLIPPED) for ratio in ratios], width * 0.92, color=colours[name], label=name)
        for x, ratio in zip(at, ratios, strict=True):
            axes.annotate(
                f"{ratio:.2f}", (x, min(ratio, _CLIPPED)), xytext=(0, 2), textcoords="offset points", ha="center",
                fontsize=6.5, color=INK, rotation=90 if len(shapes) * len(contenders) > 16 else 0,
            )  # fmt: skip
    dress(axes, f"{op}: time over roofline")
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle=(0, (5, 4)))
    axes.set_ylim(0, min(_CLIPPED, max(row.over_roofline for row in rows)) * 1.25)
    axes.set_xticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes], fontsize=7)
    if len(shapes) > 4:
        plt.setp(axes.get_xticklabels(), rotation=20, ha="right", rotation_mode="anchor")
    axes.grid(axis="y", color=BACKWARD, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, ncols=len(contenders), loc="upper left", bbox_to_anchor=(0, 1.02))
