"""``[optimizer]``: which optimizer updates the masters, and its learning rate."""

from dataclasses import dataclass

from .error import require

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on fp32 masters, with a cosine schedule."""

    lr: float = 1e-3
    """Learning rate after the warmup."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of ``lr``."""
    warmup_steps: int = 20
    """Steps over which the learning rate grows linearly from ``lr / warmup_steps``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay_vectors: bool = True
    """True: decay also parameters with fewer than two dims (norms, biases, scalars). False: matrices only."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this value. None: no clipping."""

    def __post_init__(self) -> None:
        require(self.lr > 0.0, "optimizer.lr", self.lr, "must be positive")
        require(0.0 <= self.min_lr_ratio <= 1.0, "optimizer.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "must lie in [0, 1)")
        require(self.eps > 0.0, "optimizer.eps", self.eps, "must be positive")
        require(self.weight_decay >= 0.0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0.0,
            "optimizer.max_grad_norm",
            self.max_grad_norm,
            "must be positive; --optimizer.max-grad-norm None turns clipping off",
        )
