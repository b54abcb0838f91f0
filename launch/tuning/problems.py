"""Problems of kernels: operands of one shape, with uneven split sizes like a router's.

Legend: E experts, T rows of all experts, N output features, K input features.
"""

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...kernels.compat import HAS_TRITON
from ...kernels.tuning import Problem, gpu_name
from ..config.error import ConfigError

__all__ = [
    "DENSE_OPS",
    "GROUPED_OPS",
    "GroupedOperands",
    "Shape",
    "error_of",
    "parse_shape",
    "provenance",
    "triton_version",
]

Shape: TypeAlias = tuple[int, int, int, int]
"""E experts (1: a dense layer), T rows, N output features, K input features."""

DENSE_OPS = ("wgrad_accumulate", "wgrad_overwrite")
GROUPED_OPS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad_accumulate", "grouped_wgrad_overwrite")
_MULTIPLE = 16  # of rows: torch's grouped_mm requires it


def triton_version() -> str:
    """Version of Triton, or "none"."""
    if not HAS_TRITON:
        return "none"
    import triton

    return str(triton.__version__)


def provenance(device: torch.device) -> dict[str, Any]:
    """The fields of a measurement that say where and when it was made."""
    return {
        "gpu": gpu_name(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _split_sizes(experts: int, rows: int) -> list[int]:
    """Uneven sizes in multiples of 16; their sum is ``rows``, rounded down to a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(experts, generator=generator) + 0.2
    drawn = torch.multinomial(weights, rows // _MULTIPLE, replacement=True, generator=generator)
    sizes: list[int] = (torch.bincount(drawn, minlength=experts) * _MULTIPLE).tolist()
    return sizes


def parse_shape(text: str) -> Shape:
    """Parse EXPERTSxROWSxNxK. Raises ``ConfigError`` for a text that is no shape, and for shapes that rivals refuse."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--shapes: '{text}' is not EXPERTSxROWSxNxK, like 64x32768x2048x2048")
    experts, rows, n, k = (int(part) for part in parts)
    if rows % 16 or n % 16 or k % 8:
        # torch's grouped_mm takes rows and features in units of 16 bytes; scaled_glu halves N.
        raise ConfigError(f"--shapes: '{text}' needs rows and N in multiples of 16, and K of 8, for the rivals' sake")
    return experts, rows, n, k


class GroupedOperands:
    """Operands and results of the four grouped products of one shape."""

    def __init__(self, experts: int, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        self.shape = (experts, rows, n, k)
        self.sizes = _split_sizes(experts, rows)
        offsets = [sum(self.sizes[:e]) for e in range(experts + 1)]
        self.offsets = torch.tensor(offsets, device=device)
        self.slices = [slice(start, start + size) for start, size in zip(offsets, self.sizes, strict=False)]
        self.x, self.dy = random(rows, k), random(rows, n)
        self.weights = random(experts, n, k)
        self.y, self.dx = torch.empty_like(self.dy), torch.empty_like(self.x)
        self.grads = torch.zeros(experts, n, k, device=device)

    def problem(self, op: str) -> Problem:
        """The key of ``op`` at this shape in a tuning table."""
        return Problem(op, str(self.x.dtype).removeprefix("torch."), *self.shape)

    def check(self, op: str, run: Callable[[], None]) -> float:
        """Run once into memory that holds NaN (sums: ones).

        Returns the relative error against fp64, the larger of the experts with most and with fewest rows.
        """
        exact_of: Callable[[int], Tensor]
        if op == "grouped_linear":
            result, exact_of = self.y, lambda e: self.x[self.slices[e]].double() @ self.weights[e].double().t()
        elif op == "grouped_dgrad":
            result, exact_of = self.dx, lambda e: self.dy[self.slices[e]].double() @ self.weights[e].double()
        else:
            result = self.grads
            exact_of = lambda e: self.dy[self.slices[e]].double().t() @ self.x[self.slices[e]].double()  # noqa: E731
        before = 1.0 if op == "grouped_wgrad_accumulate" else float("nan")
        result.fill_(before)
        run()
        added = before if op == "grouped_wgrad_accumulate" else 0.0
        order = sorted(range(len(self.sizes)), key=self.sizes.__getitem__)
        by_expert = op.startswith("grouped_wgrad")
        errors = [
            error_of(result[e if by_expert else self.slices[e]], exact_of(e) + added) for e in {order[0], order[-1]}
        ]
        return max(errors, key=lambda error: (error != error, error))  # NaN counts as the largest error


def error_of(actual: Tensor, exact: Tensor) -> float:
    """``norm(actual - exact) / norm(exact)`` in the Frobenius norm; NaN if ``actual`` has a NaN, 0 for empty tensors.

    If ``exact`` is all zeros, as the gradient of an expert without rows is, the error is the norm of ``actual``.
    """
    difference = (actual.double() - exact).norm()
    size = exact.norm()
    return float(difference / size if size else difference)
