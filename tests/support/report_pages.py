"""Reads the page of `maingrad report` back, as a program would that wants its numbers."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

__all__ = ["ReadPage"]


class ReadPage(HTMLParser):
    """The numbers and words of a page.

    figures   value by key and run
    buckets   attributes of each bucket's row, in the order of the page
    charts    what the pointer reads, by key
    states    how each run ended, by run
    tables    texts of the cells by id of the table and key of the row; "other" holds whether each cell is marked
    text      all text outside of scripts and styles
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.figures: dict[tuple[str, str], str | None] = {}
        self.buckets: list[dict[str, str]] = []
        self.charts: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.other: dict[tuple[str, str], list[bool]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._inside: list[str] = []
        self._chart = self._state = self._table = self._row = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in ("meta", "path", "rect", "circle"):
            self._inside.append(tag)
        if "data-figure" in found:
            self.figures[found["data-figure"], found["data-run"]] = found.get("data-value")
        if "data-bucket" in found:
            self.buckets.append(found)
        self._chart = found.get("data-chart", self._chart)
        self._state = found.get("data-state", "") if tag == "span" else self._state
        if tag == "table":
            self._table = found.get("id", "")
        if tag == "tr":
            self._row = found.get("data-key", "")
        if tag == "td" and self._row:
            self.tables.setdefault(self._table, {}).setdefault(self._row, []).append("")
            self.other.setdefault((self._table, self._row), []).append("other" in found.get("class", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect", "circle"):
            assert self._inside.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "script":
            if data.lstrip().startswith("{"):
                self.charts[self._chart] = json.loads(data)
        elif inside != "style":
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

    def curve(self, chart: str, label: str) -> list[tuple[int, float | None]]:
        """Points of a curve."""
        (points,) = (one["points"] for one in self.charts[chart]["series"] if one["label"] == label)
        return [(step, value) for step, value in points]
