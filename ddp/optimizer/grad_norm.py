"""The global gradient norm, and clipping by this norm; the host does not wait for the device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..wrapper.data_parallel import DistributedDataParallel
from .fit import refuse_norm, refuse_norm_of_stage

__all__ = ["clip_coefficient", "clip_grad_norm", "global_grad_norm"]


@torch.no_grad()
def global_grad_norm(model: DistributedDataParallel) -> Tensor:
    """``sqrt(sum_i g_i^2)`` over all parameters, once each, as a 0-dim tensor, equal on all ranks.

    The norm is fp32, or fp64 where a gradient is fp64. Squares are summed in fp64, so that the norm does not depend on
    how buckets and shards are cut. Padding is zeros. Squares of shards are summed over ranks: an element that several
    ranks hold counts once; elements that differ between ranks (experts) all count.
    """
    model.finish_reduction("the gradient norm")
    refuse_norm(model, "the norm of gradients")
    squares, widest = [], torch.float32
    summed = False  # whether some ranks hold other elements than this rank
    for grid_name in model.plan.grid_names:
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in model.reduced_grads(grid_name)]
        widest = max(widest, *(grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)
        by_bucket = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square()
        if (shared := model.shared_embedding) is not None and shared.bucket.layout.grid_name == grid_name:
            place = [each for each in model.buckets if each.layout.grid_name == grid_name].index(shared.bucket)
            by_bucket[place] /= shared.num_copies  # the other stages count the rest
        square = by_bucket.sum()
        # The sum over all ranks counts an element once for each of its replicas.
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
    """``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    max_norm: float,
    *,
    pipeline_group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before, a 0-dim tensor.

    model               a wrapper, or a sequence of this rank's wrappers, one for each pipeline stage
    pipeline_group      the ranks with the pipeline's other stages: the norm covers them too, and is equal on all of
                        them. A weight of which two wrappers hold copies counts twice, but for the one of an
                        ``embedding_group``, which counts once
    error_if_nonfinite  raise ``RuntimeError``, on all ranks, for a norm that is Inf or NaN; gradients stay as they are.
                        The host waits for the device

    Call it between the last backward and the optimizer's step. ``DistributedOptimizer(max_grad_norm=...)`` clips in
    its own pass over the gradients of its wrapper. Collective. Raises ``ValueError`` for ``max_norm <= 0``.
    """
    models = [model] if isinstance(model, DistributedDataParallel) else list(model)
    if max_norm <= 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    if not models:
        raise ValueError("clip_grad_norm: no wrapper was given; every rank of a pipeline has a stage")
    for each in models:
        each.finish_and_take_changes("clip_grad_norm()")
        if pipeline_group is None:
            refuse_norm_of_stage(each, "clip_grad_norm() without pipeline_group")
    norms = [global_grad_norm(each) for each in models]
    norm = norms[0]
    if len(norms) > 1 or pipeline_group is not None:
        total = torch.stack([each.double() for each in norms]).square().sum()
        if pipeline_group is not None and pipeline_group.size() > 1:
            with models[0].failures.watch("the sum of the stages' squares"):
                dist.all_reduce(total, group=pipeline_group)
        norm = total.sqrt().to(max((each.dtype for each in norms), key=lambda dtype: dtype.itemsize))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm(): the norm of all ranks' gradients is {norm.item()}: zero_grad() skips it, and "
            f"check_for_nan_in_grad=True in DistributedDataParallelConfig names the parameter and the rank"
        )
    coefficient = clip_coefficient(norm, max_norm)
    for each in models:
        torch._foreach_mul_(each.reduced_grads(), coefficient)
        each.shown.copy_again()
    return norm
