"""The quantiser for experts as Triton kernels: rows of experts, and matrices of experts. The bits are the reference's.

Legend: E experts, T rows, R rows of a matrix, C columns. The rows of an expert are cut into tiles of 128, beginning at
its first row: a tile is one expert's. It is read once, and both copies are written. Where the columns of a transposed
copy lie is in ``grouped.py``.

Where an expert has one scale, a kernel finds its largest magnitude first, by atomic maxima of bits, which do not depend
on the order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import device_of
from ..experts import PerExpert, locate_experts
from ..triton_support import Launches, expert_pointer, triton_dtype
from .grouped import GroupedQuantized, QuantizedExperts, empty_columns, empty_rows
from .quantize_triton import block_encode, elements_of, quantize_block, tensor_encode
from .spec import QuantSpec

__all__ = ["quantize_experts_triton", "quantize_grouped_triton"]

_TILE = 128
_CHUNK = 1024
"""Columns in which one program looks for the largest magnitude."""


def quantize_grouped_triton(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, offsets: Tensor
) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
    """Each expert's rows of x [T, C] as they are by ``rows``, and transposed by ``columns``; None: not this copy.

    Both specs are equal: one scale for each expert, or powers of two for blocks of 1 x 128. A copy as it is holds zeros
    for pad rows. What lies behind the last expert's columns of a transposed copy is not written.
    """
    spec = rows or columns
    assert spec is not None and (rows is None or columns is None or rows == columns), "one form"
    if x.stride(1) != 1:
        x = x.contiguous()
    (height, width), num_experts = x.shape, offsets.shape[0] - 1
    by_rows = None if rows is None else empty_rows(x, rows, num_experts)
    segments = None if columns is None else offsets.new_empty(2 * num_experts + 1)
    by_columns = None if columns is None else empty_columns(x, columns, num_experts)
    if spec.block is None and by_rows is not None and by_columns is not None:
        by_columns = by_columns._replace(scale=by_rows.scale)
    left, right = by_rows or by_columns, by_columns or by_rows
    assert left is not None and right is not None
    tiles = height // _TILE + min(num_experts + 1, height)  # each expert has at most one partial tile
    across = width if by_rows is None else by_rows.data.shape[1]
    sizes = num_experts, height, width, x.stride(0), left.data.stride(0), right.data.stride(0)
    forms = rows is not None, columns is not None, spec.element.max, 1 << num_experts.bit_length()
    key = (x.get_device(), x.dtype, x.data_ptr() % 16, offsets.dtype, offsets.data_ptr() % 16, sizes, forms)
    with device_of(x):
        if spec.block is None:
            amax = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
            _launch_rows_amax(
                key, (tiles, -(-width // _CHUNK), 1), x, offsets, amax, *sizes[:4], forms[3], 8, 256, _CHUNK
            )
            _launch_rows(
                key, (tiles, -(-across // 256), 1), x, offsets, amax, left.data, left.scale, right.data, segments,
                *sizes, *forms,
            )  # fmt: skip
        else:
            exponent = math.frexp(spec.element.max)[1] - 1
            _launch_blocks(
                key, (tiles, -(-across // _TILE), 1), x, offsets, left.data, left.scale, right.data, right.scale,
                segments, *sizes, *forms, exponent, 8, 32,
            )  # fmt: skip
    of_columns = None
    if by_columns is not None:
        assert segments is not None
        of_columns = GroupedQuantized(by_columns, segments, transposed=True)
    return None if by_rows is None else GroupedQuantized(by_rows, offsets, transposed=False), of_columns


@triton.jit
def _find_tile(program: tl.tensor, offsets: tl.tensor, E: tl.tensor, T: tl.tensor, BLOCK_E: tl.constexpr) -> tl.tensor:
    """Expert, first row of the tile, end of the expert's rows; the tile's columns in a transposed copy, and its block.

    Expert E stands for the rows behind the last expert. A program without a tile gets an expert above E.
    """
    groups = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + groups, mask=groups <= E, other=0).to(tl.int32)
    ends = tl.load(offsets + groups + 1, mask=groups < E, other=0).to(tl.int32)
    ends = tl.where(groups == E, T, ends)
    sizes = tl.where(groups <= E, ends - starts, 0)
    tiles = tl.cdiv(sizes, 128)
    tiles_until = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_until <= program).to(tl.int32), 0)
    mine = groups == expert
    down = (program - tl.sum(tl.where(mine, tiles_until - tiles, 0), 0)) * 128
    row = tl.sum(tl.where(mine, starts, 0), 0) + down
    end = tl.sum(tl.where(mine, ends, 0), 0)
    whole, rest = _parts(tl.where(groups < E, sizes, 0))
    complete = row + 128 <= end
    of_rest = tl.sum(whole, 0) + tl.sum(tl.where(groups < expert, rest, 0), 0)
    first = tl.where(complete, tl.sum(tl.where(groups < expert, whole, 0), 0) + down, of_rest)
    last = first + tl.where(complete, 128, tl.sum(tl.where(mine, rest, 0), 0))
    first, last = tl.multiple_of(first, 16), tl.multiple_of(last, 16)  # so that stores move 16 bytes
    return expert, row, end, first, last, first // 128 + tl.where(complete, 0, expert)


@triton.jit
def _parts(sizes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The columns of experts' whole blocks, and of the rest."""
    whole = sizes // 128 * 128
    return whole, tl.cdiv(sizes - whole, 16) * 16


