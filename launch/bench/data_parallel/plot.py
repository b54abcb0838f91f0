"""Bars of step time over the floor: a panel for each setting and number of ranks, a bar for each row, fastest first."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from ...report.drawing import BACKWARD, HIDDEN, INK, QUIET, TRAIN, dress, plt, save
from .fsdp_rows import FSDP
from .measure import Measurement
from .report import Section, sections_of
from .rows import FLOOR, OURS, PEER_FLOOR

__all__ = ["draw_data_parallel"]


def draw_data_parallel(measurements: Sequence[Measurement], path: Path) -> Path:
    """Draw ``measurements`` into ``path``."""
    sections = [section for section in sections_of(measurements) if _bars(section)]
    heights = [0.6 + 0.28 * len(_bars(section)) for section in sections] or [1.0]
    figure, panels = plt.subplots(
        max(1, len(sections)), 1, figsize=(9.5, sum(heights) + 0.6), dpi=120, layout="constrained", squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for panel, section in zip(panels.flat, sections, strict=False):
        _draw_section(panel, section)
    if sections:
        figure.supxlabel(sections[-1].machine, fontsize=8, color=QUIET)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path)


def _bars(section: Section) -> list[Measurement]:
    """One measurement per measured row, slowest first because bars are drawn upwards; each floor appears once."""
    measured = {row.row: row for row in section.rows if not row.problem}
    return sorted(measured.values(), key=lambda row: -_length(section, row))


def _length(section: Section, row: Measurement) -> float:
    return section.floor_ms(row.row) if row.row in (FLOOR, PEER_FLOOR) else row.step_ms


def _draw_section(axes: Axes, section: Section) -> None:
    bars = _bars(section)
    floor = section.floor_ms(FLOOR)
    has_floor = not math.isnan(floor)
    for place, row in enumerate(bars):
        is_floor = row.row in (FLOOR, PEER_FLOOR)
        length = _length(section, row)
        colour = BACKWARD if is_floor else HIDDEN if row.row in OURS or row.row in FSDP else TRAIN
        axes.barh(place, length, 0.78, color=colour)
        ratio = f"  {length / floor:.2f}" if has_floor else ""
        memory = f"  {row.peak_gib:.1f} GiB" if row.peak_gib else ""
        axes.annotate(
            f"{length:.1f} ms{ratio}{memory}", (length, place), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=7, color=INK,
        )  # fmt: skip
    dress(axes, f"{section.setting}, {section.num_ranks} ranks: milliseconds a step, over our floor, peak memory")
    if has_floor:
        axes.axvline(floor, color=INK, linewidth=1.0, linestyle=(0, (5, 4)))
    axes.set_yticks(range(len(bars)), [row.label for row in bars], fontsize=7.5)
    axes.set_xlim(0, max(row.step_ms for row in bars) * 1.28)
