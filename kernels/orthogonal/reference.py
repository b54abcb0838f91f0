"""The reference implementation of Newton-Schulz iterations, in plain PyTorch.

A polynomial step acts on singular values alone: ``X = a X + b (X X^T) X + c (X X^T)^2 X`` maps each singular value s of
X to ``a s + b s^3 + c s^5``. Some steps from ``X = U / |U|_F`` bring all singular values near 1, so that X comes near
``P Q^T`` of the singular value decomposition ``U = P S Q^T`` (Jordan et al., Muon, 2024; Bernstein and Newhouse, 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "Step", "newton_schulz_reference", "power_of_two_above"]


class Step(NamedTuple):
    """Coefficients of ``a s + b s^3 + c s^5``."""

    a: float
    b: float
    c: float


_SIMPLE = Step(3.4445, -4.7750, 2.0315)
COEFFICIENTS: dict[str, tuple[Step, ...]] = {
    # Jordan's: singular values from 0.01 on end in [0.68, 1.14]. The default of torch.optim.Muon.
    "simple": (_SIMPLE,) * 5,
    # Amsel et al., The Polar Express, 2025: each step is the best for the interval that the one before leaves.
    "polar_express": (
        Step(8.2051, -22.9019, 16.4607),
        Step(4.0664, -2.8612, 0.5184),
        Step(3.9096, -2.8234, 0.5250),
        Step(3.2856, -2.4153, 0.4853),
        Step(2.2779, -1.6198, 0.3985),
    ),
    # DeepSeek-V4: eight steps bring singular values near 1, two of the converging polynomial keep them there.
    "deepseek": (_SIMPLE,) * 8 + (Step(2.0, -1.5, 0.5),) * 2,
}
"""Sets of coefficients by name, one ``Step`` for each iteration."""


def power_of_two_above(largest: Tensor) -> Tensor:
    """The power of two by which ``largest`` (not negative) is divided to lie in [0.5, 1); 1 for zeros."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.to(largest.dtype))


def newton_schulz_reference(matrices: Tensor, steps: Sequence[Step], dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthogonalise matrices [..., m, n]; the result has ``dtype``, in which products are rounded.

    Matrices are first divided by their Frobenius norm. The norm is that of the matrix over a power of two, so that it
    neither overflows nor vanishes, and ``2^k U`` has the result of ``U`` bit for bit. A matrix of zeros stays zeros.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.numel():
        x = x / power_of_two_above(x.abs().amax((-2, -1), keepdim=True))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / torch.where(norm == 0, 1.0, norm)).to(dtype)
    for a, b, c in steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x

