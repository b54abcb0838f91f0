"""The reference implementation of Newton-Schulz iterations, in plain PyTorch.

A polynomial step acts on singular values alone: ``X = a X + b (X X^T) X + c (X X^T)^2 X`` maps each singular value s of
X to ``a s + b s^3 + c s^5``. Some steps from ``X = U / |U|_F`` bring all singular values near 1, so that X comes near
``P Q^T`` of the singular value decomposition ``U = P S Q^T`` (Jordan et al., Muon, 2024; Bernstein and Newhouse, 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "Step", "inverse_norms", "newton_schulz_reference"]


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

_SMALLEST = 2.0**-112
"""A scale of at most 2^15 over this norm is finite in fp32."""


def inverse_norms(matrices: Tensor, scale: float = 1.0) -> Tensor:
    """``scale / |U|_F`` of matrices [B, m, n] as [B, 1, 1], at least in fp32; ``scale`` for norms below 2^-112.

    Sums of squares are fp64: those of fp32 overflow for elements of 1e19, and vanish for 1e-23. The inverse of a
    smaller norm would overflow in fp32: the momentum of a matrix whose gradient stays zero decays to such norms.
    """
    # One matrix at a time: the order of a batch's sums depends on the batch.
    norms = torch.stack(torch._foreach_norm(list(matrices), 2, torch.float64))
    inverse = scale / torch.where(norms < _SMALLEST, 1.0, norms)
    return inverse.to(torch.promote_types(matrices.dtype, torch.float32))[:, None, None]


def newton_schulz_reference(matrices: Tensor, steps: Sequence[Step], dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthogonalise matrices [B, m, n]; the result has ``dtype``, in which products are rounded.

    Matrices are first divided by their Frobenius norm. A matrix has the same bits in each batch, and ``2^k U`` those of
    ``U``. A matrix of zeros stays zeros, and one with a norm below 2^-112 nearly so.
    """
    if not matrices.numel():
        return matrices.to(dtype)
    results = []  # one matrix at a time: bits of a batched product depend on the batch
    for matrix, inverse in zip(matrices, inverse_norms(matrices), strict=True):
        x = (matrix * inverse).to(dtype)
        tall = x.shape[0] > x.shape[1]
        x = x.mT if tall else x
        for a, b, c in steps:
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        results.append(x.mT if tall else x)
    return torch.stack(results)
