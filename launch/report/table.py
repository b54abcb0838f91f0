"""Tables of measurements: the rows as CSV, and as Markdown with the machine and the setting."""

import csv
import dataclasses
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.replacing import replacing

__all__ = ["machine", "markdown_table", "write_csv", "write_table"]


def machine() -> str:
    """Device, versions and date, for the line below a table's title."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def write_csv(path: Path, rows: Iterable[Any]) -> None:
    """Write all fields of ``rows``, which are dataclasses, or dicts by column; NaN for a field that a row lacks."""
    lines = [row if isinstance(row, dict) else dataclasses.asdict(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, newline="") as file:
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(file, names, restval="nan", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts."""
    head, *body = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join([head, f"|{'---|' * len(headings)}", *body])


def write_table(folder: Path, stem: str, rows: Sequence[Any], title: str, *parts: str) -> str:
    """Write ``stem.csv``, all fields of ``rows``, and ``stem.md``, the title and ``parts``; returns the Markdown."""
    write_csv(folder / f"{stem}.csv", rows)
    text = "\n\n".join([f"# {title}", *parts]) + "\n"
    with replacing(folder / f"{stem}.md") as file:
        file.write(text)
    return text
