"""The global gradient norm over buckets, and clipping by it, without a host synchronisation."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets.checks import check_scalable
from ..collectives.in_flight import sum_over_group
from ..wrapper.data_parallel import DistributedDataParallel

__all__ = ["clip_coefficient", "clip_grad_norm", "global_grad_norm"]


@torch.no_grad()
def global_grad_norm(model: DistributedDataParallel) -> Tensor:
    """``sqrt(sum_i g_i^2)`` over all parameters, once each, as a 0-dim tensor, equal on all ranks.

    It is fp32, or fp64 where a gradient is; squares are summed in fp64, so that how buckets and shards are cut does not
    show. Padding is zeros and adds nothing. Shards are summed over the ranks; what several ranks hold alike counts
    once, what differs between ranks (experts, each on its own) counts each time.
    """
    model.check_reduced("the gradient norm")
    squares, widest = [], torch.float32
    summed = False  # over ranks
    for grid_name in ("dense", "expert"):
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in model.reduced_grads(grid_name)]
        if not grads:
            continue
        widest = max(widest, *(grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)
        square = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square().sum()
        # Summed over all ranks, what so many of them hold alike counts so often.
        replicas = model.reductions[grid_name].num_replicas
        summed = summed or replicas < model.grids["dense"].size
        squares.append(square / replicas)
    total = torch.stack(squares).sum()
    if summed:
        with model.failures.watch("the sum of the gradients' squares"):
            total = model.grids["dense"].sum(total)
    else:
        total = total * model.grids["dense"].size
    return total.sqrt().to(widest)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    max_norm: float,
    *,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before, a 0-dim tensor.

    model           a wrapper, or all of this rank's: one for each of its stages of a pipeline
    pipeline_group  the ranks that hold the other stages: the norm is over these too, and equal on all of them. A weight
                    that two wrappers have copies of counts twice

    Call it between ``finish_grad_sync`` and the optimizer's step. ``DistributedOptimizer(max_grad_norm=...)`` does the
    same inside its own pass over the gradients, for its own wrapper. Collective.
    """
    models = [model] if isinstance(model, DistributedDataParallel) else list(model)
    if max_norm <= 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    if not models:
        raise ValueError("clip_grad_norm: no wrapper was given; every rank of a pipeline has a stage")
    for each in models:
        check_scalable(each.wired, "clip_grad_norm()")
    norms = [global_grad_norm(each) for each in models]
    norm = norms[0]
    if len(norms) > 1 or pipeline_group is not None:
        total = torch.stack([each.double() for each in norms]).square().sum()
        if pipeline_group is not None:
            with models[0].failures.watch("the sum of the stages' squares"):
                total = sum_over_group(total, pipeline_group)
        norm = total.sqrt().to(max((each.dtype for each in norms), key=lambda dtype: dtype.itemsize))
    coefficient = clip_coefficient(norm, max_norm)
    for each in models:
        torch._foreach_mul_(each.reduced_grads(), coefficient)
    return norm
