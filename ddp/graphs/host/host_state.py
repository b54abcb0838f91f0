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
from collections.abc import Callable, Iterator, Mapping, MappingView
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...gathers.waiting_params import is_waiting_hook
from ...torch_internals import DisableTorchFunctionSubclass
from ...wrapper.data_parallel import DistributedDataParallel
from .host_code import functions_in, is_library, names_in, package_of
from .host_places import (
    ABSENT,
    HOOKS,
    SIMPLE,
    Place,
    address_of,
    attributes_of,
    contents,
    items_of,
    named_attributes,
    own_attributes,
    state_of_module,
)
from .host_random import default_generators, state_of_generator

__all__ = ["HostState"]

_MOST_PLACES, _MOST_ITEMS, _MOST_NBYTES = 50_000, 4_096, 65_536
_OF_GRAPHS = frozenset(vars(nn.Module()))
"""torch's own attributes of each module. Of a trained one ``surroundings`` compares modes, hooks, buffers and so on."""
_LOST = {"print": "prints", "input": "reads the keyboard", "open": "opens a file", "breakpoint": "stops in a debugger"}
"""Built-in functions whose effect no replay has."""


class HostState:
    """The places that ``function`` and ``model`` read, with what is there now.

    model   the trained module; modes, hooks, parameters and buffers of it are left to ``surroundings``
    device  where it trains. On a GPU tensors of the CPU are host state too: graphs hold their values
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._program = package_of(function)
        self._trained = set(map(id, model.modules()))
        self._params = [*model.parameters()]
        self._trained.update(map(id, self._params))
        self._modules = [*model.modules()]
        self._places: list[Place] = []
        self._random: list[Place] = list(default_generators(self._on_gpu))
        self._seen: set[int] = set()
        self._named: set[str] = set()
        self._values: set[str] = set()
        """Those of ``_named`` that code does not only call."""
        self._all_named = False
        """Code reads attributes without their names, as ``vars`` and ``dataclasses.asdict`` do."""
        self._constructed: set[type] = set()
        """Classes that code names."""
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
        """Why no replay is right, as "prints, which no replay would"; None where nothing is seen."""
        self._walk(function, model)
        del self._seen, self._queue, self._classes, self._named, self._objects, self._methods, self._bound
        del self._values, self._constructed, self._params, self._modules

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
        self._reach_hooks()
        known = -1
        while self._queue or known != self._num_names():
            known = self._num_names()
            while self._queue and len(self._places) < _MOST_PLACES:
                self._visit(*self._queue.popleft())
            if len(self._places) >= _MOST_PLACES:
                self.lost = f"reads more than {_MOST_PLACES} values and objects, too many to compare before each call"
                return
            for kind, path in list(self._classes.items()):  # methods whose names were met since
                for name, value in list(vars(kind).items()):
                    if not self._may_be_called(kind, name):
                        continue
                    for method, gets_object in functions_in(value):
                        if gets_object:
                            self._methods.setdefault(method, kind)
                        self._reach(method, f"{path}.{name}", True)
            for value, path, met in self._objects:
                for name in sorted(self._names_of(value).intersection(attributes_of(value)) - met):
                    met.add(name)
                    self._reach(getattr(value, name), f"{path}.{name}", True)
        for value, path, _ in self._objects:
            self._places.append(Place(*named_attributes(value, path, frozenset(self._names_of(value))), path))

    def _may_be_called(self, kind: type, name: str) -> bool:
        if name in _OF_NEW_OBJECTS:
            return any(issubclass(made, kind) for made in self._constructed)
        if name.startswith("__"):
            return name in self._named or name not in _NOT_CALLED
        named = any(name in names for other, names in self._on_self.items() if issubclass(other, kind))
        return named or name in self._named or name == "forward" or _overrides(kind, name, self._program)

    def _num_names(self) -> int:
        return len(self._named) + len(self._constructed) + sum(map(len, self._on_self.values()))

    def _names_of(self, value: Any) -> set[str]:
        """Names of attributes of ``value`` that code may mean."""
        own = set[str]().union(*(self._on_self[kind] for kind in type(value).__mro__ if kind in self._on_self))
        if self._all_named and not isinstance(value, DistributedDataParallel):
            return own.union(attributes_of(value))
        if value is not self._bound:
            return own | self._named
        return own | self._values | {name for name in self._named if callable(own_attributes(value).get(name))}

    def _reach(self, value: Any, path: str, named: bool) -> None:
        """named: the program's code names it, and does not only hold it."""
        if named and isinstance(value, type):
            self._constructed.add(value)
        if isinstance(value, SIMPLE) or id(value) in self._seen:
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
        elif isinstance(value, types.BuiltinMethodType):
            if not isinstance(value.__self__, types.ModuleType):
                self._reach(value.__self__, path.rpartition(".")[0] or path, named)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(part, path, named)
        elif isinstance(value, type):
            self._visit_class(value, path)
        elif isinstance(value, types.ModuleType):
            if not is_library(value.__name__, self._program):
                self._objects.append((value, path, set()))
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, dict | list | tuple | collections.deque) and len(value) > _MOST_ITEMS:
            self._places.append(Place(lambda: [len(value)], lambda: [path], path))
        elif isinstance(value, dict | types.MappingProxyType):
            self._watch(
                lambda: [*value, *value.values()], lambda: [f"{path}[{key!r}]" for key in value] * 2, path, named
            )
        elif isinstance(value, MappingView):
            self._reach(getattr(value, "mapping", None), path, named)
        elif isinstance(value, contextvars.ContextVar):
            self._watch(lambda: [value.get(ABSENT)], lambda: [path], path, named)
        elif isinstance(value, bytearray | array.array):
            self._places.append(Place(lambda: [bytes(value)], lambda: [path], path))
        elif isinstance(value, list | tuple | collections.deque):
            self._watch(lambda: value, lambda: [f"{path}[{at}]" for at in range(len(value))], path, named)
        elif isinstance(value, set | frozenset):
            self._places.append(Place(lambda: [frozenset(value)], lambda: [path], path))
            for item in value:
                self._reach(item, path, named)
        elif (generator := state_of_generator(value)) is not None:
            self._random.append(Place(lambda: [generator()], lambda: [path], path))
        else:
            self._visit_object(value, path, named)

    def _visit_tensor(self, value: Tensor, path: str) -> None:
        if id(value) in self._trained:
            return
        at = weakref.ref(value)
        if self._on_gpu and value.device.type == "cpu" and not value.is_inference():
            self._places.append(Place(lambda: [getattr(at(), "_version", None)], lambda: [path], path))
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:  # assigned to ``data``
            self._places.append(Place(lambda: [address_of(at())], lambda: [path], path))

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        names, owner = function.__globals__, self._methods.get(function)
        own = function.__dict__
        if (wrapped := own.get("__wrapped__")) is not None:  # a library's decorator may be around a program's function
            if owner is not None and isinstance(wrapped, types.FunctionType):
                self._methods.setdefault(wrapped, owner)
            self._reach(wrapped, path, True)
        if is_library(names.get("__name__"), self._program):
            return
        own_name = function.__code__.co_varnames[0] if owner and function.__code__.co_argcount else ""
        used, attributes, values, on_self, imports = names_in(function.__code__, own_name)
        self._named |= attributes
        self._values |= values
        self._all_named |= not _READ_ALL.isdisjoint(used | attributes | on_self)
        if owner is not None:
            self._on_self[owner] |= on_self
        for name in used - names.keys():
            if name in _LOST and self.lost is None:
                self.lost = f"{_LOST[name]}, which no replay would"
        if "environ" in used | attributes or "getenv" in used | attributes:
            self._reach(os.environ, "os.environ", True)
        for name in imports:
            for full in (name, name.partition(".")[0], f"{names.get('__package__')}.{name}"):
                if full in sys.modules:
                    self._reach(sys.modules[full], full, True)
        self._watch_names(names, sorted(used & names.keys()), "")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._watch(functools.partial(contents, cell), functools.partial(list, [name]), name, True)
        self._watch(
            lambda: [function.__defaults__, function.__kwdefaults__, *own.values()],
            lambda: [f"{path}.{name}" for name in ("__defaults__", "__kwdefaults__", *own)],
            path,
            True,
        )

    def _visit_class(self, kind: type, path: str) -> None:
        if kind in self._classes or is_library(kind.__module__, self._program):
            return
        self._classes[kind] = path
        names = [name for name in vars(kind) if not name.startswith("__")]
        place = Place(lambda: items_of(vars(kind), names), lambda: [f"{path}.{name}" for name in names], path)
        self._places.append(place)
        for name, value in zip(names, place.values, strict=True):
            self._reach(value, f"{path}.{name}", False)
        for base in kind.__bases__:
            self._reach(base, base.__name__, False)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        own, is_trained = vars(module), id(module) in self._trained
        is_own = not is_library(type(module).__module__, self._program)
        if not is_trained:
            self._watch(lambda: state_of_module(own), lambda: [path] * len(state_of_module(own)), path, True)
        # Our modules keep in names with an underscore what they make as they run.
        private = "_" if is_trained and type(module).__module__.startswith("maingrad.") else "."
        is_program = is_own and not is_trained and (module is self._bound or not self._extends_library(type(module)))
        if is_program or isinstance(module, DistributedDataParallel):
            self._objects.append((module, path, set()))
        else:
            self._watch(
                lambda: [value for name, value in own.items() if name not in _OF_GRAPHS and name[0] != private],
                lambda: [f"{path}.{name}" for name in own if name not in _OF_GRAPHS and name[0] != private],
                path,
                is_own,
            )
        if "forward" in own:
            self._reach(own["forward"], f"{path}.forward", True)
        for kind in type(module).__mro__:
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
        if hasattr(kind, "nbytes") and hasattr(kind, "tobytes"):  # a NumPy array
            if isinstance(value.nbytes, int) and value.nbytes <= _MOST_NBYTES:
                self._places.append(Place(lambda: [value.tobytes()], lambda: [path], path))
            return
        self._reach(kind, kind.__name__, False)
        if (wrapped := own_attributes(value).get("__wrapped__")) is not None:  # ``functools.lru_cache``
            self._reach(wrapped, path, named)
        is_own = not is_library(kind.__module__, self._program)
        extends = value is not self._bound and is_own and self._extends_library(kind)
        if named and (kind in _OPEN or is_own) and not extends:
            self._objects.append((value, path, set()))
        elif own := own_attributes(value):
            self._watch(lambda: list(own.values()), lambda: [f"{path}.{name}" for name in own], path, False)

    def _extends_library(self, kind: type) -> bool:
        """Whether a library's methods read attributes of the object, by names that no code of the program has."""
        return any(base not in _PLAIN_BASES and is_library(base.__module__, self._program) for base in kind.__mro__)

    def _reach_hooks(self) -> None:
        """Hooks of what is trained: ``surroundings`` compares which there are, and not what they read."""
        modules = [module for module in map(vars, self._modules) if "_forward_hooks" in module]
        found = [module[name] for module in modules for name in HOOKS]
        params = self._params

        def read() -> list[Any]:
            seen = [hook for hooks in found if hooks for key, hook in hooks.items() if not is_waiting_hook(key)]
            with DisableTorchFunctionSubclass():
                for param in params:
                    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                        if hooks:
                            seen += hooks.values()
            return seen

        self._watch(read, lambda: ["a hook of the model"] * len(read()), "a hook of the model", True)

    # ---- Places. ----

    def _watch_names(self, names: Mapping[str, Any], keys: list[str], prefix: str) -> None:
        if keys:
            self._watch(lambda: items_of(names, keys), lambda: [prefix + key for key in keys], "", True)

    def _watch(self, read: Callable[[], Any], describe: Callable[[], list[str]], path: str, named: bool) -> None:
        """Keep what ``read`` returns now, and walk on from there."""
        place = Place(read, describe, path)
        self._places.append(place)
        for value, name in zip(place.values, place.names, strict=True):
            self._reach(value, name, named)


