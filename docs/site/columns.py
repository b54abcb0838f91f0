"""Docstrings whose arguments stand in two columns, ``name   what it is``, as definition lists of Markdown."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

# `name`, `first, second`, `x [T, K]`, `*args`: short, then at least two spaces, then words.
_ROW = re.compile(r"(?P<name>[`*\w(\"][^\n]{0,46}?) {2,}(?P<text>\S.*)")


class Columns(griffe.Extension):
    """Rewrites each docstring on its way to the page."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n".join(_rewritten(obj.docstring.value.split("\n")))


def _rewritten(lines: list[str]) -> Iterator[str]:
    column: int | None = None  # of the texts of the list that is open
    fresh = True  # a paragraph may begin here
    for line in lines:
        depth = len(line) - len(line.lstrip())
        row = _ROW.fullmatch(line) if depth == 0 and (fresh or column is not None) else None
        if row:
            if column is None or column != row.start("text"):
                yield ""
            column = row.start("text")
            name = row["name"] if "`" in row["name"] else f"`{row['name'].strip()}`"
            yield from (name, f":   {row['text']}")
        elif column is not None and line.strip() and depth >= column:
            yield f"    {line.strip()}"
        else:
            if column is not None and line.strip():
                yield ""
            column = None
            yield line
        fresh = not line.strip()
