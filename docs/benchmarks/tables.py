"""Measurements as CSV, and as the tables of a page in Markdown."""

import csv
import math
import statistics

from maingrad.launch.report.table import grouped, machine, markdown_table
from maingrad.launch.training.watching.replacing import replacing

__all__ = [
    "Measurement",
    "grouped",
    "machine",
    "number",
    "odd_losses",
    "read_csv",
    "table",
    "with_kept",
    "write_csv",
    "write_table",
]


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


def write_table(folder, stem, rows, title, *parts):
    """Write ``stem.csv``, all columns of ``rows``, and ``stem.md``, the title and ``parts``. Returns the Markdown."""
    text = "\n\n".join([f"# {title}", *parts]) + "\n"
    write_csv(folder / f"{stem}.csv", rows)
    with replacing(folder / f"{stem}.md") as file:
        file.write(text)
    return text


def table(rows, columns):
    """Markdown of a table. A column is its heading and a text with fields like {row.step_ms:.1f}, or a function."""
    return "\n".join(markdown_table(rows, columns))


def number(value, form, unknown=""):
    """``value`` in ``form``; ``unknown`` for NaN."""
    return unknown if math.isnan(value) else format(value, form)


def write_csv(path, rows):
    """Write all columns of ``rows``; NaN where a row has a problem instead."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows({name: row.get(name, row.problem and math.nan) for name in columns} for row in rows)


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


def with_kept(path, rows, section_of):
    """``rows`` behind those of other sections that the CSV at ``path`` has."""
    mine = set(map(section_of, rows))
    return [*(row for row in read_csv(path) if section_of(row) not in mine), *rows]


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
