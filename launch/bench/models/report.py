"""Tables of ``bench models``: a CSV, and Markdown with a section for each model, shape and number of ranks."""

import math
from collections.abc import Sequence
from pathlib import Path

from ...report.table import Column, grouped, markdown_table
from ..data_parallel.sections import with_kept, write_sections
from .architectures import Shape, architecture_named
from .measure import Measurement

__all__ = ["odd_losses", "sections_of", "write_models_report"]

_FIRST_LOSS_TOLERANCE = 0.01
"""Relative. All rows start from the same weights, but only some rows round them to bf16."""
_LAST_LOSS_TOLERANCE = 0.2
"""Relative to the fall of the loss, because rounding differences grow over the steps."""


def write_models_report(measurements: Sequence[Measurement], folder: Path, stem: str = "models") -> str:
    """Write ``stem.csv`` and ``stem.md`` into ``folder``; returns the Markdown.

    Sections that the CSV already has for other models, shapes, microbatches or numbers of ranks are kept.
    """
    rows = with_kept(folder / f"{stem}.csv", measurements, Measurement, _section)
    return write_sections(
        folder,
        stem,
        rows,
        title="Models of Hugging Face: ours and FSDP2",
        head="Made by `torchrun --nproc-per-node N -m maingrad bench models`; what the columns mean is said "
        "[here](README.md#models-of-hugging-face-what-is-measured).",
        sections=map(_section_lines, sections_of(rows)),
    )


def sections_of(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """The measurements by model, shape, microbatches and number of ranks, in the order in which these come first."""
    return list(grouped(measurements, _section).values())


def odd_losses(section: Sequence[Measurement]) -> list[Measurement]:
    """Rows of one section whose loss differs from the first measured row's: they do not do the same work."""
    measured = [row for row in section if not row.problem]
    if not measured:
        return []
    first = measured[0]
    fall = abs(first.first_loss - first.last_loss)
    return [
        row
        for row in measured
        if not abs(row.first_loss - first.first_loss) <= _FIRST_LOSS_TOLERANCE * abs(first.first_loss)
        or not abs(row.last_loss - first.last_loss) <= _LAST_LOSS_TOLERANCE * fall
    ]


def _section(row: Measurement) -> tuple[str, str, int, int]:
    return row.model, row.shape, row.num_microbatches, row.num_ranks


def _section_lines(section: Sequence[Measurement]) -> list[str]:
    some = section[0]
    architecture, shape = architecture_named(some.model), Shape.parse(some.shape)
    total, _ = architecture.count()
    flops = architecture.flops_per_token(shape.length)
    peak = next((row.peak_tflops for row in section if not math.isnan(row.peak_tflops)), math.nan)
    mfu = "" if math.isnan(peak) else f" MFU is over {peak:g} TFLOP/s a GPU."
    backends = sorted({row.backend for row in section if row.backend})
    compiled = f" Compiled rows: every decoder layer whole, by {' and '.join(backends)}." if backends else ""
    columns: list[Column] = [
        ("", "{row.label}"),
        ("ms", lambda row: _number(row.step_ms, ".1f")),
        ("spread", lambda row: _number(row.spread_ms, ".1f")),
        ("thousand tokens/s a GPU", lambda row: _number(row.tokens_per_second / 1e3, ".1f")),
        ("MFU", lambda row: _number(row.mfu, ".1%")),
        ("peak GiB", lambda row: _number(row.peak_gib, ".1f")),
        ("first step, s", lambda row: _number(row.first_step_s, ".1f")),
        ("graphs", lambda row: str(row.num_graphs) if row.backend and not row.problem else ""),
        ("loss", lambda row: row.problem or f"{row.first_loss:.3f} to {row.last_loss:.3f}"),
    ]
    options = grouped((row for row in section if not row.problem), lambda row: row.options)
    microbatches = "1 microbatch" if some.num_microbatches == 1 else f"{some.num_microbatches} microbatches"
    odd = odd_losses(section)
    return [
        f"## {some.model}, {some.shape}, {some.num_ranks} {'rank' if some.num_ranks == 1 else 'ranks'}",
        "",
        f"{some.num_ranks} x {some.machine}. {architecture.about}: {total / 1e9:.2f} B parameters, {flops / 1e9:.2f} "
        f"GFLOP a token. A step has {microbatches} of {shape.batch} x {shape.length:,} tokens on each GPU."
        f"{mfu}{compiled}",
        "",
        *markdown_table(section, columns),
        "",
        *(f"- {'; '.join(row.label for row in rows)}: {text}." for text, rows in options.items()),
        "",
        *([f"The loss differs from the first row's in: {', '.join(row.label for row in odd)}.", ""] if odd else []),
    ]


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
