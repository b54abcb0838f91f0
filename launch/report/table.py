"""Tables of measurements as CSV."""

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..data.replacing import replacing

__all__ = ["write_csv"]


def write_csv(path: Path, rows: Iterable[Any]) -> None:
    """Write all fields of ``rows``, which are dataclasses, or dicts by column; NaN for a field that a row lacks."""
    lines = [row if isinstance(row, dict) else dataclasses.asdict(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, newline="") as file:
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(file, names, restval="nan", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
