"""Order lists of pipeline schedules: what one rank computes, and in which order. Checked before anything runs.

An order is a list of numbers. Chunks count from 1::

     c          forward of chunk c
    -c          dgrad of chunk c: the backward without delayed weight gradients
    -c - 0.5    wgrad of chunk c: its delayed weight gradients, in reverse layer order

Each entry computes one microbatch. The k-th forward, the k-th dgrad and the k-th wgrad of a chunk all belong to
microbatch k. A wgrad may come any number of dgrads later::

    >>> print(parse_order([1, 1, -1, -1, -1.5, -1.5]))
    entry     0  1  2  3  4  5
    chunk 1  F0 F1 D0 D1 W0 W1

A chunk has a wgrad entry for each of its dgrads, or none at all. Without wgrad entries, a chunk computes its weight
gradients right after each dgrad (``B``, the whole backward). The numbers are those of Transformer Engine's graphed
callables; the idea is that of zero-bubble schedules (Qi et al., 2023).

This file knows no tensors and no modules: ``executor.py`` runs an order.
"""

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = ["Entry", "Kind", "Schedule", "ScheduleError", "parse_order"]

Layer = TypeVar("Layer")

LINE_WIDTH = 120  # characters
MAX_CHUNK = 2**31  # far beyond any pipeline, and small enough for c + 0.5 to be exact


