"""The loss of logits of which each tensor-parallel rank has some classes: three numbers for each token are exchanged.

Legend: T tokens, V classes of this rank.
"""

import torch
from torch import Tensor

from ..dense.products import Ranks
from ..dense.tensor_parallel import from_rows
from ..torch_internals import collectives

__all__ = ["cross_entropy_over_ranks", "losses_over_ranks", "targets_of_rank"]


def cross_entropy_over_ranks(logits: Tensor, targets: Tensor, ranks: Ranks, first: int) -> Tensor:
    """Losses [T] of ``targets`` [T] by ``logits`` [T, V] of the classes from ``first`` on; negative targets count 0."""
    own = targets_of_rank(targets, first, logits.shape[1])
    elsewhere = own == logits.shape[1]
    of_target = logits.gather(1, own.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0.0)
    return losses_over_ranks(logits.logsumexp(1), of_target, ranks)[0].masked_fill(targets < 0, 0.0)


def targets_of_rank(targets: Tensor, first: int, classes: int) -> Tensor:
    """``targets`` counted from this rank's ``first`` class; ``classes``, how many it has, for all of other ranks."""
    own = targets - first
    return own.masked_fill((own < 0) | (own >= classes), classes)


def losses_over_ranks(lse: Tensor, of_target: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps [T] over the classes of all ranks; differentiable, and equal on all ranks.

    lse        [T]: of this rank's logits
    of_target  [T]: the target's logit; 0 on ranks that do not have it
    """
    top: Tensor = collectives.wait_tensor(collectives.all_reduce(lse.detach(), "max", ranks.group))
    sums = from_rows(torch.stack([(lse - top).exp(), of_target]), ranks._replace(sequence_dim=None))
    whole = top + sums[0].log()
    return whole - sums[1], whole
