"""Tables of measurements: the rows as CSV, and as Markdown with the machine and the setting."""

import csv
import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..training.watching.replacing import replacing

__all__ = ["Column", "machine", "markdown_table", "write_csv", "write_table"]

Column = tuple[str, Callable[[Any], str]]
"""Heading of a column, and a function that formats the cell of one row."""


def machine() -> str:
    """Device, versions and date, for the line below a table's title."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def write_csv(folder: Path, stem: str, rows: Sequence[Any]) -> None:
    """Write ``stem.csv``: every field of ``rows``, dataclasses of one class."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{stem}.csv", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def markdown_table(rows: Sequence[Any], columns: Sequence[Column]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        f"| {' | '.join(heading for heading, _ in columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cell(row) for _, cell in columns)} |" for row in rows),
    ]


def write_table(
    folder: Path,
    stem: str,
    rows: Sequence[Any],
    *,
    title: str,
    setting: str,
    columns: Sequence[Column],
    notes: str = "",
) -> str:
    """Write ``stem.csv``, every field of ``rows`` (dataclasses of one class), and ``stem.md``; returns the Markdown.

    setting  what was measured and how, a paragraph
    columns  of the Markdown table
    notes    Markdown below it
    """
    write_csv(folder, stem, rows)
    lines = [
        f"# {title}",
        "",
        setting,
        "",
        *markdown_table(rows, columns),
        "",
        *([notes, ""] if notes else []),
    ]
    table = "\n".join(lines)
    with replacing(folder / f"{stem}.md") as file:
        file.write(table)
    return table
