"""The global gradient norm over buckets, and clipping by it, without a host synchronisation."""

import functools

import torch
from torch import Tensor

from .collectives import sum_over_group
from .data_parallel import DistributedDataParallel

__all__ = ["clip_grad_norm", "global_grad_norm", "reduced_grads"]


def reduced_grads(model: DistributedDataParallel) -> list[Tensor]:
    """The part of each bucket that this rank may read after ``finish_grad_sync``: its shard, or all of it."""
    return [bucket.grad_data[slice(*model.owned_range(bucket.layout))] for bucket in model.buckets]


@torch.no_grad()
def global_grad_norm(model: DistributedDataParallel) -> Tensor:
    """``sqrt(sum_i g_i^2)`` over all parameters, once each, as a 0-dim tensor, equal on all ranks.

    It is fp32, or fp64 where a gradient is. Padding is zeros and adds nothing. With sharded gradients the squares are
    summed over the ranks.
    """
    model.check_reduced("the gradient norm")
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in reduced_grads(model)]
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms = torch._foreach_norm(grads, 2, dtype=dtype)
    total = torch.stack(norms).square().sum()
    if model.config.use_distributed_optimizer:
        total = sum_over_group(total, model.process_group)
    return total.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm(model: DistributedDataParallel, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before, a 0-dim tensor.

    Call it between ``finish_grad_sync`` and the optimizer's step. ``DistributedOptimizer(max_grad_norm=...)`` does the
    same inside its own pass over the gradients.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    model.check_scalable("clip_grad_norm()")
    norm = global_grad_norm(model)
    torch._foreach_mul_(reduced_grads(model), clip_coefficient(norm, max_norm))
    return norm
