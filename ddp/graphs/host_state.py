"""``HostState``: what a function's Python reads on the host, so that it is seen when that changes.

A replay runs no Python. It is right as long as the function, called again, would do the same: as long as the globals,
closures, attributes and containers that it reads are what they were in the capture. Found by a walk from the function
and the model:

    function    its globals and closure as far as its code names them, defaults, and functions of the program it names
    module      its attributes; of a class of the program, those of the class, and what its methods name
    object      of a class of the program: the attributes that code names, and those of its class. Where the function is
                its method: those that its methods name on it. Of a library: all
    container   its items

Code of libraries is not looked into: what is installed (but for the package that the function is in), the standard
library and maingrad. Neither are optimizers and process groups, whose state the graphed step itself follows.

Two sets of places are kept. ``change`` compares those that decide what a call does. ``draws`` compares generators of
random numbers as well: they may move between two calls, but not in a call.
"""

import argparse
import collections
import dis
import enum
import functools
import logging
import operator
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..wrapper.data_parallel import DistributedDataParallel

__all__ = ["HostState", "is_installed", "is_torch_or_ours"]

_MOST_PLACES, _MOST_ITEMS, _MOST_NBYTES = 50_000, 4_096, 65_536
_OF_GRAPHS = frozenset(vars(nn.Module()))
"""torch's own attributes of each module. Of a trained one ``surroundings`` compares modes, hooks, buffers and so on."""
_LOST = {"print": "prints", "input": "reads the keyboard", "open": "opens a file", "breakpoint": "stops in a debugger"}
"""Built-in functions whose effect no replay has."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, range)


class HostState:
    """The places that ``function`` and ``model`` read, with what is there now.

    model   the trained module; modes, hooks, parameters and buffers of it are left to ``surroundings``
    device  where it trains. On a GPU tensors of the CPU are host state too: graphs hold their values
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._program = _package_of(function)
        self._trained = set(map(id, model.modules()))
        self._places: list[_Place] = []
        self._random: list[_Place] = list(_default_generators(self._on_gpu))
        self._seen: set[int] = set()
        self._named: set[str] = set()
        self._classes: dict[type, str] = {}
        self._queue: collections.deque[tuple[Any, str, bool]] = collections.deque()
        self._objects: list[tuple[Any, str, set[str]]] = []
        """Objects of the program, of which the attributes count that code names; and those that were met."""
        self._methods: dict[types.FunctionType, type] = {}
        self._on_self: dict[type, set[str]] = collections.defaultdict(set)
        """Attributes that methods of a class name on their own object."""
        self._bound: Any = None
        """The object whose method the function is: its attributes are named on itself alone."""
        self.lost: str | None = None
        """An effect of the function that no replay would have, as "prints"; None where none is seen."""
        self._walk(function, model)
        del self._seen, self._queue, self._classes, self._named, self._objects, self._methods, self._bound

    def change(self) -> str | None:
        """The first place where something else is than when this was made; None: all is as it was."""
        for place in self._places:
            if (name := place.change()) is not None:
                return name
        return None

    def draws(self) -> str | None:
        """The first generator of the host that has drawn, or was seeded, since ``begin_call``."""
        for place in self._random:
            if (name := place.change()) is not None:
                return name
        return None

    def begin_call(self) -> None:
        """Note the states of generators."""
        for place in self._random:
            place.take()

    # ---- The walk. ----

    def _walk(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._reach(function, getattr(function, "__qualname__", "train_step"), True)
        self._reach(model, "model", True)
        if isinstance(function, types.MethodType):
            self._bound = function.__self__
        known = -1
        while self._queue or known != self._num_names():
            known = self._num_names()
            while self._queue and len(self._places) < _MOST_PLACES:
                self._visit(*self._queue.popleft())
            if len(self._places) >= _MOST_PLACES:
                return
            for kind, path in list(self._classes.items()):  # methods whose names were met since
                for name, value in list(vars(kind).items()):
                    called = name in self._named or name in _CALLED or _overrides(kind, name, self._program)
                    called |= any(name in names for other, names in self._on_self.items() if issubclass(other, kind))
                    if called and isinstance(value, types.FunctionType):
                        self._methods.setdefault(value, kind)
                        self._reach(value, f"{path}.{name}", True)
            for value, path, met in self._objects:
                for name in sorted(self._names_of(value).intersection(_attributes_of(value)) - met):
                    met.add(name)
                    self._reach(getattr(value, name), f"{path}.{name}", True)
        for value, path, _ in self._objects:
            self._places.append(_Place(*_named_attributes(value, path, frozenset(self._names_of(value))), path))

    def _num_names(self) -> int:
        return len(self._named) + sum(map(len, self._on_self.values()))

    def _names_of(self, value: Any) -> set[str]:
        """Names of attributes of ``value`` that code may mean."""
        own = set[str]().union(*(self._on_self[kind] for kind in type(value).__mro__ if kind in self._on_self))
        return own if value is self._bound else own | self._named

    def _reach(self, value: Any, path: str, named: bool) -> None:
        """named: the program's code names it, and does not only hold it."""
        if isinstance(value, _SIMPLE) or id(value) in self._seen:
            return
        if not named and isinstance(value, _NAMED_ALONE):
            return
        self._seen.add(id(value))
        self._queue.append((value, path, named))

    def _visit(self, value: Any, path: str, named: bool) -> None:
        if isinstance(value, Tensor):
            self._visit_tensor(value, path)
        elif isinstance(value, types.MethodType):
            if isinstance(value.__func__, types.FunctionType):
                self._methods.setdefault(value.__func__, type(value.__self__))
            self._reach(value.__self__, path.rpartition(".")[0] or path, named)
            self._reach(value.__func__, path, named)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(part, path, named)
        elif isinstance(value, type):
            self._visit_class(value, path)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__, self._program):
                names = [name for name in self._named if name in vars(value)]
                self._watch_names(vars(value), sorted(names), path + ".")
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, dict | list | tuple | collections.deque) and len(value) > _MOST_ITEMS:
            self._places.append(_Place(lambda: [len(value)], lambda: [path], path))
        elif isinstance(value, dict):
            self._watch(lambda: list(value.values()), lambda: [f"{path}[{key!r}]" for key in value], path, named)
        elif isinstance(value, list | tuple | collections.deque):
            self._watch(lambda: value, lambda: [f"{path}[{at}]" for at in range(len(value))], path, named)
        elif isinstance(value, set | frozenset):
            self._places.append(_Place(lambda: [frozenset(value)], lambda: [path], path))
        elif (generator := _state_of_generator(value)) is not None:
            self._random.append(_Place(lambda: [generator()], lambda: [path], path))
        else:
            self._visit_object(value, path, named)

    def _visit_tensor(self, value: Tensor, path: str) -> None:
        if self._on_gpu and value.device.type == "cpu":
            at = weakref.ref(value)
            self._places.append(_Place(lambda: [getattr(at(), "_version", None)], lambda: [path], path))

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        names = function.__globals__
        if _is_library(names.get("__name__"), self._program):
            return
        owner = self._methods.get(function)
        own_name = function.__code__.co_varnames[0] if owner and function.__code__.co_argcount else ""
        used, attributes, on_self = _names_in(function.__code__, own_name)
        self._named |= attributes
        if owner is not None:
            self._on_self[owner] |= on_self
        for name in used - names.keys():
            if name in _LOST and self.lost is None:
                self.lost = _LOST[name]
        self._watch_names(names, sorted(used & names.keys()), "")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._watch(functools.partial(_contents, cell), functools.partial(list, [name]), name, True)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._reach(defaults, path, True)

    def _visit_class(self, kind: type, path: str) -> None:
        if kind in self._classes or _is_library(kind.__module__, self._program):
            return
        self._classes[kind] = path
        names = [name for name in vars(kind) if not name.startswith("__")]
        place = _Place(lambda: _items(vars(kind), names), lambda: [f"{path}.{name}" for name in names], path)
        self._places.append(place)
        for name, value in zip(names, place.values, strict=True):
            self._reach(value, f"{path}.{name}", False)
        for base in kind.__bases__:
            self._reach(base, base.__name__, False)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        own, is_trained = vars(module), id(module) in self._trained
        is_own = not _is_library(type(module).__module__, self._program)
        left_out = _OF_GRAPHS if is_trained else frozenset()
        # Our modules keep in names with an underscore what they make as they run.
        private = "_" if is_trained and type(module).__module__.startswith("maingrad.") else "."
        if is_own and not is_trained:
            self._objects.append((module, path, set()))
        elif not isinstance(module, DistributedDataParallel):
            self._watch(
                lambda: [value for name, value in own.items() if name not in left_out and name[0] != private],
                lambda: [f"{path}.{name}" for name in own if name not in left_out and name[0] != private],
                path,
                is_own,
            )
        for kind in type(module).__mro__:
            self._reach(kind, kind.__name__, False)
        for name, child in module._modules.items():
            self._reach(child, f"{path}.{name}", False)

    def _visit_object(self, value: Any, path: str, named: bool) -> None:
        if isinstance(value, logging.Logger):
            self.lost = self.lost or f"writes to the log '{value.name}'"
            return
        if isinstance(value, Iterator):
            self.lost = self.lost or f"reads '{path}', which gives something else each time"
            return
        kind = type(value)
        if _is_skipped(kind):
            return
        if (nbytes := getattr(value, "nbytes", None)) is not None and hasattr(value, "tobytes"):  # a NumPy array
            if isinstance(nbytes, int) and nbytes <= _MOST_NBYTES:
                self._places.append(_Place(lambda: [value.tobytes()], lambda: [path], path))
            return
        self._reach(kind, kind.__name__, False)
        if named and (kind in _OPEN or not _is_library(kind.__module__, self._program)):
            self._objects.append((value, path, set()))
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            self._watch(lambda: list(own.values()), lambda: [f"{path}.{name}" for name in own], path, False)

    # ---- Places. ----

    def _watch_names(self, names: Mapping[str, Any], keys: list[str], prefix: str) -> None:
        if keys:
            self._watch(lambda: _items(names, keys), lambda: [prefix + key for key in keys], "", True)

    def _watch(self, read: Callable[[], Any], describe: Callable[[], list[str]], path: str, named: bool) -> None:
        """Keep what ``read`` returns now, and walk on from there."""
        place = _Place(read, describe, path)
        self._places.append(place)
        for value, name in zip(place.values, place.names, strict=True):
            self._reach(value, name, named)


