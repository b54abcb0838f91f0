"""Quantised rows of experts: each expert's rows are a matrix of their own, in one tensor with the others'.

Legend: E experts, T rows, C columns. Expert e has the rows from offsets[e] up to, but not including, offsets[e + 1].
Rows from offsets[E] on are padding. Offsets stay on the device, and the host reads nothing.

Transposed, an expert's rows become columns, along which a product contracts. First come the whole blocks of 128 columns
of each expert, which begin at cache lines; behind the last expert's comes what is left of each expert, filled up with
columns of zeros to a multiple of a small width. So a copy needs (width - 1) columns an expert more than there are rows
at most, and kernels read nearly all of it by whole cache lines. The device alone knows how many columns there are.

Blocks begin anew at each expert, so that no block lies in two. With part p = e of ``offsets`` for the whole blocks of
expert e, and p = E + e for the rest, a part's scales begin at ``offsets[p] // block + max(p - E, 0)``: then they fit,
whatever the split sizes are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .quantize import Parts, decode, encode
from .spec import Quantized, QuantSpec

__all__ = [
    "GroupedQuantized",
    "dequantize_grouped",
    "most_columns",
    "quantize_grouped",
    "rows_of_experts",
]

_ROTATED = 16
"""Columns that a Hadamard transform mixes."""
_LINE = 128
"""Bytes of a cache line. Where columns begin within one, kernels read two for each: a third slower."""
_ALIGNED = 16
"""Bytes at whose multiples the copy engine of a GPU (TMA) begins to read."""


class GroupedQuantized(NamedTuple):
    """A quantised matrix whose rows, or columns, are experts' one after the other."""

    matrix: Quantized
    """[T, C]; transposed [C, T and what fills up]. Instead of one scale (where the spec has no blocks) and one factor
    of the matrix there is one for each expert, [E]; transposed, blocks' scales are [C, ceil(columns / block) + E]."""
    offsets: Tensor
    """[E + 1]: the rows of each expert; transposed [2 E + 1]: the columns of each expert's whole blocks, then of each
    expert's rest."""
    transposed: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is in memory."""
        return (*self.matrix.tensors, self.offsets)


def quantize_grouped(x: Tensor, spec: QuantSpec, offsets: Tensor, *, transposed: bool = False) -> GroupedQuantized:
    """Quantise each expert's rows as ``quantize`` does, or their transpose.

    x           [T, C], bf16, fp16 or fp32, any strides. Pad rows, which may hold anything, become zeros
    offsets     [E + 1], int32 or int64, ascending from 0, at most T; on the device of x
    transposed  quantise the transpose of each expert's rows, [C, rows]

    An expert may have no rows. Raises ``ValueError`` for blocks of several rows, and for an x that is no matrix
    with elements.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"quantize_grouped takes a matrix that has elements, got {tuple(x.shape)}")
    if spec.block is not None and spec.block[0] != 1:
        raise ValueError(f"blocks of {spec.block[0]} rows are for weights; experts' rows have blocks of one: {spec}")
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


