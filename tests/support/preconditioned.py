"""Optimizers of whole matrices as a user writes them, whose state has other shapes than their parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim


class Shampoo(optim.Optimizer):
    """A preconditioner on each side of a matrix (Gupta, Koren and Singer 2018); other parameters as in Adagrad."""

    per_parameter = True

    def __init__(self, params: Any, lr: float = 0.05, eps: float = 1e-4, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self._update(param, param.grad, group), alpha=group["lr"])

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0)
            if param.dim() == 2:
                for side, size in zip(("left", "right"), param.shape, strict=True):
                    state[side] = group["eps"] * torch.eye(size)
                    state[f"{side}_root"] = None
            else:
                state["sum"] = torch.full_like(param, group["eps"])
        state["step"] += 1
        if param.dim() != 2:
            return grad / state["sum"].addcmul_(grad, grad).sqrt()
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        for side in ("left", "right"):
            if state.get(f"{side}_root") is None or state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(state[side])
                state[f"{side}_root"] = vectors * values.clamp(min=group["eps"]) ** -0.25 @ vectors.T
        return state["left_root"] @ grad @ state["right_root"]


class Soap(optim.Optimizer):
    """Adam in the basis of Shampoo's preconditioners (Vyas et al. 2024), which are in lists: a side of more than
    ``longest`` has an empty list in place of a matrix."""

    per_parameter = True

    def __init__(self, params: Any, lr: float = 0.02, betas: Any = (0.9, 0.95), longest: int = 12) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "longest": longest})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self._update(param, param.grad, group), alpha=group["lr"])

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            sizes = [size if param.dim() == 2 and size <= group["longest"] else 0 for size in param.shape]
            state["GG"] = [torch.zeros(size, size) if size else [] for size in sizes]
            state["Q"] = [torch.eye(size) if size else [] for size in sizes]
        state["step"] += 1
        for side, gram in enumerate(state["GG"]):
            if len(gram):
                gram.lerp_(grad @ grad.T if side == 0 else grad.T @ grad, 1 - beta2)
                state["Q"][side] = torch.linalg.qr(gram @ state["Q"][side])[0]
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].lerp_(self._turned(grad, state["Q"]).square(), 1 - beta2)
        update = self._turned(mean, state["Q"]) / (square.sqrt() + 1e-8)
        return self._turned(update, [turn.T if len(turn) else turn for turn in state["Q"]])

    @staticmethod
    def _turned(matrix: Tensor, basis: list[Any]) -> Tensor:
        if len(basis) == 2:
            matrix = basis[0].T @ matrix if len(basis[0]) else matrix
            matrix = matrix @ basis[1] if len(basis[1]) else matrix
        return matrix
