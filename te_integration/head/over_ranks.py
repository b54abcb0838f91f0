"""The loss of logits of which each tensor-parallel rank has some classes: three numbers for each token are exchanged.

Legend: T tokens, V classes of this rank.
"""

import torch
from torch import Tensor

from ..dense.products import Ranks
from ..dense.tensor_parallel import from_rows
from ..torch_internals import collectives

__all__ = ["cross_entropy_over_ranks"]


def cross_entropy_over_ranks(logits: Tensor, targets: Tensor, ranks: Ranks, first: int) -> Tensor:
    """Losses [T] of ``targets`` [T] by ``logits`` [T, V] of the classes from ``first`` on; negative targets count 0."""
    own = targets - first
    elsewhere = (own < 0) | (own >= logits.shape[1])
    of_target = logits.gather(1, own.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0.0)
    lse = logits.logsumexp(1)
    top: Tensor = collectives.wait_tensor(collectives.all_reduce(lse.detach(), "max", ranks.group))
    sums = from_rows(torch.stack([(lse - top).exp(), of_target]), ranks._replace(sequence_dim=None))
    return (top + sums[0].log() - sums[1]).masked_fill(targets < 0, 0.0)
