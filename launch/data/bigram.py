"""The yardstick of the demonstration on the standard library's source: a bigram count model of bytes.

    p(next | previous) = (count(previous, next) + 1) / (count(previous) + 256)

The bigram model sees the previous byte alone and needs no gradient. A language model that trains correctly ends at a
validation loss well below the bigram model's.
"""

import numpy as np

from .sequences import Batch
from .tokens import Tokens

__all__ = ["bigram_loss"]


def bigram_loss(train: Tokens, validation: Batch) -> float:
    """Mean over the targets of ``-log p(target | input)``, in nats per byte, with the counts of ``train``."""
    tokens = train[:].astype(np.int64)
    counts = np.bincount(tokens[:-1] * 256 + tokens[1:], minlength=256 * 256).reshape(256, 256) + 1.0
    log_prob = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_prob[validation.inputs.numpy(), validation.targets.numpy()].mean())
