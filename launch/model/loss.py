"""The mean of a loss over the targets that count, and the places that no loss depends on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...te_integration import LinearCrossEntropy
from ...te_integration.dense.products import Ranks
from ...te_integration.dense.tensor_parallel import to_columns
from ...te_integration.head.over_ranks import cross_entropy_over_ranks
from ..parallelizing.exchanges import ALONE, ContextRanks

__all__ = ["count_targets", "find_padding", "loss_in_chunks", "mean_loss"]


def mean_loss(logits: Tensor, targets: Tensor, ranks: Ranks | None = None, first: int = 0) -> Tensor:
    """Mean cross-entropy in nats of ``logits`` [B, T, V] over ``targets`` [B, T] that are not negative; fp32.

    0 where no target counts. ``logits`` of tensor-parallel ``ranks`` are those of the classes from ``first`` on.
    """
    flat = targets.reshape(-1)
    rows = logits.reshape(-1, logits.shape[-1]).float()
    if ranks is None:
        total = F.cross_entropy(rows, flat, ignore_index=-100, reduction="sum")
    else:
        total = cross_entropy_over_ranks(rows, flat, ranks, first).sum()
    return total / count_targets(flat)


def loss_in_chunks(head: LinearCrossEntropy, hidden: Tensor, targets: Tensor, ranks: Ranks, first: int) -> Tensor:
    """``mean_loss`` by ``head``, which has the classes from ``first`` on, with one chunk's logits in memory.

    Backward computes them again, and exchanges again.
    """

    def summed(rows: Tensor, own: Tensor) -> Tensor:
        return cross_entropy_over_ranks(head(rows).float(), own, ranks, first).sum()

    flat, size = targets.reshape(-1), head.chunk_tokens
    chunks = zip(to_columns(hidden, ranks).flatten(0, 1).split(size), flat.split(size), strict=True)
    losses: list[Tensor] = [
        checkpoint(summed, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    ]
    return torch.stack(losses).sum() / count_targets(flat)


def count_targets(targets: Tensor) -> Tensor:
    """Number of ``targets`` that are not negative, at least 1; on their device."""
    return (targets >= 0).sum().clamp(min=1)


def find_padding(targets: Tensor, context: ContextRanks = ALONE) -> Tensor:
    """Which places of ``targets`` [B, T] lie behind the last target of their row that is not negative; bool [B, T].

    No loss depends on these inputs where attention is causal. A negative target before that place may be that of a
    prompt, which later tokens attend to, those of other ranks of ``context`` too.
    """
    places = context.own(torch.arange(targets.shape[1] * context.size, device=targets.device), 0)
    last = torch.where(targets >= 0, places, -1).amax(1, keepdim=True)
    if context.group is not None:
        dist.all_reduce(last, dist.ReduceOp.MAX, group=context.group)
    return places > last