class _Absent:
    """In the place of a name that is not there."""


_ABSENT = _Absent()
_OPEN = (types.SimpleNamespace, argparse.Namespace)
"""Classes of Python whose attributes are the program's."""
_NAMED_ALONE = (types.FunctionType, types.MethodType, functools.partial, Iterator, logging.Logger)
"""What matters only where code uses it. Data that is held may be reached in ways that no name tells."""
_CALLED = frozenset(("forward", "__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__"))
"""Methods that code calls without their names."""


class _Place:
    """Values that are read together.

    read      their present list
    describe  a name for each
    path      a name for all
    """

    __slots__ = ("_describe", "_path", "_read", "names", "values")

    def __init__(self, read: Callable[[], Any], describe: Callable[[], list[str]], path: str) -> None:
        self._read, self._describe, self._path = read, describe, path
        self.take()

    def take(self) -> None:
        """Keep what is there now. Tensors with a graph are held weakly: a kept loss would keep its activations."""
        self.values = list(map(_kept, self._read()))
        self.names = self._describe()

    def change(self) -> str | None:
        """A name of what is another value now; None where there is none."""
        now, values = self._read(), self.values
        if len(now) == len(values) and all(map(operator.is_, now, values)):
            return None
        if len(now) != len(values):
            name = (set(self._describe()) ^ set(self.names) or {self._path}).pop()
            return self._path if name.startswith(f"{self._path}[") else name
        for at, (value, before) in enumerate(zip(now, values, strict=True)):
            if value is before or (type(before) is weakref.ref and before() is value):
                continue
            if not _equal(value, before):
                return self._describe()[at]
            values[at] = value
        return None


