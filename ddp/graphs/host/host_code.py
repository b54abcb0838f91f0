"""Which names the code of a program reads, and which code is a library's."""

import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Names", "functions_in", "is_installed", "is_library", "is_torch_or_ours", "names_in", "package_of"]


_ATTR_MAY_CALL = sys.version_info[:2] >= (3, 12)
"""``LOAD_ATTR`` has a bit that says whether what is loaded is called; before, ``LOAD_METHOD`` said that."""


class Names(NamedTuple):
    """What a function's code, and code inside it, names."""

    used: frozenset[str] = frozenset()
    """Globals that it reads or writes."""
    attributes: frozenset[str] = frozenset()
    """Attributes of anything."""
    values: frozenset[str] = frozenset()
    """Those of ``attributes`` that are not only called."""
    imports: frozenset[str] = frozenset()
    """Modules that it imports when it runs."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """The names in ``code``."""
    used, attributes, values, imports = (set[str]() for _ in Names._fields)
    for instruction in dis.get_instructions(code):
        name, opname = instruction.argval, instruction.opname
        if opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
            used.add(name)
        elif opname == "IMPORT_NAME":
            imports.add(name)
        elif opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(name)
            if not _is_call(instruction):
                values.add(name)
    if used & {"getattr", "setattr", "hasattr"}:
        texts = {value for value in code.co_consts if isinstance(value, str)}
        attributes |= texts
        values |= texts
    found = Names(*map(frozenset, (used, attributes, values, imports)))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = Names(*(own | more for own, more in zip(found, names_in(inner), strict=True)))
    return found


def _is_call(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded only to be called: ``x.name()``."""
    if instruction.opname == "LOAD_ATTR" and _ATTR_MAY_CALL:
        return bool((instruction.arg or 0) & 1)
    return instruction.opname == "LOAD_METHOD"


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions in what a class has under a name: methods, those of properties and static methods, and those that
    a library's decorator has wrapped."""
    if isinstance(value, types.FunctionType):
        yield value
    parts = (getattr(value, name, None) for name in ("fget", "fset", "func", "__func__", "__wrapped__"))
    for part in parts if not isinstance(value, type) else ():
        if part is not None:
            yield from functions_in(part)


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OURS = (str(Path(__file__).parents[3] / room) for room in ("ddp", "fsdp", "kernels", "launch", "te_integration"))
_TORCH_AND_OURS = (str(Path(torch.__file__).parent), *_OURS)


def package_of(function: Any) -> str:
    """The package of the function; "__main__" where that is one of the library."""
    while isinstance(function, functools.partial):
        function = function.func
    top = str(getattr(function, "__module__", None) or "__main__").partition(".")[0]
    return "__main__" if top in ("maingrad", "torch", "builtins") else top


@functools.lru_cache(maxsize=4096)
def is_library(name: str | None, program: str) -> bool:
    """Whether a module is installed, and not the program's own; ``program``: a package that is, installed or not."""
    if name is None or name == "__main__" or name.partition(".")[0] == program:
        return False
    top = name.partition(".")[0]
    if top in ("maingrad", "torch"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return top in sys.stdlib_module_names if file is None else is_installed(file)


def is_installed(file: str) -> bool:
    """Whether a source file belongs to Python, an installed package, or maingrad."""
    parts = ("site-packages", "dist-packages")
    return any(part in file for part in parts) or file.startswith(_INSTALLED) or is_torch_or_ours(file)


def is_torch_or_ours(file: str) -> bool:
    """Whether a source file belongs to torch or to maingrad, or is no file."""
    return file.startswith((*_TORCH_AND_OURS, "<frozen", "<string"))
