"""What the gradients should be: a plain model's, by autograd alone."""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel

__all__ = ["assert_reduced_to", "plain_grads"]


def plain_grads(
    model: nn.Module, batches: Iterable[Tensor], loss_of: Callable[[nn.Module, Tensor], Tensor], *, scale: float
) -> dict[str, Tensor]:
    """``scale`` times the sum over ``batches`` of the gradients of a copy of ``model``; zeros for unused parameters.

    ``batches`` are those of all ranks and microbatches.
    """
    model = copy.deepcopy(model)
    for batch in batches:
        (loss_of(model, batch) * scale).backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in model.named_parameters()
    }


def assert_reduced_to(ddp: DistributedDataParallel, expected: Mapping[str, Tensor]) -> None:
    """Compare what this rank holds after ``finish_grad_sync`` (its shards, or everything) with ``expected``."""
    for bucket in ddp.buckets:
        flat = torch.zeros_like(bucket.grad_data)
        for slot in bucket.layout.slots:
            start = slot.start - bucket.layout.start
            flat[start : start + slot.spec.numel] = expected[slot.spec.name].reshape(-1)
        start, end = ddp.owned_range(bucket.layout)
        torch.testing.assert_close(
            bucket.grad_data[start:end],
            flat[start:end],
            rtol=1e-5,
            atol=1e-6 * float(flat.abs().max()),  # sums that cancel are as exact as their terms
            msg=lambda text, name=bucket.name: f"{name}: {text}",
        )
