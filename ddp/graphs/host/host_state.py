"""``HostState``: what a function's Python reads on the host, so that it is seen when that changes.

A replay runs no Python. It is right as long as the function, called again, would do the same: as long as the globals,
closures, attributes and containers that it reads are what they were in the capture. Found by a walk from the function
and the model:

    function    its globals and closure as far as its code names them, defaults, and functions of the program it names
    module      its attributes; of a class of the program, those of the class, and what its methods name
    object      of a class of the program: the attributes that code names, and those of its class. Of a library: all
    container   its items

A name that code only calls counts where a function is held under it: ``optimizer.step()`` does not read a number that
another object keeps as ``step``.

Code of libraries is not looked into: what is installed (but for the package that the function is in), the standard
library and maingrad. Neither are optimizers and process groups, whose state the graphed step itself follows.

``change`` compares what decides what a call does. ``draws`` compares generators of random numbers: they may move
between two calls, but not in a call.
"""

import abc
import argparse
import array
import collections
import contextvars
import functools
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...wrapper.data_parallel import DistributedDataParallel
from .host_code import functions_in, is_library, names_in, package_of
from .host_places import ABSENT, SIMPLE, Place, attributes_of, kept
from .host_random import default_generators, state_of_generator
from .surroundings import HOOKS, Surroundings

__all__ = ["HostState"]

_MOST_PLACES, _MOST_ITEMS, _MOST_NBYTES = 50_000, 4_096, 65_536
_OF_TORCH = frozenset(vars(nn.Module()))
"""torch's own attributes of each module."""
_LOST = {"print": "prints", "input": "reads the keyboard", "open": "opens a file", "breakpoint": "stops in a debugger"}
"""Built-in functions whose effect no replay has."""