class Kind(enum.Enum):
    """The kind of work that an entry computes."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


EFFECT = {Kind.FORWARD: Kind.DGRAD, Kind.DGRAD: Kind.WGRAD}  # of the same chunk and microbatch
CAUSE = {effect: cause for cause, effect in EFFECT.items()}


class ScheduleError(ValueError):
    """An order that cannot be run. ``index`` is that of the entry at fault."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of an order."""

    kind: Kind
    """Forward, dgrad or wgrad."""
    chunk: int
    """From 1."""
    microbatch: int
    """From 0: the number of earlier entries of this kind and chunk."""
    index: int
    """Place in the list. An implied wgrad has the place of its dgrad."""
    implied: bool = False
    """True for a wgrad that is not in the list: it follows right after its dgrad."""

    @property
    def number(self) -> int | float:
        """The entry as a number in an order."""
        if self.kind is Kind.FORWARD:
            return self.chunk
        return -self.chunk if self.kind is Kind.DGRAD else -self.chunk - 0.5

    def __str__(self) -> str:
        return (
            f"entry {self.index} ({self.number}: {self.kind.value} of chunk {self.chunk}, microbatch {self.microbatch})"
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A valid order, made by ``parse_order``. Raises ``ScheduleError`` for entries that break a rule."""

    entries: tuple[Entry, ...]
    """The entries of the list; implied wgrads are not among them."""
    num_chunks: int
    """Chunks are 1 to ``num_chunks``; each runs every microbatch."""
    num_layers_per_chunk: tuple[int, ...] | None = None
    """Number of layers of each chunk; None: unknown."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("the order is empty: it needs at least a forward and a dgrad of each chunk")
        self._check_sequence()
        self._check_balance()

    @property
    def num_microbatches(self) -> int:
        """Microbatches that every chunk runs."""
        return self.entries[-1].microbatch + 1  # the last entry is the last one of its kind and chunk

    @cached_property
    def delayed_chunks(self) -> frozenset[int]:
        """Chunks that have wgrad entries."""
        return frozenset(entry.chunk for entry in self.entries if entry.kind is Kind.WGRAD)

    @cached_property
    def steps(self) -> tuple[Entry, ...]:
        """The entries, with implied wgrads after their dgrads."""
        steps: list[Entry] = []
        for entry in self.entries:
            steps.append(entry)
            if entry.kind is Kind.DGRAD and entry.chunk not in self.delayed_chunks:
                steps.append(dataclasses.replace(entry, kind=Kind.WGRAD, implied=True))
        return tuple(steps)

    @property
    def order(self) -> list[int | float]:
        """The order as a list of numbers."""
        return [entry.number for entry in self.entries]

    def split_layers(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """Split the layers of a model into one list per chunk. Raises ``ValueError`` if the numbers do not match."""
        counts = self.num_layers_per_chunk
        if counts is None:
            raise ValueError("this schedule knows no layers: give parse_order num_layers_per_chunk or num_layers")
        if len(layers) != sum(counts):
            raise ValueError(f"{len(layers)} layers for chunks of {list(counts)}, which are {sum(counts)}")
        remaining = iter(layers)
        return [list(itertools.islice(remaining, count)) for count in counts]

    def check_connected(self) -> None:
        """Raise ``ScheduleError`` at the first entry that comes before an entry of another chunk that it needs.

        Call this where one process runs all chunks of a pipeline: a forward needs the forward of the previous chunk,
        and a dgrad needs the dgrad of the next chunk. The order of one rank among several need not satisfy this, since
        chunks of other ranks may lie between its own.
        """
        done: Counter[tuple[Kind, int]] = Counter()
        for entry in self.entries:
            neighbour = {Kind.FORWARD: entry.chunk - 1, Kind.DGRAD: entry.chunk + 1}.get(entry.kind, 0)
            so_far = done[entry.kind, neighbour]
            if 1 <= neighbour <= self.num_chunks and so_far <= entry.microbatch:
                fault = f"comes before the {entry.kind.value} of chunk {neighbour} of the same microbatch"
                raise _error(entry, f"{fault}, of which there are {so_far} so far")
            done[entry.kind, entry.chunk] += 1

    def __str__(self) -> str:
        """One row per chunk, one column per entry, in blocks of at most ``LINE_WIDTH`` characters.

        F forward, D dgrad, W wgrad, each with its microbatch. B is the whole backward of a chunk without wgrad entries.
        """
        chunks = sorted({entry.chunk for entry in self.entries})
        names = ["entry", *(f"chunk {chunk}" for chunk in chunks)]
        columns = [
            [str(entry.index), *(self._cell(entry) if entry.chunk == chunk else "." for chunk in chunks)]
            for entry in self.entries
        ]
        margin, width = (1 + max(map(len, texts)) for texts in (names, itertools.chain(*columns)))
        per_block = (LINE_WIDTH - margin) // width  # of the numbers that are allowed, several fit
        blocks = []
        for start in range(0, len(columns), per_block):
            rows = zip(names, *columns[start : start + per_block], strict=True)
            lines = (name.ljust(margin) + "".join(text.rjust(width) for text in row) for name, *row in rows)
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)

    def _check_sequence(self) -> None:
        """From left to right: chunks exist, and causes come before effects."""
        done: Counter[tuple[Kind, int]] = Counter()
        for entry in self.entries:
            if entry.chunk > self.num_chunks:
                raise _error(entry, f"is about chunk {entry.chunk} of {self.num_chunks}")
            cause = CAUSE.get(entry.kind)
            if cause is not None and done[cause, entry.chunk] <= entry.microbatch:
                so_far = _counts(done, entry.chunk)
                raise _error(entry, f"comes before its {cause.value}: before this entry {so_far}")
            done[entry.kind, entry.chunk] += 1

    def _check_balance(self) -> None:
        """Every chunk finishes every microbatch."""
        count = Counter((entry.kind, entry.chunk) for entry in self.entries)
        # At most as many chunks as entries are searched: a short order may name chunk 10**9.
        chunks = range(1, min(self.num_chunks, len(self.entries)) + 1)
        shortest = min(chunks, key=lambda chunk: count[Kind.FORWARD, chunk])
        for entry in self.entries:
            chunk, effect = entry.chunk, EFFECT.get(entry.kind)
            if effect is None or (effect is Kind.WGRAD and chunk not in self.delayed_chunks):
                continue
            if count[effect, chunk] <= entry.microbatch:
                raise _error(entry, f"has no {effect.value}: {_counts(count, chunk)}")
            if count[Kind.FORWARD, shortest] <= entry.microbatch:
                fault = f"is a microbatch that chunk {shortest} does not run"
                raise _error(entry, f"{fault}: {_counts(count, chunk)}; {_counts(count, shortest)}")

    def _cell(self, entry: Entry) -> str:
        letter = entry.kind.name[0]
        if entry.kind is Kind.DGRAD and entry.chunk not in self.delayed_chunks:
            letter = "B"
        return f"{letter}{entry.microbatch}"


def parse_order(
    order: Iterable[float],
    *,
    num_chunks: int | None = None,
    num_layers_per_chunk: Sequence[int] | None = None,
    num_layers: int | None = None,
) -> Schedule:
    """Make a schedule from a list of numbers. Raises ``ScheduleError``, with the index of the entry at fault.

    order                 ints, or real numbers of such values: ``1.0`` is ``1``. Every value other than c, -c and
                          -c - 0.5 for a chunk c is refused; so are booleans, strings and NaN
    num_chunks            number of chunks; default: the number of layer counts, else the highest chunk in the order
    num_layers_per_chunk  number of layers of each chunk
    num_layers            instead: the number of layers of all chunks together, split evenly

    Three checks run in this order. First, each entry by itself. Second, from left to right: the chunk exists, the
    forward of a microbatch comes before its dgrad, and the dgrad before its wgrad. Third: every chunk runs the forward,
    the dgrad and (if it has wgrads) the wgrad of every microbatch; the entry at fault is the first whose microbatch is
    not finished or not run by every chunk. Dependencies between chunks are not checked: see
    ``Schedule.check_connected``.
    """
    if isinstance(order, str | bytes):
        raise TypeError(f"an order is a list of numbers, not {order!r}")
    decoded = [_decode(number, index) for index, number in enumerate(order)]
    counts: tuple[int, ...] | None = None
    if num_layers_per_chunk is not None:
        if num_layers is not None:
            raise ValueError("give num_layers_per_chunk or num_layers, not both")
        counts = tuple(_positive(count, "each entry of num_layers_per_chunk") for count in num_layers_per_chunk)
        if num_chunks not in (None, len(counts)):
            raise ValueError(f"num_layers_per_chunk has {len(counts)} entries, num_chunks is {num_chunks}")
        num_chunks = len(counts)
    if num_chunks is None:
        num_chunks = max((chunk for _, chunk in decoded), default=1)
    _positive(num_chunks, "num_chunks")

    seen: Counter[tuple[Kind, int]] = Counter()
    entries: list[Entry] = []
    for index, (kind, chunk) in enumerate(decoded):
        entries.append(Entry(kind=kind, chunk=chunk, microbatch=seen[kind, chunk], index=index))
        seen[kind, chunk] += 1
    schedule = Schedule(entries=tuple(entries), num_chunks=num_chunks, num_layers_per_chunk=counts)
    if num_layers is None:
        return schedule
    each, rest = divmod(_positive(num_layers, "num_layers"), num_chunks)
    if rest:
        raise ValueError(
            f"{num_layers} layers do not split evenly over {num_chunks} chunks: give num_layers_per_chunk instead"
        )
    return dataclasses.replace(schedule, num_layers_per_chunk=(each,) * num_chunks)


def _positive(count: int, name: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a positive int, not {count!r}")
    return count


def _decode(number: object, index: int) -> tuple[Kind, int]:
    """The kind and the chunk of a number."""
    shown = None
    if not isinstance(number, bool) and isinstance(number, Real):
        value: Any = int(number) if isinstance(number, Integral) else number  # fixed-width ints overflow in abs
        if abs(value) < MAX_CHUNK:  # NaN compares false
            if value % 1 == 0 and value != 0:
                return (Kind.FORWARD, int(value)) if value > 0 else (Kind.DGRAD, int(-value))
            if value % 1 == 0.5 and value < -1:
                return Kind.WGRAD, int(-value)
        elif isinstance(number, Integral):
            shown = "too large"  # Python may refuse to print it
    raise ScheduleError(
        index,
        f"entry {index} is {shown or repr(number)}: c is the forward of chunk c (from 1), -c its dgrad, -c - 0.5 its "
        f"wgrad",
    )


def _error(entry: Entry, fault: str) -> ScheduleError:
    return ScheduleError(entry.index, f"{entry} {fault}")


def _counts(count: Counter[tuple[Kind, int]], chunk: int) -> str:
    return f"chunk {chunk} has " + ", ".join(f"{count[kind, chunk]} {kind.value}" for kind in Kind)
