"""The quantiser as Triton kernels: a tile of the matrix is read once, and both copies are written.

The formulas, and so the bits, are those of ``quantize.py``. Scales of a whole tensor need its largest magnitude first:
a kernel leaves the largest of each program's share, and the cast takes the largest of those. No atomics, no host reads.

Legend: R rows; C columns; P programs of the first kernel.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_support import num_multiprocessors
from .spec import Quantized, QuantSpec

__all__ = ["quantize_triton"]

_BLOCK = 128
"""Rows and columns of a tile where scales are those of blocks."""
_TENSOR_TILE = (128, 64, 4)
"""Rows, columns and warps where one scale is that of the tensor."""
_WARPS = {"square": 8, "rows": 8}
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_INF_BITS = tl.constexpr(0x7F800000)


def quantize_triton(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """x [R, C] as it is by ``rows``, and transposed by ``columns``; None: not this copy.

    Both specs are equal: one scale for the tensor, or powers of two for blocks of 1 x 128 or 128 x 128. Zeros follow
    the columns of each copy, up to a count that ``cublas.py`` takes.
    """
    spec = rows or columns
    assert spec is not None and (rows is None or columns is None or rows == columns), "one form"
    if x.stride(1) != 1:
        x = x.contiguous()
    height, width = x.shape
    by_rows = None if rows is None else _empty(height, width, rows, transposed=False, beside=x)
    by_columns = None if columns is None else _empty(width, height, columns, transposed=True, beside=x)
    if spec.block is None:
        form, (tile_rows, tile_columns, warps) = "tensor", _TENSOR_TILE
        partial, scale = _largest(x), x.new_empty((), dtype=torch.float32)
        by_rows = None if by_rows is None else by_rows._replace(scale=scale)
        by_columns = None if by_columns is None else by_columns._replace(scale=scale)
    else:
        form, tile_rows, tile_columns = "square" if spec.block[0] > 1 else "rows", _BLOCK, _BLOCK
        partial, warps = None, _WARPS[form]
    left, right = by_rows or by_columns, by_columns or by_rows
    assert left is not None and right is not None
    # Zeros behind the columns of a copy are written by programs beyond the matrix.
    down = max(height, right.data.shape[1] if by_columns is not None else 0)
    across = max(width, left.data.shape[1] if by_rows is not None else 0)
    _cast_kernel[(triton.cdiv(down, tile_rows), triton.cdiv(across, tile_columns))](
        x,
        partial,
        left.data,
        left.scale,
        right.data,
        right.scale,
        height,
        width,
        x.stride(0),
        left.data.stride(0),
        right.data.stride(0),
        _apart(left),
        _apart(right),
        0 if partial is None else partial.numel(),
        1 if partial is None else triton.next_power_of_2(partial.numel()),
        spec.element.max,
        math.frexp(spec.element.max)[1] - 1,
        form,
        by_rows is not None,
        by_columns is not None,
        tile_rows,
        tile_columns,
        num_warps=warps,
    )
    return by_rows, by_columns


def _empty(rows: int, columns: int, spec: QuantSpec, *, transposed: bool, beside: Tensor) -> Quantized:
    """A matrix [rows, columns] without elements yet; scales lie as cuBLAS reads them.

    Scales of 1 x 128 of one block column lie together, those of 128 x 128 of one block row. The latter come in fours;
    and so do those of 1 x 128 but for transposed copies, which only meet one another.
    """
    if spec.block is None:
        data = beside.new_empty(rows, -(-columns // 16) * 16, dtype=spec.element.dtype)
        return Quantized(data, data, None, spec, columns)
    square = spec.block[0] > 1
    count = _BLOCK if transposed and not square else 4 * _BLOCK
    blocks = -(-columns // count) * (count // _BLOCK)
    data = beside.new_empty(rows, blocks * _BLOCK, dtype=spec.element.dtype)
    if square:
        scale = beside.new_empty(-(-rows // _BLOCK), blocks, dtype=torch.float32)
    else:
        scale = beside.new_empty(blocks, rows, dtype=torch.float32).t()
    return Quantized(data, scale, None, spec, columns)


def _apart(q: Quantized) -> int:
    """Elements between the scales of two blocks that follow one another where scales do not lie together."""
    return 0 if q.spec.block is None else q.scale.stride(0 if q.spec.block[0] > 1 else 1)


def _largest(x: Tensor) -> Tensor:
    """[P] int32: bits of the largest magnitudes. NaN is larger than Inf, as bits."""
    tiles = triton.cdiv(x.shape[0], 32) * triton.cdiv(x.shape[1], 256)
    programs = min(tiles, 4 * num_multiprocessors(x.device))
    partial = x.new_empty(programs, dtype=torch.int32)
    _amax_kernel[(programs,)](x, partial, x.shape[0], x.shape[1], x.stride(0), tiles, 32, 256, num_warps=8)
    return partial


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
def _tensor_encode(bits: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    """What elements are multiplied by, from the bits of the largest magnitude."""
    amax = bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax), _FP32_MAX)
    return tl.where((bits == 0) | (bits >= _INF_BITS), 1.0, encode)


@triton.jit
def _block_encode(bits: tl.tensor, EXPONENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The same for powers of two, and the scale: without a division, which each thread would do for many blocks.

    An element's largest magnitude is 1.75 * 2^EXPONENT, so max / amax is at least its power of two where the mantissa
    of amax is at most 1.75, and rounding never lifts it there.
    """
    power = EXPONENT + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.where((bits == 0) | (bits >= _INF_BITS), 0, tl.minimum(power, 127))
    scale = tl.where(power == 127, 0x400000, (127 - power) << 23)  # 2^-127 has no bit in the exponent
    return ((power + 127) << 23).to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton.jit
