"""How far two gradients may be apart, how far they are, and of which parts' gradients one is made."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .plain import Grads

__all__ = ["Allowed", "Difference", "Piece", "allowed_between", "distance", "norm_of", "parts_in", "total_norm"]

_ROUNDING = 1e-4
"""Relative error that is always allowed under fp32. Mistakes are larger: a lost part is 1 / parts."""
_OF_MEASURED = 20.0
"""Multiples of the rounding error that the plain run has beside fp64."""
_MOST_MEASURED = 10.0
"""In units of ``_ROUNDING``: what is more is no rounding error, and the run in fp64 has computed something else."""


class Piece(NamedTuple):
    """Elements [start, start + len(values)) of one flattened parameter, or of its gradient."""

    name: str
    start: int
    values: Tensor


class Difference(NamedTuple):
    """How far one parameter's values on all ranks are from what they should be."""

    name: str
    error: float
    """Norm of the difference, relative to the norm of what should be; infinite if a part is missing or not finite."""
    is_off: bool
    """The error is larger than allowed."""
    ranks: tuple[int, ...]
    """The ranks that hold wrong values; empty if it takes all ranks to see the error."""


class Allowed(NamedTuple):
    """Norm of the error that each parameter's tensor may have."""

    by_name: Mapping[str, float]
    unit: Mapping[str, float]
    """The norm that the tensor's error is relative to."""

    def between(self, found: Grads, wanted: Grads) -> list[Difference]:
        """The parameters that are farther apart than allowed, the farthest first."""
        whole = [Piece(name, 0, found[name].reshape(-1)) for name in wanted if name in found]
        return [each for each in self.differences([whole], wanted) if each.is_off]

    def differences(self, ranks: Sequence[Sequence[Piece]], wanted: Grads) -> list[Difference]:
        """Of each parameter in ``wanted``, the farthest first.

        ranks  what each rank holds. Several ranks may hold the same piece: the worst of them counts
        """
        squares: dict[str, dict[int, float]] = {name: {} for name in wanted}  # by start of the piece
        missing = {name: each.numel() for name, each in wanted.items()}
        wrong: dict[str, list[int]] = {name: [] for name in wanted}
        for rank, held in enumerate(ranks):
            for name, start, values in held:
                if name not in wanted:
                    continue
                of_piece = wanted[name].reshape(-1)[start : start + len(values)]
                error = distance(values, of_piece)
                if not error <= self.by_name[name]:  # NaN is not
                    wrong[name].append(rank)
                square = error**2 if math.isfinite(error) else math.inf
                pieces = squares[name]
                missing[name] -= 0 if start in pieces else len(values)
                pieces[start] = max(square, pieces.get(start, 0.0))
        found = []
        for name, pieces in squares.items():
            error = math.inf if missing[name] > 0 else math.sqrt(sum(pieces.values()))
            is_off = error > self.by_name[name]
            found.append(Difference(name, error / self.unit[name], is_off, tuple(dict.fromkeys(wrong[name]))))
        return sorted(found, key=lambda each: -each.error)


def allowed_between(grads: Grads, exact: Grads | None) -> Allowed:
    """From the plain gradients and, where there are any, those in fp64.

    A sum that cancels (the gradient of a key's bias) is nothing but rounding error. So the error may be twenty times
    the error of the plain run beside fp64. Without fp64, it may be 1e-5 of the mean of all gradients' elements.
    """
    count = sum(grad.numel() for grad in grads.values())
    total = total_norm(grads.values())
    rounding = {name: max(_ROUNDING, 4 * torch.finfo(grad.dtype).eps) for name, grad in grads.items()}
    if exact is not None:
        off = math.sqrt(sum(distance(grad, exact[name]) ** 2 for name, grad in grads.items()))
        if not off <= _MOST_MEASURED * max(rounding.values()) * total:
            exact = None
    allowed, unit = {}, {}
    for name, grad in grads.items():
        norm, mean = norm_of(grad), total * math.sqrt(grad.numel() / max(count, 1))
        measured = 0.0 if exact is None else distance(grad, exact[name])
        measured = min(measured, _MOST_MEASURED * rounding[name] * norm + rounding[name] * mean)
        floor = mean * rounding[name] * (0.1 if exact is None else 1e-3)
        allowed[name] = rounding[name] * norm + _OF_MEASURED * measured + floor
        unit[name] = max(norm, 1e-3 * mean, 1e-30)
    return Allowed(allowed, unit)


def total_norm(grads: Iterable[Tensor]) -> float:
    """The global norm, in fp64."""
    return math.sqrt(sum(norm_of(grad) ** 2 for grad in grads))


def parts_in(found: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> tuple[list[float], float]:
    """How often each part's gradient is contained in ``found``, by least squares, and the rest relative to ``found``.

    found  tensors
    parts  of each part: as many tensors, of the same shapes

    The factors solve ``min |found - sum(factor * part)|`` over all tensors at once.
    """
    rows = torch.stack([torch.cat([_exactly(each).reshape(-1) for each in part]) for part in parts])
    target = torch.cat([_exactly(each).reshape(-1) for each in found])
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
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, in the wider dtype of both and fp32 at least: fp64 would take most of the time."""
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return norm_of(one.detach().to(dtype) - other.detach().to(dtype))


def _exactly(tensor: Tensor) -> Tensor:
    """The values in fp64; of a complex tensor both parts, in another dim."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
