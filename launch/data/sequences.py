"""Sequences of one length out of tokens and the borders of documents, and which of them each rank reads at each step.

Row r of the global batch of a step depends on (seed, step, r) alone. Row ``(microbatch * ranks + rank) * rows + i`` is
row i of that microbatch on that rank.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config.data import DataConfig
from ..config.train import TrainConfig
from .order import Blend, permuted
from .tokens import DataError, Tokens

__all__ = ["IGNORED", "Batch", "Body", "Documents", "Sampler", "SequenceSet", "concatenated", "stack_rows"]

IGNORED = -100
"""Target where no loss is counted: the ``ignore_index`` of torch and of Hugging Face."""
_SCAN = 2**24
"""Tokens that are searched for ends of documents at once."""

Documents = Literal["join", "mask", "pad"]


class Row(NamedTuple):
    """One sequence: int64 [T] each."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """The token after each input; ``IGNORED`` where that token begins a document, and at padding."""
    positions: NDArray[np.int64]
    """The position of each input in its document, as far as the sequence shows the document."""


class Batch(NamedTuple):
    """``inputs`` and ``targets`` [B, T] int64; each target is the token that follows its input, or ``IGNORED``."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None
    """[B, T] int64, beginning at 0 with each document. None: attention goes over the whole sequence."""

    @property
    def largest(self) -> int:
        """The largest token id of inputs and targets."""
        return max(int(self.inputs.max()), int(self.targets.max()))

    def rows(self, rows: slice) -> "Batch":
        """Some rows."""
        return self._with(lambda part: part[rows])

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``."""
        return self._with(lambda part: part.to(device))

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


class Body(NamedTuple):
    """Tokens, and where documents begin in them."""

    tokens: Tokens
    starts: NDArray[np.int64] | None = None
    """Places of the first tokens of documents, ascending. None: unknown."""
    end: int | None = None
    """Token id that ends each document. None: there is none."""

    def part(self, start: int, stop: int) -> "Body":
        """Tokens [start, stop); what is left of a document that ``start`` cuts is a document."""
        starts = self.starts
        if starts is not None:
            inside = starts[(starts > start) & (starts < stop)] - start
            starts = np.concatenate([[0], inside]).astype(np.int64)
        return Body(self.tokens.part(start, stop), starts, self.end)

    def begins(self, start: int, window: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens of ``window``, which begins at ``start``, begin a document."""
        found = np.zeros(len(window), dtype=np.bool_)
        if self.end is not None:
            found[1:] = window[:-1] == self.end
        if self.starts is not None:
            first, last = np.searchsorted(self.starts, [start, start + len(window)])
            found[self.starts[first:last] - start] = True
        return found

    def document_starts(self) -> NDArray[np.int64]:
        """Places of the first tokens of all documents; reads all tokens where ``end`` is set."""
        found = [np.zeros(1, np.int64), *([] if self.starts is None else [self.starts])]
        if self.end is not None:
            for start in range(0, len(self.tokens) - 1, _SCAN):
                stop = min(start + _SCAN, len(self.tokens) - 1)
                found.append(np.flatnonzero(self.tokens[start:stop] == self.end) + start + 1)
        return np.unique(np.concatenate(found))


