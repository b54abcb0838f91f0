"""Reads a pickle of plain records without Python's unpickler, which runs what a pickle names, and hashes, copies and
allocates as it says: nine bytes can ask it for a gigabyte, and 300 for a hash that takes years.

Here a pickle is data. Of the opcodes those are known that Python writes for records, sizes and dtypes; a record is a
`Record`, whatever its class; keys of dicts are names or records. Time and memory are in proportion to the file.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

__all__ = ["ForbiddenName", "PickledTensor", "Record", "read_pickle", "read_tensor_pickle"]

_SIZE = ("torch", "Size")
_MOST_DIMS = 64
_LARGEST = 2**62
_MARK = object()


class ForbiddenName(Exception):
    """A pickle asks for something that metadata never needs."""


class Record:
    """An object of one of the classes that are known: its class's name and its pickled state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def field(self, name: str) -> Any:
        """A field of the state; raises ``KeyError`` where it is missing."""
        if not isinstance(self.state, dict):
            raise TypeError(f"a {self.kind} without fields")
        return self.state[name]


class _Name:
    """A class or function that a pickle names."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


def read_pickle(data: bytes, records: set[tuple[str, str]], values: set[tuple[str, str]]) -> Any:
    """What the pickle holds.

    records  (module, name) of the classes whose objects become `Record`s
    values   of further callables: what a pickle calls them for is None, but for ``torch.Size``, which is a tuple

    Raises ``ForbiddenName`` for any other name but dtypes, and ``ValueError``, ``TypeError``, ``KeyError``,
    ``IndexError`` or ``struct.error`` for what is no such pickle.
    """
    return _Reader(data, records, values).read()


class PickledTensor(NamedTuple):
    """A plain tensor as torch.save describes it, beside the bytes of its storage."""

    dtype: torch.dtype
    numel: int
    """Of the storage."""
    offset: int
    """Of its first element."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def is_contiguous(self) -> bool:
        """Whether the storage's bytes are its elements in row-major order, and nothing else."""
        expected = tuple(math.prod(size or 1 for size in self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))
        steps = zip(self.sizes, self.strides, expected, strict=True)
        in_order = all(size == 1 or stride == whole for size, stride, whole in steps)
        numel = math.prod(self.sizes)
        return self.offset == 0 and self.numel == numel and (in_order or numel == 0)


def read_tensor_pickle(data: bytes) -> PickledTensor | None:
    """What torch.save's pickle of a single tensor says. None: it is of something else, or of a tensor with more to it
    (a conjugate view, a subclass, a dtype that is younger than storages with dtypes)."""
    try:
        (storage, offset, sizes, strides, _, hooks) = _TensorReader(data, set(), set()).read()
        kind, dtype, _, _, numel = storage
        if kind != "storage" or hooks != {} or len(sizes) != len(strides):
            return None
        if not isinstance(dtype, torch.dtype) or not all(map(_is_count, (numel, offset, *sizes, *strides))):
            return None
        return PickledTensor(dtype, numel, offset, sizes, strides)
    except Exception:  # of another structure: values of any kind in any place
        return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


