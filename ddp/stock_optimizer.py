"""Keeps a stock optimizer from silently doing nothing.

Gradients live in ``main_grad``, so that ``.grad`` is None and ``torch.optim.AdamW(model.parameters()).step()`` would be
a no-op without a word. A hook that torch runs before every optimizer's step looks for that.
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .main_grad import record_of

__all__ = ["guard_stock_optimizers"]


def guard_stock_optimizers() -> RemovableHandle:
    """Refuse steps over parameters whose gradient was not exposed; remove the handle with the wrapper."""
    return register_optimizer_step_pre_hook(_refuse_unexposed)


def _refuse_unexposed(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            record = record_of(param)
            if record is not None and not record.exposed:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): the gradient of parameter '{record.name}' is in main_grad, "
                    f"not in .grad, so the step would skip it; call model.finish_grad_sync() and model.expose_grads() "
                    f"before clipping and stepping, or use maingrad.ddp.DistributedOptimizer"
                )