def _elements(values: tl.tensor, MAX: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    return tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _cast_kernel(
    x: tl.tensor,
    partial: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    row_scales_stride: tl.tensor,
    column_scales_stride: tl.tensor,
    partials: tl.tensor,
    PARTIALS: tl.constexpr,
    MAX: tl.constexpr,
    EXPONENT: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    row = row_block * HEIGHT + tl.arange(0, HEIGHT)
    column = column_block * WIDTH + tl.arange(0, WIDTH)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], inside, other=0.0).to(tl.float32)
    if FORM == "tensor":
        index = tl.arange(0, PARTIALS)
        encode = _tensor_encode(tl.max(tl.load(partial + index, index < partials, other=0), 0), MAX)
        if (row_block == 0) & (column_block == 0):
            tl.store(row_scales, tl.div_rn(1.0, encode))
        for_rows = values * encode
        for_columns = for_rows
    else:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if FORM == "square":
            encode, scale = _block_encode(tl.max(tl.max(bits, 1), 0), EXPONENT)
            if ROWS:
                place = row_scales + row_block * row_scales_stride + column_block
                tl.store(place, scale, row_block * HEIGHT < rows)
            if COLUMNS:
                place = column_scales + column_block * column_scales_stride + row_block
                tl.store(place, scale, column_block * WIDTH < columns)
            for_rows = values * encode
            for_columns = for_rows
        else:
            encode_rows, scale_rows = _block_encode(tl.max(bits, 1), EXPONENT)
            encode_columns, scale_columns = _block_encode(tl.max(bits, 0), EXPONENT)
            if ROWS:
                tl.store(row_scales + column_block * row_scales_stride + row, scale_rows, row < rows)
            if COLUMNS:
                tl.store(column_scales + row_block * column_scales_stride + column, scale_columns, column < columns)
            for_rows = values * encode_rows[:, None]
            for_columns = values * encode_columns[None, :]
    if ROWS:
        elements = _elements(for_rows, MAX, by_rows.dtype.element_ty)
        place = by_rows + row[:, None].to(tl.int64) * rows_stride + column[None, :]
        tl.store(place, elements, (row[:, None] < rows) & (column[None, :] < rows_stride))
    if COLUMNS:
        elements = _elements(for_columns, MAX, by_columns.dtype.element_ty)
        place = by_columns + column[:, None].to(tl.int64) * columns_stride + row[None, :]
        tl.store(place, tl.trans(elements), (column[:, None] < columns) & (row[None, :] < columns_stride))
