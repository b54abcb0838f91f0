"""Tables whose sections are measured one after the other: a CSV, and Markdown with a part for each section."""

import csv
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ...report.table import write_csv

__all__ = ["read_rows", "with_kept", "write_sections"]

Row = TypeVar("Row")
_PARSERS: dict[Any, Callable[[str], Any]] = {str: str, int: int, float: float, bool: lambda text: text == "True"}


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read a CSV of ``write_sections``: rows of the dataclass ``kind``. An empty list if the file does not exist."""
    if not path.exists():
        return []
    known: Any = fields(kind)  # type: ignore[arg-type]
    with path.open(newline="") as file:
        return [
            kind(**{field.name: _PARSERS[field.type](row[field.name]) for field in known})
            for row in csv.DictReader(file)
        ]


def with_kept(path: Path, rows: Sequence[Row], kind: type[Row], section_of: Callable[[Row], Hashable]) -> list[Row]:
    """``rows`` behind those of other sections that the CSV at ``path`` has."""
    mine = set(map(section_of, rows))
    return [*(row for row in read_rows(path, kind) if section_of(row) not in mine), *rows]


def write_sections(
    folder: Path, stem: str, rows: Sequence[Any], *, title: str, head: str, sections: Iterable[list[str]]
) -> str:
    """Write ``stem.csv`` and ``stem.md`` into ``folder``; returns the Markdown."""
    write_csv(folder, stem, rows)
    table = "\n".join([f"# {title}", "", head, "", *(line for section in sections for line in section)])
    (folder / f"{stem}.md").write_text(table)
    return table