class _Reader:
    steps: ClassVar[dict[int, Callable[[Any], None]]]
    """What each opcode does."""

    def __init__(self, data: bytes, records: set[tuple[str, str]], values: set[tuple[str, str]]) -> None:
        self._data, self._records, self._values = data, records, values
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data = self._data
        while True:
            opcode = data[self._at]
            self._at += 1
            if opcode == 0x2E:  # STOP
                (value,) = self._stack
                return value
            step = self.steps.get(opcode)
            if step is None:
                if opcode in b"PQ":
                    raise ForbiddenName("a persistent id")
                raise ValueError(f"opcode {opcode:#x} at byte {self._at - 1}")
            step(self)

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(number)

    def _bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise ValueError("the end is missing")
        self._at += length
        return found

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found

    def _to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, form: str) -> None:
        self._stack.append(self._bytes(self._number(form)).decode("utf-8", "surrogatepass"))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(self._number("<B")), "little", signed=True))

    def last(self, count: int) -> None:
        """TUPLE1 to TUPLE3."""
        if len(self._stack) < count:
            raise ValueError("nothing on the stack")
        found = tuple(self._stack[-count:])
        self._stack[-count:] = [found]

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("items of no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("items of no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | Record):  # its hash is its own; that of nested tuples takes for ever
                raise TypeError(f"a {type(key).__name__} as a key")
            target[key] = value

    def two(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            self._stack.append(dtype)
        elif (module, name) in self._records or (module, name) in self._values:
            self._stack.append(_Name(module, name))
        else:
            raise ForbiddenName(f"{module}.{name}")

    def make(self) -> None:
        """NEWOBJ."""
        called, arguments = self.two()
        if not isinstance(called, _Name) or (called.module, called.name) not in self._records or arguments != ():
            raise TypeError("an object of no record")
        self._stack.append(Record(called.name))

    def call(self) -> None:
        """REDUCE."""
        called, arguments = self.two()
        known = isinstance(called, _Name) and (called.module, called.name) in self._values
        if not known or type(arguments) is not tuple or len(arguments) != 1:
            raise TypeError("a call of no value")
        sizes = arguments[0]
        if (called.module, called.name) != _SIZE:
            self._stack.append(None)
            return
        if type(sizes) is not tuple or len(sizes) > _MOST_DIMS:
            raise TypeError("sizes that are no tuple of numbers")
        self._stack.append(sizes)

    def build(self) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], Record):
            raise TypeError("state of no record")
        self._stack[-1].state = state

    def memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def skip(self, length: int) -> None:
        """PROTO and FRAME say how long something is."""
        self._bytes(length)


_Reader.steps = {
    0x80: lambda r: r.skip(1),  # PROTO
    0x95: lambda r: r.skip(8),  # FRAME
    0x28: lambda r: r.push(_MARK),
    0x4E: lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    0x4B: lambda r: r.push(r._number("<B")),  # BININT1
    0x4D: lambda r: r.push(r._number("<H")),  # BININT2
    0x4A: lambda r: r.push(r._number("<i")),  # BININT
    0x8A: _Reader.long,  # LONG1
    0x8C: lambda r: r.text("<B"),  # SHORT_BINUNICODE
    0x58: lambda r: r.text("<I"),  # BINUNICODE
    0x5D: lambda r: r.push([]),
    0x7D: lambda r: r.push({}),
    0x29: lambda r: r.push(()),
    0x85: lambda r: r.last(1),
    0x86: lambda r: r.last(2),
    0x87: lambda r: r.last(3),
    0x74: lambda r: r.push(tuple(r._to_mark())),  # TUPLE
    0x61: lambda r: r.append([r._stack.pop()]),  # APPEND
    0x65: lambda r: r.append(r._to_mark()),  # APPENDS
    0x73: lambda r: r.set_items(r.two()),  # SETITEM
    0x75: lambda r: r.set_items(r._to_mark()),  # SETITEMS
    0x63: lambda r: r.name(r._line(), r._line()),  # GLOBAL
    0x93: lambda r: r.name(*r.two()),  # STACK_GLOBAL
    0x81: lambda r: r.make(),
    0x52: lambda r: r.call(),
    0x62: _Reader.build,
    0x94: lambda r: r.memoize(len(r._memo)),  # MEMOIZE
    0x71: lambda r: r.memoize(r._number("<B")),  # BINPUT
    0x72: lambda r: r.memoize(r._number("<I")),  # LONG_BINPUT
    0x68: lambda r: r.push(r._memo[r._number("<B")]),  # BINGET
    0x6A: lambda r: r.push(r._memo[r._number("<I")]),  # LONG_BINGET
}


class _TensorReader(_Reader):
    """Of a tensor's pickle: what it calls is data here, too."""

    steps: ClassVar[dict[int, Callable[[Any], None]]] = {**_Reader.steps, 0x51: lambda r: None}  # BINPERSID: as it is

    def name(self, module: Any, name: Any) -> None:
        if module == "torch" and name in _STORAGES:
            self.push(_STORAGES[name])
        elif (module, name) in (_REBUILD, _HOOKS):
            self.push((module, name))
        else:
            raise ForbiddenName(f"{module}.{name}")

    def call(self) -> None:
        called, arguments = self.two()
        if called == _HOOKS and arguments == ():
            self.push({})
        elif called == _REBUILD and type(arguments) is tuple:
            self.push(arguments)
        else:
            raise TypeError("a call of something else")


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_HOOKS = ("collections", "OrderedDict")
