"""Tables of ``bench data-parallel``: a CSV, and Markdown with a section for each setting and number of ranks."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...report.table import Column, grouped, markdown_table
from .measure import Measurement
from .model import SETTINGS
from .rows import FLOOR, PEER_FLOOR
from .sections import with_kept, write_sections

__all__ = ["Section", "sections_of", "write_data_parallel_report"]

_FIRST_LOSS_TOLERANCE = 0.01
"""Relative to the first loss. All rows start from the same weights, but only some rows round them to bf16."""
_LAST_LOSS_TOLERANCE = 0.2
"""Relative to the fall of the loss, because rounding differences grow over the steps."""
_LEARNS = 0.1
"""Relative to the largest fall of the loss: a row whose loss falls by less has learned nothing."""


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one setting on one number of ranks."""

    setting: str
    num_ranks: int
    rows: tuple[Measurement, ...]

    @property
    def machine(self) -> str:
        """Device, versions and date."""
        return self.rows[0].machine

    def floor_ms(self, name: str) -> float:
        """Mean step time of the floor's measurements; NaN if the floor was not measured."""
        times = self._times(name)
        return statistics.mean(times) if times else math.nan

    def drift(self, name: str) -> float:
        """The floor's last step time over its first, minus 1; NaN unless the floor was measured twice."""
        times = self._times(name)
        return times[-1] / times[0] - 1 if len(times) > 1 else math.nan

    def over(self, name: str, row: Measurement) -> float:
        """Step time of ``row`` divided by the step time of floor ``name``."""
        return row.step_ms / self.floor_ms(name)

    def over_slowest(self, name: str, row: Measurement) -> float:
        """The same ratio of both slowest ranks' times: ranks that communicate all take as long as the slowest rank."""
        alone = [floor.slowest_rank_ms for floor in self.rows if floor.row == name and not floor.problem]
        return row.slowest_rank_ms / statistics.mean(alone) if alone else math.nan

    def odd_losses(self) -> list[Measurement]:
        """Rows whose loss differs from the other rows': they do not do the same work."""
        measured = [row for row in self.rows if not row.problem]
        trained = [row for row in measured if row.trains]
        if not measured:
            return []
        first = statistics.median(row.first_loss for row in measured)
        odd = [row for row in measured if not abs(row.first_loss - first) <= _FIRST_LOSS_TOLERANCE * abs(first)]
        if trained:
            # Rows that learn nothing are odd, even if they are the majority: they do not count for the expected loss.
            falls = [row.first_loss - row.last_loss for row in trained]
            largest = max((fall for fall in falls if not math.isnan(fall)), default=0.0)
            learning = [
                row for row, fall in zip(trained, falls, strict=True) if fall >= _LEARNS * largest and largest > 0
            ]
            last = statistics.median(row.last_loss for row in learning or trained)
            allowed = _LAST_LOSS_TOLERANCE * abs(first - last)
            odd += [row for row in trained if row not in odd and not abs(row.last_loss - last) <= allowed]
        return odd

    def _times(self, name: str) -> list[float]:
        return [row.step_ms for row in self.rows if row.row == name and not row.problem]


def sections_of(measurements: Sequence[Measurement]) -> list[Section]:
    """The measurements by section, in the order of the settings, fewer ranks first."""
    groups = grouped(measurements, lambda row: (row.setting, row.num_ranks))
    order = list(SETTINGS)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    return [Section(setting, num_ranks, tuple(groups[setting, num_ranks])) for setting, num_ranks in keys]


def write_data_parallel_report(measurements: Sequence[Measurement], folder: Path, stem: str = "data_parallel") -> str:
    """Write ``stem.csv`` and ``stem.md`` into ``folder``; returns the Markdown.

    Sections of other settings or other numbers of ranks that the CSV already has are kept.
    """
    rows = with_kept(folder / f"{stem}.csv", measurements, Measurement, lambda row: (row.setting, row.num_ranks))
    return write_sections(
        folder,
        stem,
        rows,
        title="Data parallelism: ours and others on the same work",
        head="Made by `torchrun --nproc-per-node N -m maingrad bench data-parallel`; what the columns mean is said "
        "[here](README.md#data-parallelism-what-is-measured).",
        sections=map(_section_lines, sections_of(rows)),
    )


def _section_lines(section: Section) -> list[str]:
    setting = SETTINGS[section.setting]
    columns: list[Column] = [
        ("", "{row.label}"),
        ("ms", lambda row: _number(row.step_ms, ".1f")),
        ("over our floor", lambda row: _number(section.over(FLOOR, row), ".3f")),
        ("over the slowest GPU's", lambda row: _number(section.over_slowest(FLOOR, row), ".3f")),
        ("over the peers' floor", lambda row: _number(section.over(PEER_FLOOR, row), ".3f")),
        ("peak GiB", lambda row: _number(row.peak_gib, ".1f")),
        ("thousand tokens/s", lambda row: _number(row.tokens_per_second / 1e3, ".1f")),
        ("loss", lambda row: row.problem or f"{row.first_loss:.3f} to {row.last_loss:.3f}"),
    ]
    drifts = [
        f"{whose} floor {section.drift(name):+.1%}"
        for whose, name in (("our", FLOOR), ("the peers'", PEER_FLOOR))
        if not math.isnan(section.drift(name))
    ]
    odd = section.odd_losses()
    return [
        f"## {section.setting}, {section.num_ranks} ranks",
        "",
        f"{section.num_ranks} x {section.machine}. {setting.describe()}. Drift of the machine from the first rows to "
        f"the last: {', '.join(drifts) or 'not measured'}.",
        "",
        *markdown_table(section.rows, columns),
        "",
        *([f"**Losses differ from the others'**: {', '.join(row.label for row in odd)}.", ""] if odd else []),
    ]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