class HostState(Surroundings):
    """``Surroundings``, and what ``function`` and ``model`` read, with what is there now.

    All else is as in ``Surroundings``. On a GPU tensors of the CPU are host state too: graphs hold their values.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        trained: Sequence[Tensor],
        kind: str,
        beside: Callable[[], Sequence[object]],
    ) -> None:
        super().__init__(model, trained, kind, beside)
        self._on_gpu = self._kind == "cuda"
        self._program = package_of(function)
        self._trained_ids = {*map(id, self.modules), *map(id, self._params)}
        self._places_of_host: list[Place] = []
        self._places_of_modules: list[Place] = []
        self._alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        """``__dict__`` of modules by the names of their attributes: a getter in C reads those of all."""
        self._random: list[Place] = list(default_generators(self._on_gpu))
        self._seen: dict[int, Any] = {}
        """What was met, by ``id``; it is kept, so that no other object gets the number."""
        self._named: set[str] = set()
        """Attributes that code names."""
        self._read_names: set[str] = set()
        """Those that it does not only call."""
        self._all_named = False
        """Code reads attributes without their names, as ``vars`` and ``dataclasses.asdict`` do."""
        self._constructed: set[type] = set()
        """Classes that code names."""
        self._classes: dict[type, str] = {}
        self._queue: collections.deque[tuple[Any, str, bool]] = collections.deque()
        self._objects: list[tuple[Any, str]] = []
        """Objects of the program, of which the attributes count that code names."""
        self._walk(function, model)
        self._attributes = list(map(kept, self._read_modules()))
        del self._seen, self._queue, self._classes, self._constructed

    def change(self) -> str | None:
        """The first place where something else is than when this was made; None: all is as it was."""
        found = super().change() or self._change_of_modules()
        return found or next(filter(None, map(Place.change, self._places_of_host)), None)

    def _change_of_modules(self) -> str | None:
        """All attributes of all modules are compared at once first: there may be hundreds of modules."""
        try:
            if all(map(is_, self._read_modules(), self._attributes)):
                return None
        except KeyError:  # an attribute is gone
            pass
        found = next(filter(None, map(Place.change, self._places_of_modules)), None)
        if found is None:  # equal numbers that were made anew
            self._attributes = list(map(kept, self._read_modules()))
        return found

    def _read_modules(self) -> Iterator[Any]:
        """The number of attributes of each module, then the attributes."""
        groups = self._alike.items()
        found = (map(itemgetter("_modules", "_buffers", *names), owns) for names, owns in groups)  # a tuple of each
        sizes = map(len, chain.from_iterable(owns for _, owns in groups))
        return chain(sizes, chain.from_iterable(chain.from_iterable(found)))

    def draws(self) -> str | None:
        """The first generator of the host that has drawn, or was seeded, since ``begin_call``."""
        return next((name for place in self._random if (name := place.change()) is not None), None)

    def begin_call(self) -> None:
        """Note the states of generators."""
        for place in self._random:
            place.take()

    # ---- The walk. ----

    def _walk(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._bound = function.__self__ if isinstance(function, types.MethodType) else None
        self._reach(function, getattr(function, "__qualname__", "train_step"), True)
        self._reach(model, "model", True)
        for hook in self.hooks():
            self._reach(hook, "a hook of the model", True)
        while self._queue:
            while self._queue and len(self._places_of_host) < _MOST_PLACES:
                self._visit(*self._queue.popleft())
            if len(self._places_of_host) >= _MOST_PLACES:
                self.lost = f"reads more than {_MOST_PLACES} values and objects, too many to compare before each call"
                return
            for value, path in self._objects:  # attributes and methods whose names were met since
                for name, item in attributes_of(value, self._counts_on(value)).items():
                    self._reach(item, f"{path}.{name}", True)
            for kind, path in list(self._classes.items()):
                for name, value in list(vars(kind).items()):
                    for method in functions_in(value) if self._may_be_called(kind, name) else ():
                        self._reach(method, f"{path}.{name}", True)
        for value, path in self._objects:
            self._watch(functools.partial(attributes_of, value, self._counts_on(value)), path)

    def _may_be_called(self, kind: type, name: str) -> bool:
        if name in _OF_NEW_OBJECTS:
            return any(issubclass(made, kind) for made in self._constructed)
        if name.startswith("__"):
            return name in self._named or name not in _NOT_CALLED
        libraries = (base for base in kind.__mro__ if is_library(base.__module__, self._program))
        # A class beside a library's has no base that calls its forward: that of the module which has both does.
        return name in self._named or name == "forward" or any(name in vars(base) for base in libraries)

    def _counts_on(self, value: Any) -> Callable[[str, Any], bool]:
        """Whether code may mean an attribute of ``value``, by its name and what it is."""
        if self._all_named and not isinstance(value, DistributedDataParallel):
            return lambda name, item: True
        is_trained = id(value) in self._trained_ids  # a wrapper: its mode is part of a call's kind
        return lambda name, item: (
            not (is_trained and name == "training")
            and (name in self._read_names or (name in self._named and callable(item)))
        )

    def _reach(self, value: Any, path: str, named: bool) -> None:
        """named: the program's code names it, and does not only hold it."""
        if named and isinstance(value, type):
            self._constructed.add(value)
        if isinstance(value, SIMPLE) or id(value) in self._seen or not (named or not isinstance(value, _NAMED_ALONE)):
            return
        self._seen[id(value)] = value
        self._queue.append((value, path, named))

    def _watch(
        self, read: Callable[[], Mapping[Any, Any]], path: str, named: bool | None = None, *, items: bool = False
    ) -> None:
        """Compare what ``read`` returns, and walk on from there; named None: no further."""
        place = Place(read, path, items=items)
        self._places_of_host.append(place)
        for name, value in place.labeled() if named is not None else ():
            self._reach(value, name, named is True)

    def _visit(self, value: Any, path: str, named: bool) -> None:
        if isinstance(value, Tensor):
            self._visit_tensor(value, path)
        elif isinstance(value, types.MethodType | types.BuiltinMethodType):
            if not isinstance(value.__self__, types.ModuleType):
                self._reach(value.__self__, path.rpartition(".")[0] or path, named)
            self._reach(getattr(value, "__func__", None), path, named)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(part, path, named)
        elif isinstance(value, type):
            self._visit_class(value, path)
        elif isinstance(value, types.ModuleType):
            if not is_library(value.__name__, self._program):
                self._objects.append((value, path))
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, tuple | frozenset) and len(value) <= _MOST_ITEMS:  # which stays as it is
            for item in value:
                self._reach(item, path, named)
        elif (generator := state_of_generator(value)) is not None:
            self._random.append(Place(lambda: {"": generator()}, path))
        elif (read := _items_of(value)) is not None:
            if hasattr(value, "__len__") and len(value) > _MOST_ITEMS:
                self._watch(lambda: {"": len(value)}, path)
            else:
                self._watch(read, path, named, items=True)
        elif (read_bytes := _bytes_of(value)) is not None:
            self._watch(lambda: {"": read_bytes()}, path)
        else:
            self._visit_object(value, path, named)

    def _visit_tensor(self, value: Tensor, path: str) -> None:
        """A tensor of the host is read in the capture alone. One of the device stays where it is, but for ``data``."""
        if id(value) in self._trained_ids:
            return
        on_host = self._on_gpu and value.device.type == "cpu" and not value.is_inference()
        has_memory = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        at = weakref.ref(value)

        def read() -> dict[str, Any]:
            tensor = at()
            if tensor is None:
                return {"": None}
            return {"": (tensor._version if on_host else 0, tensor.data_ptr() if has_memory else 0)}

        if on_host or has_memory:
            self._watch(read, path)

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        names, own = function.__globals__, function.__dict__
        self._reach(own.get("__wrapped__"), path, True)  # a library's decorator around a program's function
        if is_library(names.get("__name__"), self._program):
            return
        used, attributes, values, imports = names_in(function.__code__)
        self._named |= attributes
        self._read_names |= values
        self._all_named |= not _READ_ALL.isdisjoint(used | attributes)
        for name in used - names.keys():
            if name in _LOST and self.lost is None:
                self.lost = f"{_LOST[name]}, which no replay would"
        if "environ" in used | attributes or "getenv" in used | attributes:
            self._reach(os.environ, "os.environ", True)
        for name in imports:
            for full in (name, name.partition(".")[0], f"{names.get('__package__')}.{name}"):
                self._reach(sys.modules.get(full), full, True)
        if found := sorted(used & names.keys()):
            self._watch(lambda: {name: names.get(name, ABSENT) for name in found}, "", True)
        if cells := function.__closure__:
            free = function.__code__.co_freevars
            self._watch(lambda: dict(zip(free, map(_content, cells), strict=True)), "", True)
        self._watch(
            lambda: {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__, **own},
            path,
            True,
        )

    def _visit_class(self, kind: type, path: str) -> None:
        if kind in self._classes or is_library(kind.__module__, self._program):
            return
        self._classes[kind] = path
        names = [name for name in vars(kind) if not name.startswith("__")]
        self._watch(lambda: {name: vars(kind).get(name, ABSENT) for name in names}, path, False)
        for base in kind.__bases__:
            self._reach(base, base.__name__, False)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        is_trained, is_own = id(module) in self._trained_ids, self._is_own(type(module))
        if not is_trained:
            self._watch(lambda: _state_of(module), path, True)
        if isinstance(module, DistributedDataParallel) or (
            is_own and not is_trained and not self._extends_library(module)
        ):
            self._objects.append((module, path))
        else:
            own = vars(module)
            place = Place(functools.partial(_attributes_of_module, module), path)
            for name in place.names:
                self._reach(own[name], f"{path}.{name}", is_own)
            self._places_of_modules.append(place)
            self._alike.setdefault(tuple(place.names), []).append(own)
        self._reach(vars(module).get("forward"), f"{path}.forward", True)
        for kind in type(module).__mro__:  # a library's class may have one of the program as its base: parametrizations
            self._reach(kind, kind.__name__, False)
        for name, child in module._modules.items():
            self._reach(child, f"{path}.{name}", False)

    def _visit_object(self, value: Any, path: str, named: bool) -> None:
        if isinstance(value, logging.Logger):
            self.lost = self.lost or f"writes to the log '{value.name}', which no replay would"
            return
        if isinstance(value, Iterator):
            self.lost = self.lost or f"reads '{path}', which gives something else each time, which no replay would"
            return
        kind = type(value)
        if _is_skipped(kind):
            return
        self._reach(kind, kind.__name__, False)
        own: dict[str, Any] = getattr(value, "__dict__", {})
        self._reach(own.get("__wrapped__"), path, named)  # ``functools.lru_cache``
        if named and (kind in _OPEN or self._is_own(kind)) and not self._extends_library(value):
            self._objects.append((value, path))
        elif own:
            self._watch(lambda: own, path, False)

    def _is_own(self, kind: type) -> bool:
        return not is_library(kind.__module__, self._program)

    def _extends_library(self, value: Any) -> bool:
        """Whether a library's methods read attributes of the object, by names that no code of the program has."""
        kind = type(value)
        bases = (base for base in kind.__mro__ if base not in _PLAIN_BASES and not self._is_own(base))
        return value is not self._bound and self._is_own(kind) and any(True for _ in bases)


