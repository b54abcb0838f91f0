"""Measurements as CSV, and as the tables of a page in Markdown."""

import csv
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from maingrad.launch.report.table import write_csv

__all__ = [
    "Column",
    "Measurement",
    "grouped",
    "machine",
    "number",
    "odd_losses",
    "read_csv",
    "shown",
    "table",
    "write_csv",
    "write_sections",
    "write_table",
]


Column = tuple[str, str | Callable[[Any], str]]
"""Heading of a column, and the cell of one row: a text with fields like ``{row.step_ms:.1f}``, or a function."""


def machine():
    """Device, versions and date, for the line below a table's title."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def table(rows, columns):
    """A Markdown table."""
    cells = [[cell.format(row=row) if isinstance(cell, str) else cell(row) for _, cell in columns] for row in rows]
    head, *body = (f"| {' | '.join(line)} |" for line in ([heading for heading, _ in columns], *cells))
    return "\n".join([head, f"|{'---|' * len(columns)}", *body])


def write_table(folder, stem, rows, title, *parts):
    """Write ``stem.csv``, all fields of ``rows``, and ``stem.md``, the title and ``parts``; returns the Markdown."""
    write_csv(folder / f"{stem}.csv", rows)
    text = "\n\n".join([f"# {title}", *parts]) + "\n"
    (folder / f"{stem}.md").write_text(text)
    return text


class Measurement(dict):
    """A line of a table: the columns of its CSV by name, as attributes too.

    Numbers of a row with a ``problem``, which says why it could not be measured, are NaN.
    """

    def __getattr__(self, name):
        if name in self:
            return self[name]
        if name == "problem":
            return ""
        if self.problem:
            return math.nan
        raise AttributeError(f"{name} is none of {', '.join(self)}")


def number(value, form, unknown=""):
    """``value`` in ``form``; ``unknown`` for NaN."""
    return unknown if math.isnan(value) else format(value, form)


def shown(name, form, unknown="", scale=1.0):
    """The cell of a number: the row's field ``name`` times ``scale``."""
    return lambda row: number(row[name] * scale if not row.problem else math.nan, form, unknown)


def write_sections(rows, folder, stem, *, title, script, anchor, key, sections_of, parts_of):
    """Write ``stem.csv`` and ``stem.md``, with the sections that the CSV already has; returns the Markdown.

    anchor       where README.md says what is measured
    key          tells the section of a row; sections_of the rows' sections in order; parts_of a section's paragraphs
    """
    mine = set(map(key, rows))
    rows = [*(row for row in read_csv(folder / f"{stem}.csv") if key(row) not in mine), *rows]
    about = (
        f"Made by `torchrun --nproc-per-node N docs/benchmarks/{script}.py`; what the columns mean is said "
        f"[here](README.md#{anchor}-what-is-measured)."
    )
    return write_table(
        folder, stem, rows, title, about, *(part for each in sections_of(rows) for part in parts_of(each))
    )


def grouped(rows, key):
    """The rows by what ``key`` makes of them, in the order in which each key comes first."""
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def read_csv(path):
    """The rows of ``write_csv``. An empty list if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Measurement({name: _value(text) for name, text in row.items()}) for row in csv.DictReader(file)]


def _value(text):
    for parse in (int, float, {"True": True, "False": False}.__getitem__):
        try:
            return parse(text)
        except (ValueError, KeyError):
            continue
    return text


# ---- Do all rows the same work? ----

_FIRST_LOSS_TOLERANCE = 0.01
"""Relative to the first loss. All rows start from the same weights, but only some rows round them to bf16."""
_LAST_LOSS_TOLERANCE = 0.2
"""Relative to the fall of the loss, because rounding differences grow over the steps."""
_LEARNS = 0.1
"""Relative to the largest fall of the loss: a row whose loss falls by less has learned nothing."""


def odd_losses(rows):
    """Rows whose loss differs from the other rows': they do not do the same work."""
    measured = [row for row in rows if not row.problem]
    trained = [row for row in measured if row.get("trains", True)]
    if not measured:
        return []
    first = statistics.median(row.first_loss for row in measured)
    odd = [row for row in measured if not abs(row.first_loss - first) <= _FIRST_LOSS_TOLERANCE * abs(first)]
    if trained:
        # Rows that learn nothing are odd, even if they are the majority: they do not count for the expected loss.
        falls = [row.first_loss - row.last_loss for row in trained]
        largest = max((fall for fall in falls if not math.isnan(fall)), default=0.0)
        learning = [row for row, fall in zip(trained, falls, strict=True) if fall >= _LEARNS * largest > 0]
        last = statistics.median(row.last_loss for row in learning or trained)
        allowed = _LAST_LOSS_TOLERANCE * abs(first - last)
        odd += [row for row in trained if row not in odd and not abs(row.last_loss - last) <= allowed]
    return odd
