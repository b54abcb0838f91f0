"""Lion, which torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum, with decoupled weight decay. It keeps one moment, and AdamW two.

    With ``g`` the gradient (``-g`` under ``maximize``), ``p`` the parameter, and ``m`` its moment ``exp_avg``::

        p = p - lr weight_decay p
        p = p - lr sign(beta1 m + (1 - beta1) g)
        m = beta2 m + (1 - beta2) g

    Every element moves by ``lr``: the paper takes a rate 3 to 10 times below AdamW's, and a decay as many times above.
    ``DistributedOptimizer(model, optimizer_class=Lion)`` runs it on flat shards; on GPUs, and with compact state, in
    one pass over memory.

    Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"Lion needs lr and weight_decay of at least 0, got {lr} and {weight_decay}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion needs two betas in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param)
                exp_avg, grad = state["exp_avg"], -param.grad if group["maximize"] else param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"])
                blend = torch.lerp(grad, exp_avg, beta1)
                sign = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0, which would hide it
                param.sub_(sign * group["lr"])
                exp_avg.lerp_(grad, 1 - beta2)
        return loss
