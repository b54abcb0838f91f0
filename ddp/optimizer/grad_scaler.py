"""Loss scaling for fp16 over sharded gradients: all ranks skip the same steps."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed_optimizer import DistributedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that looks for Inf and NaN in the shards of all ranks.

    Use it as torch's: ``scale(loss).backward()``, ``unscale_(optimizer)`` before clipping by a program's own code,
    ``step(optimizer)``, ``update()``. Optimizers other than ``DistributedOptimizer`` are handled by torch's scaler. The
    host waits no more often than under torch's scaler.

    pipeline_group  the ranks with the pipeline's other stages, as for ``clip_grad_norm``: all stages skip the same
                    steps. Each of these ranks has one optimizer
    args, kwargs    of ``torch.amp.GradScaler``
    """

    def __init__(self, *args: Any, pipeline_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline_group = pipeline_group

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()`` with unscaled gradients; no step where a rank has Inf or NaN."""
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch sets these for one step. A failed step must not leave them for the next one.
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
            raise

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, DistributedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and any(bucket.grad_data.dtype is torch.float16 for bucket in optimizer.model.buckets):
            raise ValueError(
                "unscale_() of fp16 gradients would lose the small ones: accumulate in fp32 "
                "(grad_reduce_in_fp32=True), or leave unscaling to step(), which does it in fp32"
            )
        found = optimizer.unscale_grads(inv_scale)
        if self._pipeline_group is not None and self._pipeline_group.size() > 1:
            with optimizer.model.failures.watch("the search for Inf in the pipeline's other stages"):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._pipeline_group)
        return {found.device: found}