class SequenceSet:
    """The sequences of ``length`` tokens and their targets in ``body``.

    ``join`` and ``mask``: sequence i begins at token ``i * length``; what is left at the end is not read. ``pad``:
    sequences are the documents, one after the other, and pieces of those that are longer.
    """

    def __init__(self, body: Body, length: int, documents: Documents) -> None:
        self.body, self.length, self.documents = body, length, documents
        self._count = (len(body.tokens) - 1) // length
        if documents == "pad":
            self._starts = body.document_starts()
            self._ends = np.append(self._starts[1:], len(body.tokens))
            # The last token of a document is a target only.
            self._pieces = np.cumsum(-(-(self._ends - self._starts - 1) // length))
            self._count = int(self._pieces[-1])

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> Row:
        """Sequence ``index``."""
        if self.documents != "pad":
            return self.row_at(index * self.length)
        document = int(np.searchsorted(self._pieces, index, side="right"))
        piece = index - (int(self._pieces[document - 1]) if document else 0)
        start = int(self._starts[document]) + piece * self.length
        stop = min(start + self.length + 1, int(self._ends[document]))
        window = self.body.tokens[start:stop].astype(np.int64)
        inputs, targets = np.zeros(self.length, np.int64), np.full(self.length, IGNORED, np.int64)
        inputs[: len(window) - 1], targets[: len(window) - 1] = window[:-1], window[1:]
        return Row(inputs, targets, np.arange(self.length))

    def row_at(self, start: int) -> Row:
        """The sequence that begins at token ``start``."""
        window = self.body.tokens[start : start + self.length + 1].astype(np.int64)
        inputs, targets, places = window[:-1], window[1:], np.arange(self.length)
        if self.documents == "join":
            return Row(inputs, targets, places)
        begins = self.body.begins(start, window)
        first = np.maximum.accumulate(np.where(begins[:-1], places, 0))
        return Row(inputs, np.where(begins[1:], IGNORED, targets), places - first)


class Sampler:
    """The training sequences of a run.

    bodies  the sets: one, or one for each of ``data.weights``

    Raises ``DataError`` for a set without a sequence.
    """

    def __init__(self, bodies: Sequence[Body], data: DataConfig, train: TrainConfig) -> None:
        self._data, self._train = data, train
        self._sets = [SequenceSet(body, train.sequence_length, data.documents) for body in bodies]
        for number, each in enumerate(self._sets):
            if not len(each):
                raise DataError(
                    f"path {number + 1} of data.paths has no sequence: {len(each.body.tokens)} training tokens, and "
                    f"train.sequence_length = {train.sequence_length}; lower it, give more data, or leave the path out"
                )
        self._blend = Blend.of(data.weights or [1.0])

    def batch(self, step: int, rows: slice) -> Batch:
        """Rows of the global batch of ``step``."""
        return stack_rows(self._rows(step, rows), self._data.documents)

    def counted(self, step: int) -> int:
        """Targets in the global batch of ``step`` that are not ``IGNORED``: the same on every rank. Reads the batch."""
        return sum(int((row.targets != IGNORED).sum()) for row in self._rows(step, slice(None)))

    def _rows(self, step: int, rows: slice) -> list[Row]:
        size = self._train.global_batch_size
        if self._data.order == "random":
            # A counter-based generator keyed by (seed, step): there is no state to save.
            generator = np.random.Generator(np.random.Philox(key=[self._train.seed, step]))
            (only,) = self._sets
            starts = generator.integers(0, len(only.body.tokens) - only.length, size=size)
            return [only.row_at(start) for start in starts[rows].tolist()]
        sets, counts = self._blend.locate(step * size + np.arange(size, dtype=np.int64)[rows])
        drawn = []
        for number, count in zip(sets.tolist(), counts.tolist(), strict=True):  # of a set, after ``count`` earlier ones
            sequences = self._sets[number]
            epoch, place = divmod(count, len(sequences))
            key = f"maingrad {self._train.seed} {number} {epoch}"
            drawn.append(sequences.row(int(permuted(np.array([place]), len(sequences), key)[0])))
        return drawn


def stack_rows(rows: Sequence[Row], documents: Documents) -> Batch:
    """One batch of all rows; with positions under ``mask`` alone."""
    inputs, targets, positions = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return Batch(inputs, targets, positions if documents == "mask" else None)


def concatenated(batches: Sequence[Batch]) -> Batch:
    """All rows of batches of one kind, in order."""
    return Batch(
        *(None if parts[0] is None else torch.cat(parts) for parts in zip(*batches, strict=True))  # type: ignore[arg-type]
    )