def rows_of_experts(q: GroupedQuantized, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The values of a transposed copy as rows, each expert's together: [columns, C], and offsets [E + 1].

    Zeros follow the rows of each expert.
    """
    sizes = q.offsets.diff().view(2, -1).sum(0)
    owner = _Experts(q.offsets, q.matrix.columns, transposed=True).owner
    in_order = dequantize_grouped(q, dtype).t()[owner.argsort(stable=True)]
    return in_order, torch.nn.functional.pad(sizes.cumsum(0, dtype=q.offsets.dtype), (1, 0))


def most_columns(rows: int, num_experts: int, spec: QuantSpec) -> int:
    """The columns of a transposed copy of ``rows`` rows at most, whatever the split sizes are."""
    width = _width(spec)
    columns = (rows + (width - 1) * min(num_experts, rows)) // width * width
    return -(-columns // _LINE) * _LINE  # so that each row begins at a cache line


def _width(spec: QuantSpec) -> int:
    """The columns of an expert are a multiple of this."""
    if spec.block is None or spec.block[1] == _LINE:
        return _ALIGNED
    return math.lcm(spec.block[1], _ROTATED if spec.rotated else 1)


def _segments(offsets: Tensor, rows: int, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """``GroupedQuantized.offsets`` of a transposed copy; and for each of its columns the row of x, or -1."""
    experts, width = offsets.shape[0] - 1, _width(spec)
    sizes = offsets.diff()
    whole = sizes.div(_LINE, rounding_mode="floor") * _LINE
    rest = (sizes - whole + (width - 1)).div(width, rounding_mode="floor") * width
    parts = torch.nn.functional.pad(torch.cat([whole, rest]).cumsum(0, dtype=offsets.dtype), (1, 0))
    column = torch.arange(most_columns(rows, experts, spec), device=offsets.device, dtype=offsets.dtype)
    part = torch.searchsorted(parts[1:], column, right=True).clamp(max=2 * experts - 1)
    expert = part % experts
    row = column - parts[part] + offsets[expert] + torch.where(part < experts, 0, whole[expert])
    return parts, torch.where(row < offsets[expert + 1], row, -1)


class _Experts(Parts):
    """Each expert's rows, or columns (``transposed``). What is no expert's has the amax 0, scale and factor 1."""

    def __init__(self, offsets: Tensor, length: int, transposed: bool) -> None:
        parts = offsets.shape[0] - 1
        self._num_experts = parts // 2 if transposed else parts
        self._position = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
        part = torch.searchsorted(offsets[1:], self._position, right=True)
        self.filled = part < parts
        """[T]: whether it is an expert's."""
        self.owner = torch.where(self.filled, part % self._num_experts, self._num_experts)
        """[T]: the expert; E: none."""
        self._start = offsets[part]
        self._blocks_more = (part - self._num_experts).clamp(min=0)
        """[T]: the first position of its part; and the rests of experts before it, whose last blocks may be smaller."""
        self._transposed = transposed

    def amax(self, values: Tensor) -> Tensor:
        """[E]."""
        each = values.abs().amax(1 - self._transposed)
        experts = torch.arange(self._num_experts, device=each.device)
        return torch.where(self.owner == experts[:, None], each, 0.0).amax(1)

    def block_amax(self, values: Tensor, block: tuple[int, int]) -> Tensor:
        """Transposed [R, number of blocks]: those behind an expert's last block are 0."""
        if not self._transposed:
            return super().block_amax(values, block)
        columns, inside = self._columns_of_blocks(block[1])
        return torch.where(inside, values.abs()[:, columns], 0.0).amax(2)

    def to_elements(self, per_part: Tensor) -> Tensor:
        """[E] -> [T, 1]; transposed [1, T]."""
        each = self._padded(per_part)[self.owner]
        return each[None] if self._transposed else each[:, None]

    def to_blocks(self, per_part: Tensor, block: tuple[int, int]) -> Tensor:
        """[E] -> [T, 1]; transposed [1, number of blocks]."""
        if not self._transposed:
            return self.to_elements(per_part)
        columns, _ = self._columns_of_blocks(block[1])
        return self._padded(per_part)[self.owner[columns[:, 0]]][None]

    def spread(self, per_block: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
        return per_block[:, self._blocks(block[1])] if self._transposed else super().spread(per_block, block, shape)

    def _blocks(self, width: int) -> Tensor:
        """[T]: the number of each column's block, in ascending order."""
        of_parts = self._start.div(width, rounding_mode="floor") + self._blocks_more
        return of_parts + (self._position - self._start).div(width, rounding_mode="floor")

    def _columns_of_blocks(self, width: int) -> tuple[Tensor, Tensor]:
        """[number of blocks, width]: columns from the first of each block on, and whether they are the block's."""
        blocks = self._blocks(width)
        length = blocks.shape[0]
        numbers = torch.arange(-(-length // width) + self._num_experts, device=blocks.device, dtype=blocks.dtype)
        columns = torch.searchsorted(blocks, numbers)[:, None] + torch.arange(width, device=blocks.device)
        inside = columns < length
        columns = columns.clamp(max=length - 1)
        return columns, inside & (blocks[columns] == numbers[:, None])

    @staticmethod
    def _padded(per_part: Tensor) -> Tensor:
        return torch.nn.functional.pad(per_part, (0, 1), value=1.0)
