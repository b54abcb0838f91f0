"""What a known fault is: changes of the library's source, and the tests that must notice them.

A change says what takes the place of a snippet, and names the function that the snippet stands in. So it survives that
lines move, and says at once when what it changes is gone.
"""

import ast
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

__all__ = ["KNOWN", "Change", "Fault", "FaultError", "changed_sources", "listed_numbers", "load_faults", "sharded"]

KNOWN = Path(__file__).resolve().parent / "known"


class FaultError(Exception):
    """A fault is not what its library or its tests say; names the fault and what to mend."""


@dataclass(frozen=True)
class Change:
    """``new`` in place of ``old`` in one function."""

    module: str
    """As it is imported: ``maingrad.ddp.contract.main_grad``."""
    function: str
    """``function``, ``Class.method``, ``function.nested``, ``Class`` for a whole class, or "" for the whole module."""
    old: str
    """A part of a line, or lines; it occurs exactly once in the function as it is. Several lines stand at any depth:
    how far they are indented counts only among themselves."""
    new: str
    """Takes its place, at the same depth. Where it is empty, and ``old`` is whole lines, nothing of them is left."""


@dataclass(frozen=True)
class Fault:
    """One way in which the library is wrong again, and who must notice."""

    name: str
    """``03b-second-fused-use-overwrites``: the number in docs/main_grad.md, letters, and words."""
    sentence: str
    tests: Sequence[str]
    """Node ids. One without its parameters covers all of them, of which one must fail."""
    changes: Sequence[Change]
    quick: Sequence[str] = ()
    """Combinations of a matrix that ``make test`` runs on top of its sample, because none of the sample notices."""

    @cached_property
    def number(self) -> int:
        return int(self.name[:2])

    def check(self) -> None:
        if not re.fullmatch(r"\d\d[a-z]*(-\w+)+", self.name):
            raise FaultError(f"{self.name}: a name is two digits, letters and words, as in 03b-second-use-overwrites")
        for what in ("sentence", "tests", "changes"):
            if not getattr(self, what):
                raise FaultError(f"{self.name}: no {what}")
        for what in ("tests", "quick"):
            if isinstance(getattr(self, what), str):
                raise FaultError(f"{self.name}: {what} is a list of node ids")


def sharded(nodeid: str) -> list[str]:
    """A test under each way of sharding, where ``{}`` stands in its name."""
    return [nodeid.format(way) for way in ("zero1", "zero2", "zero3", "hybrid", "hsdp", "hsdp_zero1")]


def load_faults(folder: Path = KNOWN) -> list[Fault]:
    """The faults of all files of ``folder``, in the order of their names."""
    sys.modules.setdefault("fault", sys.modules[__name__])  # which the files import
    faults = [fault for path in sorted(folder.glob("*.py")) for fault in _faults_of(path)]
    for fault in faults:
        fault.check()
    names = [fault.name for fault in faults]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FaultError(f"{twice[0]}: two faults have this name")
    return sorted(faults, key=lambda fault: fault.name)


def _faults_of(path: Path) -> list[Fault]:
    spec = importlib.util.spec_from_file_location(f"known_faults_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    faults: list[Fault] = module.FAULTS
    return faults


def listed_numbers(page: Path) -> set[int]:
    """The numbers of the table of faults at the end of docs/main_grad.md."""
    return {int(number) for number in re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE)}


def changed_sources(fault: Fault, root: Path) -> dict[str, str]:
    """Module -> its source with the fault. ``root`` is the folder of the package that the modules' names begin with."""
    sources = {}
    for module in sorted({change.module for change in fault.changes}):
        try:
            source = module_path(module, root).read_text()
            sources[module] = changed_source(source, [each for each in fault.changes if each.module == module])
            compile(sources[module], module, "exec", dont_inherit=True)
        except (FaultError, SyntaxError) as error:
            raise FaultError(f"{fault.name}: {module}: {error}") from None
    return sources


