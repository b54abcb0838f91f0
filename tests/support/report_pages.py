"""Reads the page of `maingrad report` back, as a program would that wants its numbers."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from maingrad.launch.report import drawing

__all__ = ["ReadPage", "leave_pictures_empty"]

VOID = ("meta", "path", "rect", "circle", "use", "br")


class ReadPage(HTMLParser):
    """The numbers and words of a page.

    figures   value by key and run
    buckets   attributes of each bucket's row, in the order of the page
    values    tables of what the curves show: texts by run, column and step
    states    how each run ended, by run
    tables    texts of the cells by id of the table and key of the row; "other" holds whether each cell is marked
    text      all text outside of scripts and styles
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.figures: dict[tuple[str, str], str | None] = {}
        self.buckets: list[dict[str, str]] = []
        self.values: dict[str, dict[str, dict[int, str]]] = {}
        self.charts: list[str] = []
        self.states: dict[str, str] = {}
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.other: dict[tuple[str, str], list[bool]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._inside: list[str] = []
        self._state = self._table = self._row = ""
        self._run, self._columns, self._step, self._at = "", [""], -1, 0
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in VOID:
            self._inside.append(tag)
        if found.get("class") == "values":
            self._run, self._columns = found["data-run"], []
        if tag == "table" and found.get("class") != "values":
            self._run = ""
        if tag == "tr":
            self._step, self._at = int(found.get("data-step", -1)), 0
        if self._run and tag == "td":
            self._at += 1
        if "data-figure" in found:
            self.figures[found["data-figure"], found["data-run"]] = found.get("data-value")
        if "data-bucket" in found:
            self.buckets.append(found)
        if found.get("class", "").startswith("chart "):
            self.charts.append(found["class"].split()[1])
        self._state = found.get("data-state", "") if tag == "span" else self._state
        if tag == "table":
            self._table = found.get("id", "")
        if tag == "tr":
            self._row = found.get("data-key", "")
        if tag == "td" and self._row:
            self.tables.setdefault(self._table, {}).setdefault(self._row, []).append("")
            self.other.setdefault((self._table, self._row), []).append("other" in found.get("class", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._inside.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if self._run and inside == "th" and self._step < 0:
            self._columns.append(data)
            self.values.setdefault(self._run, {})[data] = {}
        if self._run and inside == "td" and self._step >= 0:
            self.values[self._run][self._columns[self._at]][self._step] = data
        if inside != "style":
            self.text += data
        if inside == "span" and self._state:
            self.states[self._state] = data
        if inside == "td" and self._row:
            self.tables[self._table][self._row][-1] += data.strip()

    def value(self, key: str, run: str) -> float:
        """A figure as a number."""
        value = self.figures[key, run]
        assert value is not None, f"{run} has no {key}"
        return float(value)

    def column(self, name: str, run: str) -> dict[int, str]:
        """What a curve shows, by step."""
        return self.values[run][name]


def leave_pictures_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at no picture: Matplotlib takes most of a page's time, and of a short run's."""

    def render(figure: Any, file: Any, form: str, **options: Any) -> None:
        file.write("<svg></svg>" if form == "svg" else b"")

    monkeypatch.setattr(drawing, "_render", render)
