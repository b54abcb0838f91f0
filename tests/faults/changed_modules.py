"""Imports modules with a fault: the harness adds this file to its copy of the library, whose root imports it first.

The folder that ``MAINGRAD_FAULT`` names holds a file ``maingrad.ddp.contract.main_grad.py`` for each changed module. So
every process that imports the library runs the changed source: ranks, spawned or forked, and programs of tests alike.
A module keeps its name, its ``__file__`` and what lies beside it; ``inspect``, Triton, ``torch.compile`` and
tracebacks find the changed lines.
"""

import linecache
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

VARIABLE = "MAINGRAD_FAULT"


class ChangedSource(SourceFileLoader):
    """Loads a module from a source that is not in its file."""

    def __init__(self, name: str, path: str, changed: Path) -> None:
        super().__init__(name, path)
        self.changed = changed

    def get_source(self, fullname: str) -> str:
        return self.changed.read_text()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        # An entry without a time is not compared with the file.
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)
        return compile(source, self.path, "exec", dont_inherit=True)


class ChangedModules:
    """A finder that goes before all others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        folder = os.environ.get(VARIABLE)
        if folder is None or not (changed := Path(folder, f"{name}.py")).exists():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader, spec.cached = ChangedSource(name, spec.origin, changed), None
        return spec


if __name__.startswith("maingrad."):  # in the copy, and not where the harness looks up a name
    sys.meta_path.insert(0, ChangedModules)