_OPEN = (types.SimpleNamespace, argparse.Namespace)
"""Classes of Python whose attributes are the program's."""
_NAMED_ALONE = (types.FunctionType, types.MethodType, functools.partial, Iterator, logging.Logger)
"""What matters only where code uses it. Data that is held may be reached in ways that no name tells."""
_OF_NEW_OBJECTS = frozenset(("__init__", "__new__", "__post_init__"))
"""Methods that a call of the class calls."""
_NOT_CALLED = frozenset(
    ("__eq__", "__hash__", "__repr__", "__str__", "__format__", "__del__", "__copy__", "__deepcopy__")
)
_NOT_CALLED |= {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__init_subclass__"}
"""Methods that a step does not call unless it names them. Code calls others, as ``__mul__``, without their names."""
_READ_ALL = frozenset(("vars", "asdict", "astuple", "__dict__"))
_PLAIN_BASES = (object, nn.Module, Generic, Protocol, abc.ABC)
"""Bases of libraries whose methods read nothing that a subclass has."""


def _overrides(kind: type, name: str, program: str) -> bool:
    """Whether a method takes the place of a library's, which the library calls."""
    libraries = (base for base in kind.__mro__ if is_library(base.__module__, program))
    return not name.startswith("__") and any(name in vars(base) for base in libraries)


def _is_skipped(kind: type) -> bool:
    """Objects whose state a graphed step follows otherwise, or that have none of Python's."""
    top = kind.__module__.partition(".")[0]
    return top in ("maingrad", "torch", "builtins", "weakref", "threading", "_thread") and not issubclass(
        kind, LRScheduler
    )
