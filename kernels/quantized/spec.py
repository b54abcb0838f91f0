"""``QuantSpec``: how a matrix is quantised; ``Quantized``: a matrix that was.

Legend: R rows; C columns, along which a product contracts; v the value that an element and its scale stand for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Element", "QuantSpec", "Quantized", "ScaleForm", "restored"]


class Element(Enum):
    """An element's format: sign, exponent and mantissa bits.

    E4M3 and E5M2 are torch's ``float8_e4m3fn`` and ``float8_e5m2`` (Micikevicius et al., 2022). E2M1 has the magnitudes
    0, 0.5, 1, 1.5, 2, 3, 4 and 6, no Inf and no NaN (OCP Microscaling Formats, 2023).
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"

    max: float
    """The largest finite magnitude."""
    dtype: torch.dtype
    """The dtype of the tensor that holds elements. Two elements of E2M1 share a byte, the first in the low bits."""

    def __init__(self, code: str) -> None:
        # Attributes, not properties: the host asks for them in every product.
        self.max, self.dtype = {
            "e4m3": (448.0, torch.float8_e4m3fn),
            "e5m2": (57344.0, torch.float8_e5m2),
            "e2m1": (6.0, torch.uint8),
        }[code]


class ScaleForm(Enum):
    """How a scale is stored. All forms are multipliers: ``v = element * scale``."""

    FP32 = "fp32"
    POWER_OF_TWO = "power of two"
    """In fp32."""
    E8M0 = "e8m0"
    """``float8_e8m0fnu``: a biased exponent, 255 for NaN."""
    E4M3 = "e4m3"
    """Times one fp32 factor of the matrix."""


@dataclass(frozen=True)
class QuantSpec:
    """How a matrix [R, C] is quantised.

    element     the elements' format
    block       rows and columns of the elements that share a scale; None: all of the matrix. Blocks at the borders may
                be smaller
    scale       the form of scales
    rotated     elements are those of ``x H``: H is a random Hadamard transform of each 16 columns, the same in every
                matrix, and orthogonal. So a product of two rotated matrices is that of the two before rotation
    stochastic  elements are rounded up or down at random, right in the mean; False: to nearest, ties to even
    emulated    the reference quantises and multiplies, on GPUs with a kernel too
    """

    element: Element
    block: tuple[int, int] | None
    scale: ScaleForm
    rotated: bool = False
    stochastic: bool = False
    emulated: bool = False


class Quantized(NamedTuple):
    """A quantised matrix; or one of each expert, all of one shape, whose tensors have a dim [E] more in front."""

    data: Tensor
    """[R, C] of the element's dtype; E2M1: uint8 [R, ceil(C / 2)]. More columns may follow, of zeros."""
    scale: Tensor
    """The multipliers: a 0-dim tensor, or [ceil(R / block rows), ceil(C / block columns)]."""
    factor: Tensor | None
    """0-dim fp32: multiplies all scales of the form E4M3; None for other forms."""
    spec: QuantSpec
    columns: int
    """C; where it is rotated, rounded up to 16."""

    @property
    def shape(self) -> tuple[int, int]:
        """R and C."""
        return self.data.shape[-2], self.columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is in memory."""
        return (self.data, self.scale) if self.factor is None else (self.data, self.scale, self.factor)

    def unbind(self) -> "list[Quantized]":
        """Each expert's matrix."""
        factors = [None] * len(self.data) if self.factor is None else self.factor.unbind()
        each = zip(self.data.unbind(), self.scale.unbind(), factors, strict=True)
        return [Quantized(*tensors, self.spec, self.columns) for tensors in each]

    def rows(self, start: int, end: int) -> "Quantized":
        """Rows ``start`` to ``end``. Raises ``ValueError`` where that cuts a block."""
        if start == 0 and end == self.data.shape[0]:
            return self
        scale = self.scale
        if self.spec.block is not None:
            height = self.spec.block[0]
            if start % height or (end % height and end != self.data.shape[0]):
                raise ValueError(f"rows {start} to {end} cut blocks of {height} rows")
            scale = scale[start // height : -(-end // height)]
        return Quantized(self.data[start:end], scale, self.factor, self.spec, self.columns)


def restored(tensors: Sequence[Tensor], spec: QuantSpec, columns: int) -> Quantized:
    """A matrix from its ``tensors``, as autograd has saved them."""
    data, scale, *factor = tensors
    return Quantized(data, scale, factor[0] if factor else None, spec, columns)