@triton.jit
def _store_segments(segments: tl.tensor, offsets: tl.tensor, E: tl.tensor, BLOCK_E: tl.constexpr) -> None:
    groups = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + groups, mask=groups < E, other=0)
    ends = tl.load(offsets + groups + 1, mask=groups < E, other=0)
    whole, rest = _parts(ends - starts)
    tl.store(segments, 0)
    tl.store(segments + 1 + groups, tl.cumsum(whole, 0), groups < E)
    tl.store(segments + 1 + E + groups, tl.sum(whole, 0) + tl.cumsum(rest, 0), groups < E)


@triton.jit
def _rows_amax_kernel(
    x: tl.tensor,
    offsets: tl.tensor,
    amax: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    BLOCK_E: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """amax [E]: bits of the largest magnitude of each expert's rows. NaN is larger than Inf, as bits."""
    expert, row, end, _, _, _ = _find_tile(tl.program_id(0), offsets, E, T, BLOCK_E)
    if expert < E:
        bits = _largest(x, row, tl.minimum(row + 128, end), C, stride, HEIGHT, WIDTH, CHUNK)
        tl.atomic_max(amax + expert, bits)


@triton.jit
def _largest(
    x: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Bits of the largest magnitude in rows ``first`` to ``end`` of the program's CHUNK of columns."""
    largest = tl.zeros((HEIGHT, WIDTH), tl.int32)
    for down in tl.range(first, end, HEIGHT):
        row = (down + tl.arange(0, HEIGHT))[:, None]
        for chunk in tl.static_range(0, CHUNK, WIDTH):
            column = (tl.program_id(1) * CHUNK + chunk + tl.arange(0, WIDTH))[None, :]
            values = tl.load(x + row.to(tl.int64) * stride + column, (row < end) & (column < C), other=0.0)
            largest = tl.maximum(largest, values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def _rows_of_experts_kernel(
    x: tl.tensor,
    offsets: tl.tensor,
    amax: tl.tensor,
    by_rows: tl.tensor,
    scales: tl.tensor,
    by_columns: tl.tensor,
    segments: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Both copies of a tile [128, 256] that has its expert's scale, 64 columns at a time."""
    expert, row, end, position, last, _ = _find_tile(tl.program_id(0), offsets, E, T, BLOCK_E)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        groups = tl.arange(0, BLOCK_E)
        each = tl.load(amax + groups, mask=groups < E, other=0)
        tl.store(scales + groups, tl.div_rn(1.0, tensor_encode(each, MAX)), groups < E)
        if COLUMNS:
            _store_segments(segments, offsets, E, BLOCK_E)
    if expert <= E:
        m = (row + tl.arange(0, 128))[:, None]
        token = (position + tl.arange(0, 128))[None, :]
        encode = tensor_encode(tl.load(amax + expert, expert < E, other=0), MAX)
        filled = tl.where(expert < E, end, row)  # pad rows, which may hold anything, become zeros
        for block in tl.range(tl.program_id(1) * 256, tl.program_id(1) * 256 + 256, 64):
            column = (block + tl.arange(0, 64))[None, :]
            inside = (m < filled) & (column < C)
            values = tl.load(x + m.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32) * encode
            if ROWS:
                place = by_rows + m.to(tl.int64) * rows_stride + column
                elements = elements_of(values, MAX, by_rows.dtype.element_ty)
                tl.store(place, elements, (m < end) & (column < rows_stride))
            if COLUMNS:
                elements = tl.trans(elements_of(values, MAX, by_columns.dtype.element_ty))
                column = tl.trans(column)
                place = by_columns + column.to(tl.int64) * columns_stride + token
                tl.store(place, elements, (column < C) & (token < last) & (expert < E))


@triton.jit
def _blocks_of_experts_kernel(
    x: tl.tensor,
    offsets: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    segments: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EXPONENT: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Both copies of a tile [128, 128] with scales of 1 x 128, along the columns and along the rows."""
    expert, row, end, position, last, block = _find_tile(tl.program_id(0), offsets, E, T, BLOCK_E)
    if COLUMNS and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        _store_segments(segments, offsets, E, BLOCK_E)
    if expert <= E:
        # fmt: off
        quantize_block(
            x, by_rows, row_scales, by_columns, column_scales,
            row, end, tl.where(expert < E, end, row), position, last, block, expert < E, tl.program_id(1),
            T, C, stride, rows_stride, columns_stride, MAX, EXPONENT, ROWS, COLUMNS, GROUPS, LANES,
        )
        # fmt: on


def quantize_experts_triton(
    matrices: PerExpert, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[QuantizedExperts | None, QuantizedExperts | None]:
    """Each expert's matrix [R, C] as it is by ``rows``, and transposed by ``columns``; None: not this copy.

    Both specs are equal: one scale for each matrix, or powers of two for blocks of 128 x 128. The matrices have
    adjacent columns, and equal row strides.
    """
    spec = rows or columns
    assert spec is not None and (rows is None or columns is None or rows == columns), "one form"
    num_experts, (height, width) = len(matrices), matrices[0].shape
    experts = locate_experts(matrices)
    by_rows = None if rows is None else _matrices_copy(experts.base, num_experts, height, width, rows)
    by_columns = None if columns is None else _matrices_copy(experts.base, num_experts, width, height, columns)
    if spec.block is None and by_rows is not None and by_columns is not None:
        by_columns = by_columns._replace(scale=by_rows.scale)
    left, right = by_rows or by_columns, by_columns or by_rows
    assert left is not None and right is not None
    down = height if by_columns is None else by_columns.data.shape[2]
    across = width if by_rows is None else by_rows.data.shape[2]
    base, whole = experts.base, spec.block is None
    place = base, experts.table, experts.first, experts.step, experts.stride, base.stride(0)
    sizes = num_experts, height, width
    spaced = triton_dtype(base.dtype), experts.table is not None, experts.aligned
    constants = spec.element.max, math.frexp(spec.element.max)[1] - 1, rows is not None, columns is not None
    key = (base.get_device(), base.dtype, base.data_ptr() % 16, place[2:], sizes, spaced[1:], constants, whole)
    amax = None
    with device_of(base):
        if whole:
            amax = torch.zeros(num_experts, dtype=torch.int32, device=base.device)
            tiles = -(-height // 32)
            grid = num_experts * tiles, -(-width // _CHUNK), 1
            _launch_matrices_amax(key, grid, *place, amax, *sizes, tiles, *spaced, 8, 256, _CHUNK)
        copies = left.data, left.scale, right.data, right.scale
        strides = left.data.stride(1), right.data.stride(1)
        tile = (128, 64) if whole else (_TILE, _TILE)
        tiles = -(-down // tile[0])
        grid = num_experts * tiles, -(-across // tile[1]), 1
        launch = _launch_matrices if whole else _launch_squares
        launch(key, grid, *place, amax, *copies, *sizes, tiles, *strides, *spaced, *constants, whole, *tile)
    return by_rows, by_columns


def _matrices_copy(beside: Tensor, num_experts: int, rows: int, columns: int, spec: QuantSpec) -> QuantizedExperts:
    data = beside.new_empty(num_experts, rows, -(-columns // 16) * 16, dtype=spec.element.dtype)
    shape = (num_experts,) if spec.block is None else (num_experts, -(-rows // _TILE), -(-columns // _TILE))
    return QuantizedExperts(data, beside.new_empty(shape, dtype=torch.float32), None, spec, columns)


@triton.jit
def _matrices_amax_kernel(
    base: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    stride_expert: tl.tensor,
    stride: tl.tensor,
    amax: tl.tensor,
    E: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    tiles: tl.tensor,
    DTYPE: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """amax [E]: bits of the largest magnitude of each matrix."""
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    x = expert_pointer(base, table, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED)
    bits = _largest(x, tile * 32, tl.minimum(tile * 32 + 32, R), C, stride, HEIGHT, WIDTH, CHUNK)
    tl.atomic_max(amax + expert, bits)


@triton.jit
def _matrices_kernel(
    base: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    stride_expert: tl.tensor,
    stride: tl.tensor,
    amax: tl.tensor,
    by_rows: tl.tensor,
    row_scales: tl.tensor,
    by_columns: tl.tensor,
    column_scales: tl.tensor,
    E: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    tiles: tl.tensor,
    rows_stride: tl.tensor,
    columns_stride: tl.tensor,
    DTYPE: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MAX: tl.constexpr,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Both copies of a tile that has one scale: its matrix's (WHOLE), or its own."""
    expert, row_block, column_block = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    x = expert_pointer(base, table, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED)
    row = (row_block * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    column = (column_block * WIDTH + tl.arange(0, WIDTH))[None, :]
    values = tl.load(x + row.to(tl.int64) * stride + column, (row < R) & (column < C), other=0.0).to(tl.float32)
    if WHOLE:
        encode = tensor_encode(tl.load(amax + expert), MAX)
        if (row_block == 0) & (column_block == 0):
            tl.store(row_scales + expert, tl.div_rn(1.0, encode))
    else:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        encode, scale = block_encode(tl.max(tl.max(bits, 1), 0), EXPONENT)
        down, across = tl.cdiv(R, HEIGHT), tl.cdiv(C, WIDTH)
        is_block = (row_block < down) & (column_block < across)
        if ROWS:
            tl.store(row_scales + (expert * down + row_block) * across + column_block, scale, is_block)
        if COLUMNS:
            tl.store(column_scales + (expert * across + column_block) * down + row_block, scale, is_block)
    values = values * encode
    if ROWS:
        place = by_rows + expert.to(tl.int64) * R * rows_stride + row.to(tl.int64) * rows_stride + column
        tl.store(place, elements_of(values, MAX, by_rows.dtype.element_ty), (row < R) & (column < rows_stride))
    if COLUMNS:
        elements = tl.trans(elements_of(values, MAX, by_columns.dtype.element_ty))
        row, column = tl.trans(row), tl.trans(column)
        place = by_columns + expert.to(tl.int64) * C * columns_stride + column.to(tl.int64) * columns_stride + row
        tl.store(place, elements, (column < C) & (row < columns_stride))


_launch_rows_amax = Launches(_rows_amax_kernel, ("T", "C"), num_warps=4)
_launch_rows = Launches(_rows_of_experts_kernel, ("T", "C"), num_warps=4)
_launch_blocks = Launches(_blocks_of_experts_kernel, ("T", "C"), num_warps=4)
_launch_matrices_amax = Launches(_matrices_amax_kernel, ("R", "C"), num_warps=4)
_launch_matrices = Launches(_matrices_kernel, ("R", "C"), num_warps=4)
_launch_squares = Launches(_matrices_kernel, ("R", "C"), num_warps=8)
