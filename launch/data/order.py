"""Which sequence comes where: a permutation for each epoch, and blends of several sets, from numbers alone.

No function here holds a list of all sequences, and none has a state: the n-th sequence of a run follows from the seed
and n. So a run can go on in the middle of an epoch, with another number of ranks and microbatches.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blend", "permuted"]

_ROUNDS = 6
_PARTS = 4096
"""Weights of a blend are rounded to multiples of 1 / ``_PARTS``."""


def permuted(index: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Places of ``index`` in a permutation of [0, size) that ``key`` chooses.

    A Feistel network over the next even number of bits is a permutation of [0, 2^bits). It is applied again to results
    of ``size`` and more, so that what is left is a permutation of [0, size). The network needs four tries at most on
    average. Black and Rogaway, 2002, "Ciphers with arbitrary finite domains".
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64(2**half - 1)
    digest = hashlib.sha512(key.encode()).digest()
    keys = np.frombuffer(digest, "<u8")[:_ROUNDS]

    def once(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value >> np.uint64(half), value & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right + round_key) & mask)
        return (left << np.uint64(half)) | right

    value = once(index.astype(np.uint64))
    while (outside := value >= np.uint64(size)).any():
        value[outside] = once(value[outside])
    return value.astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); overflow wraps around."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Blend(NamedTuple):
    """A row of sets that repeats; each set has its share of the row, evenly spread over it."""

    sets: NDArray[np.int64]
    """[Q] the set of each place in the row."""
    earlier: NDArray[np.int64]
    """[Q] how often the same set stands earlier in the row."""
    counts: NDArray[np.int64]
    """[sets] how often each set stands in the row."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Blend":
        """Shares are rounded to multiples of 1 / 4096; each set has one at least."""
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * _PARTS
        counts = np.maximum(1, np.round(shares).astype(np.int64))
        counts //= math.gcd(*counts.tolist())
        sets = np.repeat(np.arange(len(counts)), counts)
        earlier = np.concatenate([np.arange(count) for count in counts])
        order = np.lexsort((sets, (earlier + 0.5) / counts[sets]))
        return cls(sets[order], earlier[order], counts)

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each place in the run: the set, and how many sequences of that set the run has had before."""
        rows, places = np.divmod(index, len(self.sets))
        sets = self.sets[places]
        return sets, rows * self.counts[sets] + self.earlier[places]