def module_path(module: str, root: Path) -> Path:
    """The file of a module."""
    inside = root.joinpath(*module.split(".")[1:])
    for path in (inside / "__init__.py", inside.with_name(f"{inside.name}.py")):
        if module != "maingrad" and path.is_file():
            return path
    raise FaultError("no such module")


def changed_source(source: str, changes: Sequence[Change]) -> str:
    """Source of one module with all ``changes``, each of which is looked for in the source as it is."""
    lines = source.split("\n")
    places = sorted((_place(lines, change), index) for index, change in enumerate(changes))
    end_of_next = (len(lines), 0)
    for (start, end), index in reversed(places):
        if end > end_of_next:
            raise FaultError(f"two changes of one place: {changes[index].old!r}")
        end_of_next = start
        _replace(lines, start, end, changes[index].new)
    return "\n".join(lines)


_Position = tuple[int, int]
"""Line and column, both from 0."""


def _place(lines: Sequence[str], change: Change) -> tuple[_Position, _Position]:
    """Where the snippet begins and ends."""
    snippet = _dedented(change.old)
    within = f"'{change.function}'" if change.function else "the module"
    if not snippet.strip():
        raise FaultError(f"a change of {within} has no snippet to look for")
    spans = _spans("\n".join(lines), change.function)
    if not spans:
        raise FaultError(f"there is no {within}")
    found = [place for span in spans for place in _places(lines, span, snippet.split("\n"))]
    if len(found) != 1:
        raise FaultError(f"{within} has the snippet {len(found)} times, not once: {change.old!r}")
    return found[0]


def _places(lines: Sequence[str], span: range, snippet: Sequence[str]) -> Iterator[tuple[_Position, _Position]]:
    first, last = snippet[0], len(snippet) - 1
    for number in span:
        line = lines[number]
        indent = line[: len(line) - len(line.lstrip())]
        column = line.find(first)
        while column >= 0:
            if not last:
                yield (number, column), (number, column + len(first))
            elif column + len(first) == len(line) and number + last in span:
                rest = [indent + each if each else "" for each in snippet[1:]]
                if rest[:-1] == list(lines[number + 1 : number + last]) and lines[number + last].startswith(rest[-1]):
                    yield (number, column), (number + last, len(rest[-1]))
            column = line.find(first, column + 1)


def _replace(lines: list[str], start: _Position, end: _Position, new: str) -> None:
    before, after = lines[start[0]][: start[1]], lines[end[0]][end[1] :]
    if not new and not before.strip() and not after:
        del lines[start[0] : end[0] + 1]
        return
    first = lines[start[0]]
    indent = first[: len(first) - len(first.lstrip())]
    head, *rest = _dedented(new).split("\n")
    replaced = [before + head, *(indent + each if each else "" for each in rest)]
    replaced[-1] += after
    lines[start[0] : end[0] + 1] = replaced


def _dedented(snippet: str) -> str:
    """Without the line breaks around it and the indentation that all its lines have."""
    return textwrap.dedent(snippet.rstrip().strip("\n") if "\n" in snippet else snippet)


def _spans(source: str, function: str) -> list[range]:
    """Lines of what has this name: of a property, those of its setter as well."""
    if not function:
        return [range(source.count("\n") + 1)]
    nodes: list[ast.AST] = [_parsed(source)]
    for name in function.split("."):
        nodes = [each for node in nodes for each in _defined_in(node) if each.name == name]
    spans = []
    for node in nodes:
        assert isinstance(node, _Definition) and node.end_lineno is not None
        first = min(each.lineno for each in (node, *node.decorator_list))
        spans.append(range(first - 1, node.end_lineno))
    return spans


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


_parsed = lru_cache(ast.parse)


def _defined_in(node: ast.AST) -> Iterator[_Definition]:
    """Functions and classes of a body, also those under its ``if`` or ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        else:
            yield from _defined_in(child)
