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
    "Piece",
    "allowed_between",
    "distance",
    "norm_of",
    "off_in",
    "parts_in",
    "pieces_of",
    "total_norm",
]

_ROUNDING = 1e-4
"""Relative error that is always allowed under fp32. Mistakes are larger: a lost part is 1 / parts."""
_OF_MEASURED = 20.0
"""Multiples of the rounding error that the plain run has beside fp64."""
_MOST_MEASURED = 10.0
"""In units of ``_ROUNDING``: what is more is no rounding error, and the run in fp64 has computed something else."""
_OF_MEAN = 0.1
"""In units of ``_ROUNDING``, of a tensor whose elements are as large as those of all gradients on average."""


class Piece(NamedTuple):
    """Elements [start, start + len(values)) of one flattened parameter, or of its gradient."""

    name: str
    start: int
    values: Tensor
    places: Tensor | None = None
    """Where the elements lie, in a part of a parameter that ranks hold together; the first one is ``start``."""

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of ``whole``."""
        flat = whole.reshape(-1)
        return flat[self.start : self.start + len(self.values)] if self.places is None else flat[self.places]


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
        return off_in(self.differences([pieces_of(found)], wanted))

    def differences(self, ranks: Sequence[Sequence[Piece]], wanted: Grads) -> list[Difference]:
        """The difference of each parameter in ``wanted``, the farthest first.

        ranks  what each rank holds. Several ranks may hold the same piece: the worst of them counts
        """
        found = []
        for name, tensor in wanted.items():
            errors: dict[int, float] = {}  # by start of the piece
            lengths, off_on = dict[int, int](), []
            for rank, held in enumerate(ranks):
                for piece in held:
                    if piece.name == name:
                        start, values = piece.start, piece.values
                        error = distance(values, piece.of(tensor))
                        errors[start] = max(error, errors.get(start, 0.0))
                        lengths[start] = len(values)
                        off_on += [rank] if error > self.by_name[name] else []
            is_whole = sum(lengths.values()) == tensor.numel()
            error = math.hypot(*errors.values()) if is_whole else math.inf
            seen_by = tuple(off_on) if len(ranks) > 1 else ()
            found.append(Difference(name, error / self.unit[name], error > self.by_name[name], seen_by))
        return sorted(found, key=lambda each: -each.error)


def off_in(differences: Sequence[Difference]) -> list[Difference]:
    """Those that are farther apart than allowed."""
    return [each for each in differences if each.is_off]


def pieces_of(grads: Grads) -> list[Piece]:
    """All of each parameter in one piece."""
    return [Piece(name, 0, grad.reshape(-1)) for name, grad in grads.items()]


def allowed_between(grads: Grads, exact: Grads | None, eps: float = 0.0) -> Allowed:
    """From the plain gradients and, where there are any, those in fp64.

    eps  of the half precision that the program computes in; 0 without

    A sum that cancels (the gradient of a key's bias) is nothing but rounding error. So the error may be twenty times
    the error of the plain run beside fp64, and 1e-5 of the mean of all gradients' elements.
    """
    count = sum(grad.numel() for grad in grads.values())
    total = total_norm(grads.values())
    allowed, unit = {}, {}
    for name, grad in grads.items():
        rounding = max(_ROUNDING, 4 * max(eps, torch.finfo(grad.dtype).eps))
        norm, mean = norm_of(grad), total * math.sqrt(grad.numel() / count)
        measured = 0.0 if exact is None else distance(grad, exact[name])
        if measured > rounding * (_MOST_MEASURED * norm + mean):
            measured = 0.0
        allowed[name] = rounding * (norm + _OF_MEAN * mean) + _OF_MEASURED * measured
        unit[name] = max(norm, 1e-3 * mean, 1e-30)
    return Allowed(allowed, unit)


def total_norm(grads: Iterable[Tensor]) -> float:
    """The global norm, in fp64."""
    return math.sqrt(sum(norm_of(grad) ** 2 for grad in grads))


def parts_in(found: Tensor, parts: Sequence[Tensor]) -> tuple[list[float], float]:
    """How often each part's gradient is contained in ``found``, by least squares, and the rest relative to ``found``.

    The factors solve ``min |found - sum(factor * part)|`` over all elements at once.
    """
    rows = torch.stack([_real(part).double().reshape(-1) for part in parts])
    target = _real(found).double().reshape(-1)
    inverse = torch.linalg.pinv(rows @ rows.T, rtol=1e-12, hermitian=True)  # parts may be equal
    factors = inverse @ (rows @ target)
    rest = (target - factors @ rows).norm() / target.norm().clamp_min(1e-30)
    return factors.tolist(), float(rest)


def norm_of(tensor: Tensor) -> float:
    """The norm of all elements, summed in fp64."""
    return float(torch.linalg.vector_norm(_real(tensor), dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, infinite where it is not finite.

    It is taken in the wider dtype of both and fp32 at least: fp64 would take most of the time.
    """
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    found = norm_of(one.detach().to(dtype) - other.detach().to(dtype))
    return found if math.isfinite(found) else math.inf


def _real(tensor: Tensor) -> Tensor:
    """Both parts of a complex tensor, in another dim."""
    values = tensor.detach()
    return torch.view_as_real(values) if values.is_complex() else values