def _kept(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def _equal(value: Any, before: Any) -> bool:
    """Whether an equal value was made anew. Other objects are equal to themselves alone."""
    if type(value) is not type(before):
        return False
    if isinstance(value, tuple | frozenset):
        return len(value) == len(before) and (
            value == before
            if isinstance(value, frozenset)
            else all(a is b or _equal(a, b) for a, b in zip(value, before, strict=True))
        )
    if isinstance(value, types.MethodType):  # each look at a method makes another
        return value.__self__ is before.__self__ and value.__func__ is before.__func__
    return (isinstance(value, _SIMPLE) or type(value).__module__ == "numpy") and bool(value == before)


def _overrides(kind: type, name: str, program: str) -> bool:
    """Whether a method takes the place of a library's, which the library calls."""
    libraries = (base for base in kind.__mro__ if _is_library(base.__module__, program))
    return not name.startswith("__") and any(name in vars(base) for base in libraries)


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return [_ABSENT]


def _items(names: Mapping[str, Any], keys: Iterable[str]) -> list[Any]:
    return [names.get(key, _ABSENT) for key in keys]


def _attributes_of(value: Any) -> list[str]:
    """Names of an object's own attributes."""
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    found = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__")]


def _named_attributes(
    value: Any, path: str, named: frozenset[str]
) -> tuple[Callable[[], list[Any]], Callable[[], list[str]]]:
    def names() -> list[str]:
        return [name for name in _attributes_of(value) if name in named]

    return lambda: [getattr(value, name, _ABSENT) for name in names()], lambda: [f"{path}.{name}" for name in names()]


# ---- Code. ----


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType, own_name: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of globals that the code, and code inside it, reads or writes; of attributes; of those of ``own_name``."""
    used: set[str] = set()
    attributes: set[str] = set()
    on_self: set[str] = set()
    before: Any = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
            used.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            (on_self if own_name and before == own_name else attributes).add(instruction.argval)
        loads = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        before = instruction.argval if loads else ""
    if used & {"getattr", "setattr", "hasattr"}:
        attributes |= {value for value in code.co_consts if isinstance(value, str)}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, attributes_more, on_self_more = _names_in(inner, own_name)
            used |= more
            attributes |= attributes_more
            on_self |= on_self_more
    return frozenset(used), frozenset(attributes), frozenset(on_self)


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OURS = (str(Path(__file__).parents[2] / room) for room in ("ddp", "fsdp", "kernels", "launch", "te_integration"))
_TORCH_AND_OURS = (str(Path(torch.__file__).parent), *_OURS)


def _package_of(function: Any) -> str:
    """The package of the function; "__main__" where that is one of the library."""
    while isinstance(function, functools.partial):
        function = function.func
    top = str(getattr(function, "__module__", None) or "__main__").partition(".")[0]
    return "__main__" if top in ("maingrad", "torch", "builtins") else top


@functools.lru_cache(maxsize=4096)
def _is_library(name: str | None, program: str) -> bool:
    """Whether a module is installed, and not the program's own; ``program``: a package that is, installed or not."""
    if name is None or name == "__main__" or name.partition(".")[0] == program:
        return False
    top = name.partition(".")[0]
    if top in ("maingrad", "builtins", "torch"):
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


def _is_skipped(kind: type) -> bool:
    """Objects whose state a graphed step follows otherwise, or that have none of Python's."""
    top = kind.__module__.partition(".")[0]
    return top in ("maingrad", "torch", "builtins", "weakref", "threading", "_thread") and not issubclass(
        kind, LRScheduler
    )


# ---- Random numbers. ----


def _default_generators(on_gpu: bool) -> Iterator["_Place"]:
    yield _Place(lambda: [random.getstate()], lambda: ["the random numbers of Python (random)"], "")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield _Place(lambda: [_of_numpy(numpy.random.get_state())], lambda: ["the random numbers of NumPy"], "")
    if on_gpu:  # without a GPU they are those of the device, which replays draw
        yield _Place(lambda: [_bytes(torch.get_rng_state())], lambda: ["torch's random numbers on the CPU"], "")


def _of_numpy(state: Any) -> Hashable:
    _, keys, *rest = state
    return keys.tobytes(), *rest


def _bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())  # NumPy may be missing


def _state_of_generator(value: Any) -> Callable[[], Any] | None:
    """A function that tells the state of a generator of random numbers on the host; None for all else."""
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, torch.Generator):
        return (lambda: _bytes(value.get_state())) if value.device.type == "cpu" else None
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            return lambda: str(value.bit_generator.state)
        if hasattr(value, "get_state"):
            return lambda: _of_numpy(value.get_state())
    return None
