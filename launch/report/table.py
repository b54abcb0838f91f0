"""Tables of measurements: the rows as CSV, and as Markdown with the machine and the setting."""

import csv
import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..training.watching.replacing import replacing

__all__ = ["Column", "grouped", "machine", "markdown_table", "write_csv", "write_table"]

Row = TypeVar("Row")
Key = TypeVar("Key")
Column = tuple[str, str | Callable[[Any], str]]
"""Heading of a column, and the cell of one row: a text with fields like ``{row.step_ms:.1f}``, or a function."""


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


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows by what ``key`` makes of them, in the order in which each key comes first."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def markdown_table(rows: Sequence[Any], columns: Sequence[Column]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        f"| {' | '.join(heading for heading, _ in columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_text(cell, row) for _, cell in columns)} |" for row in rows),
    ]


def _text(cell: str | Callable[[Any], str], row: Any) -> str:
    return cell.format(row=row) if isinstance(cell, str) else cell(row)


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
