"""Logits of which tensor-parallel ranks have some classes each, against one rank with all of them."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from maingrad.launch import simulate
from maingrad.te_integration.dense.tensor_parallel import ranks_of
from maingrad.te_integration.head.over_ranks import cross_entropy_over_ranks

TOKENS, V = 12, 33
BORDERS = [0, 2, 30, V]
"""Of the ranks' classes."""


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_logits_of_some_classes(sequence_dim: int | None) -> None:
    """Each rank has all tokens, under sequence parallelism too: the head's product has gathered them."""
    draw = torch.Generator().manual_seed(2)
    logits = 300 * torch.randn(TOKENS, V, generator=draw, dtype=torch.float64)  # beyond what exp can take
    logits.requires_grad_()
    targets = torch.randint(V, (TOKENS,), generator=draw)
    targets[:8] = torch.tensor([0, 1, -100, 2, 29, 30, V - 1, 0])  # the first and the last of each rank
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.sum().backward()

    def job() -> None:
        start, end = BORDERS[dist.get_rank() :][:2]
        part = logits.detach()[:, start:end].clone().requires_grad_()
        losses = cross_entropy_over_ranks(part, targets, ranks_of(dist.group.WORLD, sequence_dim), start)
        losses.sum().backward()
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(part.grad, logits.grad[:, start:end])

    simulate(job, 3)