_OPEN = (types.SimpleNamespace, argparse.Namespace)
"""Classes of Python whose attributes are the program's."""
_NAMED_ALONE = (types.FunctionType, types.MethodType, functools.partial, Iterator, logging.Logger)
"""What matters only where code uses it. Data that is held may be reached in ways that no name tells."""
_OF_NEW_OBJECTS = frozenset(("__init__", "__new__", "__post_init__"))
"""Methods that a call of the class calls."""
_NOT_CALLED = frozenset(
    ("__eq__", "__hash__", "__repr__", "__str__", "__format__", "__del__", "__copy__", "__deepcopy__")
) | {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__init_subclass__"}
"""Methods that a step does not call unless it names them. Code calls others, as ``__mul__``, without their names."""
_READ_ALL = frozenset(("vars", "asdict", "astuple", "__dict__"))
_PLAIN_BASES = (object, nn.Module, Generic, Protocol, abc.ABC)
"""Bases of libraries whose methods read nothing that a subclass has."""


def _attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module but torch's own. Ours keep in names with an underscore what they make as they run."""
    private = "_" if type(module).__module__.startswith("maingrad.") else "."
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH and name[0] != private}


def _state_of(module: nn.Module) -> dict[Any, Any]:
    """Mode, parameters, buffers, children and hooks of a module that is not trained."""
    own = vars(module)
    tables = ((name, own[name]) for name in ("_parameters", "_buffers", "_modules", *HOOKS))
    held = {f"{name}.{key}": value for name, table in tables for key, value in table.items()}
    return {"training": module.training, **held}


def _items_of(value: Any) -> Callable[[], Mapping[Any, Any]] | None:
    """A function that reads a container's items."""
    if isinstance(value, dict | types.MappingProxyType):
        return lambda: value
    items: Any = value
    if isinstance(value, list | set | collections.deque | MappingView):
        return lambda: dict(enumerate(items))
    return (lambda: {"": value.get(ABSENT)}) if isinstance(value, contextvars.ContextVar) else None


def _bytes_of(value: Any) -> Callable[[], bytes] | None:
    """A function that reads numbers which change in place: those of a NumPy array too."""
    if isinstance(value, bytearray | array.array):
        return lambda: bytes(value)
    is_array = hasattr(type(value), "nbytes") and hasattr(type(value), "tobytes") and isinstance(value.nbytes, int)
    return (lambda: value.tobytes() if value.nbytes <= _MOST_NBYTES else b"") if is_array else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


def _is_skipped(kind: type) -> bool:
    """Objects whose state a graphed step follows otherwise, or that have none of Python's."""
    top = kind.__module__.partition(".")[0]
    return top in ("maingrad", "torch", "builtins", "weakref", "threading", "_thread") and not issubclass(
        kind, LRScheduler
    )
