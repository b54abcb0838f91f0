"""Programs of a page of documentation, for one way to train at a time.

The page marks lines that not all ways have by a comment at their end, ``# DDP, ZeRO-1``, with a reason behind a colon
or without. What is not of the way goes. The block of a ``with`` line that goes loses its indentation; that of any other
goes as well.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["WAYS", "Program", "lines_of", "programs_of"]

WAYS = ("plain", "DDP", "ZeRO-1", "fsdp")

_WAY = "|".join(map(re.escape, WAYS))
_MARK = re.compile(rf"  # ((?:{_WAY})(?:, (?:{_WAY}))*)(?::.*)?$")
_HEAD = re.compile(rf"# (Refused|Not) under ((?:{_WAY})(?:, (?:{_WAY}))*): (.*)\n")


class Program(NamedTuple):
    """One block of code."""

    section: str
    """Its heading."""
    number: int
    """In its section."""
    code: str
    ways: tuple[str, ...]
    """Those that it trains under."""
    refused_under: tuple[str, ...]
    """Those that it is refused under; empty for a program that trains."""
    message: str
    """What the error has."""

    def __str__(self) -> str:
        return f"{self.section} {self.number}"


def programs_of(page: Path) -> Iterator[Program]:
    """Every block of Python of the page, in order."""
    for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        section = part.partition("\n")[0]
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)):
            head = _HEAD.match(code)
            named = tuple(head[2].split(", ")) if head else ()
            if head and head[1] == "Refused":
                yield Program(section, number, code, (), named, head[3])
            else:
                yield Program(section, number, code, tuple(way for way in WAYS if way not in named), (), "")


def lines_of(code: str, way: str) -> str:
    """What of ``code`` is for ``way``, as whoever pastes it would leave it."""
    return "\n".join(_kept(code.splitlines(), way)) + "\n"


def _kept(lines: Iterable[str], way: str) -> Iterator[str]:
    opened: list[int] = []  # indentations of ``with`` lines that went, whose blocks stay
    gone: int | None = None  # indentation of another line that went with its block
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip():
            opened = [indentation for indentation in opened if indentation < depth]
            gone = gone if gone is not None and depth > gone else None
        if gone is not None:
            continue
        mark = _MARK.search(line)
        if mark is None or way in mark[1].split(", "):
            yield line[4 * len(opened) :]
        elif line.lstrip().startswith("with "):
            opened.append(depth)
        elif line[: mark.start()].endswith(":"):
            gone = depth
