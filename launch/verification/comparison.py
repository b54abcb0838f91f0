"""How far two gradients may be apart, how far they are, and of which parts' gradients one is made."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .plain import Grads

__all__ = [
    "Allowed",
    "Difference",
    "allowed_between",
    "allowed_of_both",
    "differences",
    "distance",
    "norm_of",
    "parts_in",
    "total_norm",
]

_ROUNDING = 1e-4
"""Relative error that is always allowed under fp32. Mistakes are larger: a lost part is 1 / parts."""
_OF_MEASURED = 20.0
"""Multiples of the rounding error that the plain run has beside fp64."""
_MOST_MEASURED = 10.0
"""In units of ``_ROUNDING``: what is more is no rounding error, and the run in fp64 has computed something else."""


class Difference(NamedTuple):
    """One parameter that is not as it should be."""

    name: str
    error: float
    """Norm of the difference, relative to the norm of what should be; infinite if a part is missing or not finite."""


class Allowed(NamedTuple):
    """Norm of the error that each parameter's gradient may have."""

    by_name: Mapping[str, float]

    def between(self, found: Grads, wanted: Grads) -> list[Difference]:
        """The parameters that are farther apart than allowed, the farthest first."""
        return differences(((name, found.get(name, grad * 0), grad) for name, grad in wanted.items()), self)


def allowed_between(grads: Grads, exact: Grads | None) -> Allowed:
    """From the plain gradients and, where there are any, those in fp64.

    A sum that cancels (the gradient of a key's bias) is nothing but rounding error. So the error may be twenty times
    the error of the plain run beside fp64. Without fp64, it may be 1e-5 of the mean of all gradients' elements.
    """
    count = sum(grad.numel() for grad in grads.values())
    total = total_norm(grads.values())
    unit = {name: max(_ROUNDING, 4 * torch.finfo(grad.dtype).eps) for name, grad in grads.items()}
    if exact is not None:
        off = math.sqrt(sum(distance(grad, exact[name]) ** 2 for name, grad in grads.items()))
        if not off <= _MOST_MEASURED * max(unit.values()) * total:
            exact = None
    allowed = {}
    for name, grad in grads.items():
        norm, mean = norm_of(grad), total * math.sqrt(grad.numel() / max(count, 1))
        measured = 0.0 if exact is None else distance(grad, exact[name])
        measured = min(measured, _MOST_MEASURED * unit[name] * norm + unit[name] * mean)
        floor = mean * unit[name] * (0.1 if exact is None else 1e-3)
        allowed[name] = unit[name] * norm + _OF_MEASURED * measured + floor
    return Allowed(allowed)


def allowed_of_both(first: Allowed, second: Allowed) -> Allowed:
    """The larger error of each parameter."""
    return Allowed({name: max(error, second.by_name[name]) for name, error in first.by_name.items()})


def differences(pairs: Iterable[tuple[str, Tensor, Tensor]], allowed: Allowed) -> list[Difference]:
    """Of (name, found, wanted): those that are farther apart than allowed, the farthest first."""
    found = []
    for name, one, other in pairs:
        error = distance(one, other)
        if not error <= allowed.by_name[name]:  # NaN is not
            norm = max(norm_of(other), allowed.by_name[name], 1e-30)
            found.append(Difference(name, error / norm if math.isfinite(error) else math.inf))
    return sorted(found, key=lambda each: -each.error)


def total_norm(grads: Iterable[Tensor]) -> float:
    """The global norm, in fp64."""
    return math.sqrt(sum(norm_of(grad) ** 2 for grad in grads))


def parts_in(found: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> tuple[list[float], float]:
    """How often each part's gradient is contained in ``found``, by least squares, and the rest relative to ``found``.

    found  tensors
    parts  of each part: as many tensors, of the same shapes

    The factors solve ``min |found - sum(factor * part)|`` over all tensors at once.
    """
    rows = torch.stack([torch.cat([exactly(each).reshape(-1) for each in part]) for part in parts])
    target = torch.cat([exactly(each).reshape(-1) for each in found])
    scale = rows.norm(dim=1).clamp_min(1e-30)
    rows = rows / scale[:, None]
    gram = rows @ rows.T
    gram.diagonal().add_(1e-12)  # parts may be equal
    factors = torch.linalg.solve(gram, rows @ target)
    rest = (target - factors @ rows).norm() / target.norm().clamp_min(1e-30)
    return (factors / scale).tolist(), float(rest)


def norm_of(tensor: Tensor) -> float:
    """The norm of all elements, summed in fp64."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point():
        tensor = tensor.double()
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, in the wider dtype of both and fp32 at least: fp64 would take most of the time."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float64
    dtype = torch.promote_types(dtype, torch.float32)
    return norm_of(one.detach().to(dtype) - other.detach().to(dtype))


def exactly(tensor: Tensor) -> Tensor:
    """The values in fp64; of a complex tensor both parts, in another dim."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
