"""Quantised rows of experts: each expert's rows are a matrix of their own, in one tensor with the others'.

Legend: E experts, T rows, C columns. Expert e has the rows from offsets[e] up to, but not including, offsets[e + 1].
Rows from offsets[E] on are padding. Offsets stay on the device, and the host reads nothing.

Transposed, an expert's rows become columns, along which a product contracts. Columns of zeros fill up each expert's
columns to a multiple of a width that depends on T and E alone. How many these are in all is known on the device alone;
the host knows that there are at most (width - 1) for each expert.

Blocks begin anew at each expert, so that no block lies in two, and its last block may be a part. The scales of expert e
begin at ``columns before it // block + e``: then they fit, whatever the split sizes are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .quantize import Parts, decode, encode
from .spec import Quantized, QuantSpec

__all__ = [
    "GroupedQuantized",
    "QuantizedExperts",
    "dequantize_grouped",
    "expert_width",
    "most_blocks",
    "most_columns",
    "quantize_grouped",
]

_ROTATED = 16
"""Columns that a Hadamard transform mixes."""
_LINE = 128
"""Bytes of a cache line. Where an expert's columns begin within one, kernels read two for each."""
_ALIGNED = 16
"""Bytes at whose multiples the copy engine of a GPU (TMA) begins to read."""
_LARGE = 2048
"""Mean number of rows from which on experts' columns begin at a cache line: it takes a sixteenth more memory."""


class GroupedQuantized(NamedTuple):
    """A quantised matrix whose rows, or columns, are experts' one after the other."""

    matrix: Quantized
    """[T, C]; transposed [C, T and what fills up]. Instead of one scale (where the spec has no blocks) and one factor of
    the matrix there is one for each expert, [E]; transposed, scales of blocks are [C, ceil(columns / block) + E]."""
    offsets: Tensor
    """[E + 1]: the rows of each expert; transposed: the columns."""
    transposed: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is in memory."""
        return (*self.matrix.tensors, self.offsets)


class QuantizedExperts(NamedTuple):
    """A quantised matrix of each expert, all of one shape [R, C]."""

    data: Tensor
    """[E, R, C] of the element's dtype, as in ``Quantized``."""
    scale: Tensor
    """[E], or [E, ceil(R / block rows), ceil(C / block columns)]."""
    factor: Tensor | None
    """[E]."""
    spec: QuantSpec
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """R and C."""
        return self.data.shape[1], self.columns

    def unbind(self) -> list[Quantized]:
        """Each expert's matrix."""
        factors = [None] * len(self.data) if self.factor is None else self.factor.unbind()
        each = zip(self.data.unbind(), self.scale.unbind(), factors, strict=True)
        return [Quantized(data, scale, factor, self.spec, self.columns) for data, scale, factor in each]


def quantize_grouped(x: Tensor, spec: QuantSpec, offsets: Tensor, *, transposed: bool = False) -> GroupedQuantized:
    """Quantise each expert's rows as ``quantize`` does, or their transpose.

    x           [T, C], bf16, fp16 or fp32, any strides. Pad rows, which may hold anything, become zeros
    offsets     [E + 1], int32 or int64, ascending from 0, at most T; on the device of x
    transposed  quantise the transpose of each expert's rows, [C, rows]

    An expert may have no rows. Raises ``ValueError`` unless x is a matrix with elements, and for blocks of several rows
    where experts lie along them.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"quantize_grouped takes a matrix that has elements, got {tuple(x.shape)}")
    if not transposed and spec.block is not None and spec.block[0] != 1:
        raise ValueError(f"blocks of {spec.block[0]} rows would lie in several experts: {spec}")
    if transposed:
        offsets, source = _segments(offsets, x.shape[0], spec)
        x = x.index_select(0, source.clamp(min=0)).t().contiguous()
        values = torch.where(source >= 0, x.float(), 0.0)
    else:
        filled = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        values = torch.where(filled[:, None], x.float(), 0.0)
    parts = _Experts(offsets, values.shape[transposed], transposed)
    return GroupedQuantized(encode(values, spec, parts), offsets, transposed)


def dequantize_grouped(q: GroupedQuantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """``dequantize``, in the shape of ``q.matrix``. What is no expert's is zeros."""
    parts = _Experts(q.offsets, q.matrix.shape[q.transposed], q.transposed)
    filled = parts.filled if q.transposed else parts.filled[:, None]
    return torch.where(filled, decode(q.matrix, dtype, parts), 0.0)  # kernels leave some of the rest unwritten


