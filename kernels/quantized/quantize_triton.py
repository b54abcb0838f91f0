"""The quantiser as Triton kernels: a tile of the matrix is read once, and both copies are written.

The formulas, and so the bits, are those of ``quantize.py``. Scales of a whole tensor need its largest magnitude first:
a kernel leaves the largest of each program's share, and the cast takes the largest of those. A scale that is given
needs no such pass; the cast then records the largest magnitude, by an atomic maximum. No host reads.

Legend: R rows; C columns.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import device_of
from ..triton_support import Launches
from .spec import Quantized, QuantSpec

__all__ = ["block_encode", "elements_of", "empty_copy", "quantize_block", "quantize_triton", "tensor_encode"]

_BLOCK = 128
"""Rows and columns of a block, and of a tile where scales are those of blocks."""
_PARTIALS = 512
"""At most so many programs look for the largest magnitude of a tensor."""
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_INF_BITS = tl.constexpr(0x7F800000)


def quantize_triton(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """x [R, C] as it is by ``rows``, and transposed by ``columns``; None: not this copy.

    scale  0-dim fp32, finite: what elements are multiplied by, where one scale is the tensor's. None: x decides
    amax   0-dim fp32, with a ``scale``: see ``quantize_both``

    Both specs are equal: one scale for the tensor, or powers of two for blocks of 1 x 128 or 128 x 128. Zeros follow
    the columns of each copy, up to a count that ``cublas.py`` takes.
    """
    spec = rows or columns
    assert spec is not None and (rows is None or columns is None or rows is columns or rows == columns), "one form"
    assert (scale is None or spec.block is None) and (amax is None or scale is not None), "one scale, which is given"
    if x.stride(1) != 1:
        x = x.contiguous()
    height, width = x.shape
    block, element, stride = spec.block, spec.element, x.stride(0)
    by_rows = None if rows is None else empty_copy(height, width, rows, x, transposed=False)
    shared = by_rows.scale if block is None and by_rows is not None else None
    by_columns = None if columns is None else empty_copy(width, height, columns, x, transposed=True, scale=shared)
    left, right = by_rows or by_columns, by_columns or by_rows
    assert left is not None and right is not None
    # Zeros behind the columns of a copy are written by programs beyond the matrix.
    rows_stride, columns_stride = left.data.shape[1], right.data.shape[1]
    down = height if by_columns is None else columns_stride
    across = width if by_rows is None else rows_stride
    sizes = height, width, stride, rows_stride, columns_stride
    arguments = (x, left.data, left.scale, right.data, right.scale, *sizes)
    constants = element.max, math.frexp(element.max)[1] - 1, rows is not None, columns is not None
    key = (x.get_device(), x.dtype, x.data_ptr() % 16, sizes, constants, block, _dtype_of(scale), _dtype_of(amax))
    with device_of(x):
        if block is None:
            decides = _of_largest(x, key) if scale is None else (None, 0, scale, amax)
            grid = -(-down // 128), -(-across // 64), 1
            _launch_tiles(key, grid, *arguments, *decides, *constants, 128, 64)
        else:
            grid = -(-down // _BLOCK), -(-across // _BLOCK), 1
            if block == (1, _BLOCK):
                _launch_rows(key, grid, *arguments, *constants, 8, 32)
            else:
                _launch_squares(key, grid, *arguments, *_OWN, *constants, _BLOCK, _BLOCK)
    return by_rows, by_columns


def empty_copy(
    rows: int, columns: int, spec: QuantSpec, beside: Tensor, *, transposed: bool, scale: Tensor | None = None
) -> Quantized:
    """A matrix [rows, columns] without elements yet; scales lie as cuBLAS reads them.

    scale  0-dim, where one scale is the tensor's: another copy's; None: a new one

    Scales of 1 x 128 of one block column lie together, those of 128 x 128 of one block row. The latter come in fours;
    and so do those of 1 x 128 but for transposed copies, which only meet one another.
    """
    dtype = spec.element.dtype
    if spec.block is None:
        data = beside.new_empty(rows, -(-columns // 16) * 16, dtype=dtype)
        scale = beside.new_empty((), dtype=torch.float32) if scale is None else scale
        return Quantized(data, scale, None, spec, columns)
    square = spec.block != (1, _BLOCK)
    count = _BLOCK if transposed and not square else 4 * _BLOCK
    blocks = -(-columns // count) * (count // _BLOCK)
    data = beside.new_empty(rows, blocks * _BLOCK, dtype=dtype)
    if square:
        scale = beside.new_empty(-(-rows // _BLOCK), blocks, dtype=torch.float32)
    else:
        scale = beside.new_empty(blocks, rows, dtype=torch.float32).t()
    return Quantized(data, scale, None, spec, columns)


def _dtype_of(value: Tensor | None) -> torch.dtype | None:
    return None if value is None else value.dtype


_OWN: Any = (None, 0, None, None)
"""``partial``, ``PARTIALS``, ``given`` and ``amax`` of ``_tile_kernel`` where each tile has a scale of its own."""


def _of_largest(x: Tensor, key: Any) -> Any:
    """The same, where the tensor's largest magnitude decides."""
    height, width = x.shape
    tiles = -(-height // 32) * -(-width // 256)
    # [a power of two] bits of the largest magnitudes. NaN is larger than Inf, as bits.
    programs = min(_PARTIALS, 1 << (tiles.bit_length() - 1))
    partial = x.new_empty(programs, dtype=torch.int32)
    _launch_amax(key, (programs, 1, 1), x, partial, height, width, x.stride(0), tiles, 32, 256)
    return partial, programs, None, None


@triton.jit
def _amax_kernel(
    x: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    tiles: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, WIDTH)
    largest = tl.zeros((HEIGHT, WIDTH), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
        column = tile % across * WIDTH + tl.arange(0, WIDTH)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        values = tl.load(x + row[:, None] * stride + column[None, :], inside, other=0.0)
        largest = tl.maximum(largest, values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(partial + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def tensor_encode(bits: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    """What elements are multiplied by, from the bits of the largest magnitude."""
    amax = bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax), _FP32_MAX)
    return tl.where((bits == 0) | (bits >= _INF_BITS), 1.0, encode)


@triton.jit
def block_encode(bits: tl.tensor, EXPONENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The same for powers of two, and the scale: without a division, which each thread would do for many blocks.

    An element's largest magnitude is 1.75 * 2^EXPONENT, so max / amax is at least its power of two where the mantissa
    of amax is at most 1.75, and rounding never lifts it there.
    """
    power = EXPONENT + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.where((bits == 0) | (bits >= _INF_BITS), 0, tl.minimum(power, 127))
    scale = tl.where(power == 127, 0x400000, (127 - power) << 23)  # 2^-127 has no bit in the exponent
    return ((power + 127) << 23).to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton.jit
def elements_of(values: tl.tensor, MAX: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    return tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _record(amax: tl.tensor, bits: tl.tensor) -> None:
    """Raise ``amax`` to the magnitude whose bits are given: as integers they are ordered as magnitudes are.

    -1, which stands for none, comes first. Few programs find more than is recorded, and only those write.
    """
    place = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(place, bits, bits > tl.load(place), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["given", "amax"])  # entries of small vectors, at any of their places
def _tile_kernel(
    x: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    partial: tl.tensor,
    PARTIALS: tl.constexpr,
    given: tl.tensor,
    amax: tl.tensor,
    MAX: tl.constexpr,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Both copies of a tile that has one scale: the tensor's, given or from PARTIALS largest magnitudes, or its own.

    amax  None: nothing is recorded
    """
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    row = (row_block * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    column = (column_block * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32)
    if PARTIALS or given is not None:
        if PARTIALS:
            encode = tensor_encode(tl.max(tl.load(partial + tl.arange(0, PARTIALS)), 0), MAX)
        else:
            encode = tl.load(given)
        if amax is not None:
            bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bits = tl.where(bits > _INF_BITS, 0, bits)  # NaN
            _record(amax, tl.max(tl.max(bits, 1), 0))
        if (row_block == 0) & (column_block == 0):
            tl.store(row_scales, tl.div_rn(1.0, encode))
    else:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        encode, scale = block_encode(tl.max(tl.max(bits, 1), 0), EXPONENT)
        if ROWS:
            place = row_scales + row_block * (rows_stride // WIDTH) + column_block
            tl.store(place, scale, row_block * HEIGHT < rows)
        if COLUMNS:
            place = column_scales + column_block * (columns_stride // HEIGHT) + row_block
            tl.store(place, scale, column_block * WIDTH < columns)
    values = values * encode
    if ROWS:
        place = by_rows + row.to(tl.int64) * rows_stride + column
        tl.store(place, elements_of(values, MAX, by_rows.dtype.element_ty), (row < rows) & (column < rows_stride))
    if COLUMNS:
        elements = tl.trans(elements_of(values, MAX, by_columns.dtype.element_ty))
        row, column = tl.trans(row), tl.trans(column)
        place = by_columns + column.to(tl.int64) * columns_stride + row
        tl.store(place, elements, (column < columns) & (row < columns_stride))


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    MAX: tl.constexpr,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0) * 128
    # fmt: off
    quantize_block(
        x, by_rows, row_scales, by_columns, column_scales,
        row, rows, rows, row, columns_stride, tl.program_id(0), True, tl.program_id(1),
        rows, columns, stride, rows_stride, columns_stride, MAX, EXPONENT, ROWS, COLUMNS, GROUPS, LANES,
    )
    # fmt: on


@triton.jit
def quantize_block(
    x: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    filled: tl.tensor,
    position: tl.tensor,
    last: tl.tensor,
    block: tl.tensor,
    has_columns: tl.tensor,
    column_block: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    MAX: tl.constexpr,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Both copies of a tile of 128 x 128 with a scale for each row, and another for each column.

    The tile has rows ``first`` to ``end`` of x; those from ``filled`` on are zeros. Its columns in a transposed copy
    (``has_columns``) begin at ``position`` and end before ``last``; their scales are those of ``block``.

    The tile has four dims, [128 / LANES, GROUPS, LANES, 128 / GROUPS], so that a warp holds whole columns: its lanes
    are the third dim, and the warps the second. With two dims the warps would lie along the rows, and the largest
    magnitudes of columns go through shared memory, slowly.
    """
    DEPTH: tl.constexpr = 128 // LANES
    WIDTH: tl.constexpr = 128 // GROUPS
    rows_2d = first + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    columns_2d = column_block * 128 + tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    row, column = rows_2d[:, None, :, None], columns_2d[None, :, None, :]
    inside = (row < filled) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if ROWS:
        encode, scale = block_encode(tl.max(tl.max(bits, 3), 1), EXPONENT)
        tl.store(row_scales + column_block.to(tl.int64) * rows + rows_2d, scale, rows_2d < end)
        elements = elements_of(values * encode[:, None, :, None], MAX, by_rows.dtype.element_ty)
        place = by_rows + row.to(tl.int64) * rows_stride + column
        tl.store(place, elements, (row < end) & (column < rows_stride))
    if COLUMNS:
        encode, scale = block_encode(tl.max(tl.max(bits, 0), 1), EXPONENT)
        scales = column_scales + block.to(tl.int64) * columns
        tl.store(scales + columns_2d, scale, (columns_2d < columns) & has_columns)
        elements = elements_of(values * encode[None, :, None, :], MAX, by_columns.dtype.element_ty)
        elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2)), (128, 128))
        column = (column_block * 128 + tl.arange(0, 128))[:, None]
        token = (position + tl.arange(0, 128))[None, :]
        place = by_columns + column.to(tl.int64) * columns_stride + token
        tl.store(place, elements, (column < columns) & (token < last) & has_columns)


_launch_amax = Launches(_amax_kernel, num_warps=8)
_launch_tiles = Launches(_tile_kernel, num_warps=4)
_launch_squares = Launches(_tile_kernel, num_warps=8)
_launch_rows = Launches(_rows_kernel, num_warps=4)
