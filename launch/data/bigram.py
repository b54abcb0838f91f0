"""The yardstick: a bigram count model, fitted on the training tokens and scored on the validation set.

    p(next | previous) = (count(previous, next) + 1) / (count(previous) + V)

The bigram model sees the previous token alone and needs no gradient. A language model that trains correctly ends at a
validation loss well below the bigram model's.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batches import Batch
from .tokens import DataError, Tokens

__all__ = ["MAX_VOCAB_SIZE", "Bigram", "fit_bigram"]

MAX_VOCAB_SIZE = 4096  # the table has V^2 entries of 8 bytes: 128 MiB
_CHUNK = 2**24  # tokens that are read and counted at once: bounds memory


class Bigram(NamedTuple):
    """``log_prob`` [V, V]: natural logarithm of p(column | row)."""

    log_prob: NDArray[np.float64]

    def loss(self, batch: Batch) -> float:
        """Mean over all targets of ``-log p(target | input)``, in nats per token."""
        return float(-self.log_prob[batch.inputs.numpy(), batch.targets.numpy()].mean())


def fit_bigram(tokens: Tokens, vocab_size: int) -> Bigram:
    """Count all pairs of ``tokens`` and smooth by one.

    Raises ``ValueError`` for a vocabulary above ``MAX_VOCAB_SIZE``, and for tokens outside the vocabulary.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"a bigram table for {vocab_size} tokens is too large; the limit is {MAX_VOCAB_SIZE}")
    counts = np.zeros(vocab_size * vocab_size, dtype=np.int64)
    for start in range(0, len(tokens) - 1, _CHUNK):
        chunk = tokens[start : start + _CHUNK + 1].astype(np.int64)
        check_tokens(int(chunk.max()), vocab_size)
        counts += np.bincount(chunk[:-1] * vocab_size + chunk[1:], minlength=len(counts))
    table = counts.reshape(vocab_size, vocab_size) + 1.0
    return Bigram(np.log(table / table.sum(axis=1, keepdims=True)))


def check_tokens(largest: int, vocab_size: int) -> None:
    """Raise ``DataError`` for a token id outside the vocabulary."""
    if largest >= vocab_size:
        raise DataError(
            f"token {largest} is outside the vocabulary: model.vocab_size = {vocab_size}; raise it to at least "
            f"{largest + 1}, or correct data.token_dtype"
        )