def most_columns(rows: int, num_experts: int, spec: QuantSpec) -> int:
    """The columns of a transposed copy of ``rows`` rows at most, whatever the split sizes are."""
    width = expert_width(rows, num_experts, spec)
    columns = (rows + (width - 1) * min(num_experts, rows)) // width * width
    return columns if _has_small_blocks(spec) else -(-columns // _LINE) * _LINE  # so that each row begins at a line


def most_blocks(columns: int, num_experts: int, spec: QuantSpec) -> int:
    """The scales of each row of a transposed copy at most, where the spec has blocks."""
    assert spec.block is not None
    return -(-columns // spec.block[1]) + num_experts


def expert_width(rows: int, num_experts: int, spec: QuantSpec) -> int:
    """The columns of an expert are a multiple of this."""
    if _has_small_blocks(spec):
        assert spec.block is not None
        return math.lcm(spec.block[1], _ROTATED if spec.rotated else 1)
    return _LINE if rows >= _LARGE * num_experts else _ALIGNED


def _has_small_blocks(spec: QuantSpec) -> bool:
    return spec.block is not None and spec.block[1] < _LINE


def _segments(offsets: Tensor, rows: int, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The columns of each expert [E + 1], multiples of ``expert_width``; and for each column its row of x, or -1."""
    experts = offsets.shape[0] - 1
    width = expert_width(rows, experts, spec)
    sizes = (offsets.diff() + (width - 1)).div(width, rounding_mode="floor") * width
    columns = torch.nn.functional.pad(sizes.cumsum(0, dtype=offsets.dtype), (1, 0))
    column = torch.arange(most_columns(rows, experts, spec), device=offsets.device, dtype=offsets.dtype)
    expert = torch.searchsorted(columns[1:], column, right=True).clamp(max=experts - 1)
    row = column - columns[expert] + offsets[expert]
    return columns, torch.where(row < offsets[expert + 1], row, -1)


class _Experts(Parts):
    """Each expert's rows, or columns (``transposed``). What is no expert's has the amax 0, scale and factor 1."""

    def __init__(self, offsets: Tensor, length: int, transposed: bool) -> None:
        position = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
        self._position = position
        self._starts = offsets
        """[E + 1]: where there is no expert begins the last."""
        self._ends = torch.nn.functional.pad(offsets[1:], (0, 1), value=length)
        self._owner = torch.searchsorted(offsets[1:], position, right=True)
        """[T]: the expert; E where there is none."""
        self._experts = torch.arange(offsets.shape[0] - 1, device=offsets.device)
        self.filled = self._owner < offsets.shape[0] - 1
        """[T]: whether it is an expert's."""
        self._transposed = transposed

    def amax(self, values: Tensor) -> Tensor:
        """[E]."""
        each = values.abs().amax(1 - self._transposed)
        return torch.where(self._owner == self._experts[:, None], each, 0.0).amax(1)

    def block_amax(self, values: Tensor, block: tuple[int, int]) -> Tensor:
        """Transposed [R, ``most_blocks``]: those behind an expert's last block are 0."""
        if not self._transposed:
            return super().block_amax(values, block)
        number, expert = self._blocks(block)
        starts = self._starts[expert] + (number - self._firsts(block)[expert]) * block[1]
        columns = starts[:, None] + torch.arange(block[1], device=starts.device)
        inside = columns < self._ends[expert][:, None]
        each = values.abs()[:, columns.clamp(max=values.shape[1] - 1)]  # [R, blocks, block columns]
        return torch.where(inside, each, 0.0).amax(2)

    def to_elements(self, per_part: Tensor) -> Tensor:
        """[E] -> [T, 1]; transposed [1, T]."""
        each = self._padded(per_part)[self._owner]
        return each[None] if self._transposed else each[:, None]

    def to_blocks(self, per_part: Tensor, block: tuple[int, int]) -> Tensor:
        """[E] -> [T, 1]; transposed [1, ``most_blocks``]."""
        return self._padded(per_part)[self._blocks(block)[1]][None] if self._transposed else self.to_elements(per_part)

    def spread(self, per_block: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
        if not self._transposed:
            return super().spread(per_block, block, shape)
        within = (self._position - self._starts[self._owner]).div(block[1], rounding_mode="floor")
        return per_block[:, self._firsts(block)[self._owner] + within]

    def _firsts(self, block: tuple[int, int]) -> Tensor:
        """[E + 1]: each expert's first block."""
        counts = torch.arange(self._starts.shape[0], device=self._starts.device)
        return self._starts.div(block[1], rounding_mode="floor") + counts

    def _blocks(self, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The number of each block, and its expert; E where there is none."""
        firsts = self._firsts(block)
        length = -(-self._position.shape[0] // block[1]) + self._experts.shape[0]
        number = torch.arange(length, device=firsts.device, dtype=firsts.dtype)
        return number, torch.searchsorted(firsts[1:], number, right=True)

    @staticmethod
    def _padded(per_part: Tensor) -> Tensor:
        return torch.nn.functional.pad(per_part, (0, 1), value=1.0)
