"""The report of ``maingrad bench kernels``: a table for each operation, with a line for each shape."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from ...report.table import Column, grouped, machine, markdown_table, write_csv
from .measure import KernelRow, KernelTable
from .plot import draw_kernels
from .problems import triton_version
from .rivals import DOES_LESS, OURS, POINTERS

__all__ = ["write_kernel_report"]

_NOTES = f"""\
Columns of contenders are times over the roofline, which is the larger of the floating-point operations over the first
ceiling and the bytes over the second, operands read once and results written once; what is accumulated into counts
twice. Time over the fastest rival is ours over the least of the others: below 1, ours is faster.

- `{POINTERS}`: the same kernels without the tensor memory accelerator, as GPUs before sm90 run them.
- Loops over experts are given the split sizes on the host for nothing.
- `{DOES_LESS}` writes half the bytes, rounded: it is shown, and is no rival.
- Of `scaled_glu` and its backward N is both halves; of permutations K is the width, and T the rows, 8 a token."""


def write_kernel_report(table: KernelTable, folder: Path) -> str:
    """Write ``kernels.csv``, ``kernels.md`` and ``kernels.png`` into ``folder``; returns the Markdown."""
    ceilings = table.ceilings
    lines = [
        "# Kernels against their rooflines and rivals",
        "",
        f"{machine()}, Triton {triton_version()}. Ceilings measured in the same run: {ceilings.tflops:.3g} TFLOP/s "
        f"(bf16 product of {ceilings.product_size}^3), {ceilings.gb_per_s:.4g} GB/s (device copy, read and written). "
        f"E experts, T rows of all of them (uneven splits from a seed), N output and K input features, bf16 operands; "
        f"weight gradients into fp32. Medians of single runs from a cold L2, over rounds in which all contenders take "
        f"turns. Every contender was compared with fp64 before it was timed. Made by `maingrad bench kernels`.",
        "",
        "![Time over roofline](kernels.png)",
        "",
        *_summary(table.rows),
        "",
        _NOTES,
    ]
    for op, rows in grouped(table.rows, lambda row: row.op).items():
        lines += ["", f"## {op}", "", *_table_of(rows)]
    if table.left_out:
        lines += ["", "## Left out", "", *(f"- {line}" for line in table.left_out)]
    text = "\n".join([*lines, ""])
    write_csv(folder, "kernels", table.rows)
    (folder / "kernels.md").write_text(text)
    draw_kernels(table.rows, folder / "kernels.png", machine())
    return text


def over_fastest_rival(rows: Sequence[KernelRow]) -> float | None:
    """Our time divided by the fastest rival's, for one operation at one shape; None where either has no row."""
    ours = [row.ms for row in rows if row.contender == OURS]
    rivals = [row.ms for row in rows if row.contender not in (OURS, POINTERS, DOES_LESS)]
    return ours[0] / min(rivals) if ours and rivals else None


def _summary(rows: Sequence[KernelRow]) -> list[str]:
    columns: list[Column] = [
        ("", lambda rows: rows[0].op),
        ("ours over roofline, median", lambda rows: _number(_middle(_ours(rows)))),
        ("worst", lambda rows: _number(max(_ours(rows), default=None))),
        ("ours over the fastest rival, median", lambda rows: _number(_middle(_against(rows)))),
        ("best", lambda rows: _number(min(_against(rows), default=None))),
        ("worst", lambda rows: _number(max(_against(rows), default=None))),
    ]
    return markdown_table(list(grouped(rows, lambda row: row.op).values()), columns)


def _ours(rows: Sequence[KernelRow]) -> list[float]:
    return [row.over_roofline for row in rows if row.contender == OURS]


def _against(rows: Sequence[KernelRow]) -> list[float]:
    return [
        ratio
        for each in grouped(rows, lambda row: row.shape).values()
        if (ratio := over_fastest_rival(each)) is not None
    ]


def _table_of(rows: Sequence[KernelRow]) -> list[str]:
    def of(contender: str) -> Column:
        return (
            f"**{contender}**" if contender == OURS else contender,
            lambda rows: _number(next((row.over_roofline for row in rows if row.contender == contender), None)),
        )

    columns: list[Column] = [
        ("E, T, N, K", lambda rows: ", ".join(map(str, rows[0].shape))),
        ("roofline, ms", lambda rows: f"{rows[0].roofline_ms:.3f}"),
        ("bound by", lambda rows: rows[0].bound),
        ("ours, ms", lambda rows: next((f"{row.ms:.3f}" for row in rows if row.contender == OURS), "")),
        *(of(contender) for contender in dict.fromkeys(row.contender for row in rows)),
        ("ours over the fastest rival", lambda rows: _number(over_fastest_rival(rows))),
    ]
    return markdown_table(list(grouped(rows, lambda row: row.shape).values()), columns)


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
