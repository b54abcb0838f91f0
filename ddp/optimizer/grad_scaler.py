"""Loss scaling for fp16 over sharded gradients: every rank skips the same steps."""

from typing import Any

import torch
from torch import Tensor

from .distributed_optimizer import DistributedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that looks for Inf and NaN in the shards of all ranks.

    Used as torch's own: ``scale(loss).backward()``, ``model.finish_grad_sync()``, ``step(optimizer)``, ``update()``.
    ``unscale_(optimizer)`` comes after ``finish_grad_sync``. Optimizers that are not ``DistributedOptimizer`` are
    treated as torch treats them. The host waits for nothing but what torch's own waits for.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()`` with gradients unscaled, unless a rank met Inf or NaN."""
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch sets these for the step and multiplies by what it finds: the next step must find nothing.
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
            raise

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, DistributedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and any(grad.dtype is torch.float16 for grad in optimizer.model.reduced_grads()):
            raise ValueError(
                "unscale_() of fp16 gradients would lose the small ones: accumulate in fp32 "
                "(grad_reduce_in_fp32=True), or leave unscaling to step(), which does it in fp32"
            )
        found = optimizer.unscale_grads(inv_scale)
        return {found.device: found}
