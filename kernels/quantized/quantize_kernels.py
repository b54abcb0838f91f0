"""The quantiser's Triton kernels: a tile is read once, and both copies are written.

The formulas, and so the bits, are those of ``quantize.py``. One scale needs the largest magnitude of its elements
first, which kernels find as bits: as integers, these are ordered as magnitudes are, and NaN is larger than Inf.

Legend: E experts, R rows, C columns. x is one matrix [R, C]; EXPERTS: ``Experts.argument`` of matrices [R, C].
``copies`` are elements, scales and row stride of the copy by rows, and those of the copy by columns; None for one that
is not wanted. The rows of an expert are cut into tiles of 128, beginning at its first row: a tile is one expert's.
``grouped.py`` says where the columns of a transposed copy lie.
"""

import torch
import triton
import triton.language as tl

from ..triton_support import expert_pointer, tiles_of_experts

__all__ = [
    "amax_kernel",
    "blocks_kernel",
    "rows_amax_kernel",
    "rows_of_experts_kernel",
    "tiles_kernel",
]

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_INF_BITS = tl.constexpr(0x7F800000)


# ---- Largest magnitudes. ----


@triton.jit
def _magnitude(values: tl.tensor) -> tl.tensor:
    """Bits of the magnitude in fp32."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_kernel(
    x: tl.tensor,
    partial: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """partial [E, programs]: the largest magnitude of each program's share of a matrix."""
    if EXPERTS:
        expert = tl.program_id(2)
        x = expert_pointer(x, expert, ALIGNED)
        partial += expert * tl.num_programs(0)
    across = tl.cdiv(C, 256)
    largest = tl.zeros((32, 256), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across * 32 + tl.arange(0, 32)).to(tl.int64)
        column = tile % across * 256 + tl.arange(0, 256)
        inside = (row[:, None] < R) & (column[None, :] < C)
        values = tl.load(x + row[:, None] * stride + column[None, :], inside, other=0.0)
        largest = tl.maximum(largest, _magnitude(values))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def rows_amax_kernel(
    x: tl.tensor,
    offsets: tl.tensor,
    amax: tl.tensor,
    E: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """amax [E]: the largest magnitude of each expert's rows of x.

    A program finds that of 128 rows in CHUNK columns. Atomic maxima do not depend on the order.
    """
    expert, first, end, _, _, _ = _tile_of_rows(offsets, E, R, BLOCK_E)
    end = tl.minimum(first + 128, end)
    if expert < E:
        largest = tl.zeros((8, 256), tl.int32)
        for down in tl.range(first, end, 8):
            row = (down + tl.arange(0, 8))[:, None]
            for chunk in tl.static_range(0, CHUNK, 256):
                column = (tl.program_id(1) * CHUNK + chunk + tl.arange(0, 256))[None, :]
                values = tl.load(x + row.to(tl.int64) * stride + column, (row < end) & (column < C), other=0.0)
                largest = tl.maximum(largest, _magnitude(values))
        tl.atomic_max(amax + expert, tl.max(tl.max(largest, 1), 0))


# ---- Scales and elements. ----


@triton.jit
def _tensor_encode(bits: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    """What elements are multiplied by, from the bits of the largest magnitude."""
    amax = bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax), _FP32_MAX)
    return tl.where((bits == 0) | (bits >= _INF_BITS), 1.0, encode)


@triton.jit
def _block_encode(bits: tl.tensor, MAX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The same for powers of two, and the scale: without a division, which each thread would do for many blocks.

    An element's largest magnitude is 1.75 * 2^EXPONENT, so max / amax is at least its power of two where the mantissa
    of amax is at most 1.75, and rounding never lifts it there.
    """
    EXPONENT: tl.constexpr = 8 if MAX == 448.0 else 15
    power = EXPONENT + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.where((bits == 0) | (bits >= _INF_BITS), 0, tl.minimum(power, 127))
    scale = tl.where(power == 127, 0x400000, (127 - power) << 23)  # 2^-127 has no bit in the exponent
    return ((power + 127) << 23).to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton.jit
def _elements(values: tl.tensor, MAX: tl.constexpr, copy: tl.tensor) -> tl.tensor:
    """In the dtype of ``copy``, a pointer."""
    return tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(copy.dtype.element_ty)


# ---- One scale for the matrix, for each expert's, or for a tile. ----


@triton.jit
def _record(amax: tl.tensor, bits: tl.tensor) -> None:
    """Raise ``amax`` to the magnitude whose bits are given.

    -1, which stands for none, comes first. Few programs find more than is recorded, and only those write.
    """
    place = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(place, bits, bits > tl.load(place), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["given", "amax"])  # entries of small vectors, at any of their places
def tiles_kernel(
    x: tl.tensor,
    copies: tl.tuple,
    R: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    largest: tl.tensor,
    PARTIALS: tl.constexpr,
    given: tl.tensor,
    amax: tl.tensor,
    MAX: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Both copies of a tile that has one scale: the matrix's, given or from its PARTIALS ``largest``, or its own.

    amax  raised to the largest magnitude, where the scale is given; None: not recorded
    """
    by_rows, row_scales, rows_stride, by_columns, column_scales, columns_stride = copies
    OWN: tl.constexpr = largest is None and given is None
    WIDTH: tl.constexpr = 128 if OWN else 64
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    expert = tl.program_id(2) if EXPERTS else tl.zeros((), tl.int32)
    x = expert_pointer(x, expert, ALIGNED) if EXPERTS else x
    row = (row_block * 128 + tl.arange(0, 128))[:, None]
    column = (column_block * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (row < R) & (column < C)
    values = tl.load(x + row.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32)
    if OWN:
        encode, scale = _block_encode(tl.max(tl.max(_magnitude(values), 1), 0), MAX)
        if by_rows is not None:
            place = (expert * tl.cdiv(R, 128) + row_block) * tl.cdiv(rows_stride, 128) + column_block
            tl.store(row_scales + place, scale, row_block * 128 < R)
        if by_columns is not None:
            place = (expert * tl.cdiv(C, 128) + column_block) * tl.cdiv(columns_stride, 128) + row_block
            tl.store(column_scales + place, scale, column_block * 128 < C)
    else:
        if given is None:
            bits = tl.max(tl.load(largest + expert * PARTIALS + tl.arange(0, PARTIALS)), 0)
            encode = _tensor_encode(bits, MAX)
        else:
            encode = tl.load(given)
        if amax is not None:
            bits = _magnitude(values)
            bits = tl.where(bits > _INF_BITS, 0, bits)  # NaN
            _record(amax, tl.max(tl.max(bits, 1), 0))
        if (row_block == 0) & (column_block == 0):
            scales = column_scales if row_scales is None else row_scales
            tl.store(scales + expert, tl.div_rn(1.0, encode))
    values = values * encode
    if by_rows is not None:
        place = by_rows + expert.to(tl.int64) * R * rows_stride + row.to(tl.int64) * rows_stride + column
        tl.store(place, _elements(values, MAX, by_rows), (row < R) & (column < rows_stride))
    if by_columns is not None:
        elements = tl.trans(_elements(values, MAX, by_columns))
        row, column = tl.trans(row), tl.trans(column)
        place = by_columns + expert.to(tl.int64) * C * columns_stride + column.to(tl.int64) * columns_stride + row
        tl.store(place, elements, (column < C) & (row < columns_stride))


# ---- Rows of experts. ----


@triton.jit
def _tile_of_rows(offsets: tl.tensor, E: tl.tensor, R: tl.tensor, BLOCK_E: tl.constexpr) -> tl.tensor:
    """Expert, first row of the tile, end of the expert's rows; the tile's columns in a transposed copy, and its block.

    See ``tiles_of_experts``.
    """
    program = tl.program_id(0)
    expert, groups, starts, ends, tiles, tiles_until = tiles_of_experts(program, offsets, E, R, 1, BLOCK_E, 128)
    mine = groups == expert
    down = (program - tl.sum(tl.where(mine, tiles_until - tiles, 0), 0)) * 128
    row = tl.sum(tl.where(mine, starts, 0), 0) + down
    end = tl.sum(tl.where(mine, ends, 0), 0)
    whole, rest = _parts(tl.where(groups < E, ends - starts, 0))
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
def rows_of_experts_kernel(
    x: tl.tensor,
    copies: tl.tuple,
    R: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    amax: tl.tensor,
    offsets: tl.tensor,
    segments: tl.tensor,
    E: tl.tensor,
    MAX: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Both copies of a tile [128, 256] that has its expert's scale, 64 columns at a time."""
    by_rows, row_scales, rows_stride, by_columns, column_scales, columns_stride = copies
    expert, row, end, position, last, _ = _tile_of_rows(offsets, E, R, BLOCK_E)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        groups = tl.arange(0, BLOCK_E)
        each = tl.load(amax + groups, mask=groups < E, other=0)
        scales = column_scales if row_scales is None else row_scales
        tl.store(scales + groups, tl.div_rn(1.0, _tensor_encode(each, MAX)), groups < E)
        if by_columns is not None:
            _store_segments(segments, offsets, E, BLOCK_E)
    if expert <= E:
        m = (row + tl.arange(0, 128))[:, None]
        token = (position + tl.arange(0, 128))[None, :]
        encode = _tensor_encode(tl.load(amax + expert, expert < E, other=0), MAX)
        filled = tl.where(expert < E, end, row)  # pad rows, which may hold anything, become zeros
        for block in tl.range(tl.program_id(1) * 256, tl.program_id(1) * 256 + 256, 64):
            column = (block + tl.arange(0, 64))[None, :]
            inside = (m < filled) & (column < C)
            values = tl.load(x + m.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32) * encode
            if by_rows is not None:
                place = by_rows + m.to(tl.int64) * rows_stride + column
                tl.store(place, _elements(values, MAX, by_rows), (m < end) & (column < rows_stride))
            if by_columns is not None:
                elements = tl.trans(_elements(values, MAX, by_columns))
                column = tl.trans(column)
                place = by_columns + column.to(tl.int64) * columns_stride + token
                tl.store(place, elements, (column < C) & (token < last) & (expert < E))


@triton.jit
def blocks_kernel(
    x: tl.tensor,
    copies: tl.tuple,
    R: tl.tensor,
    C: tl.tensor,
    stride: tl.tensor,
    offsets: tl.tensor,
    segments: tl.tensor,
    E: tl.tensor,
    MAX: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Both copies of a tile of 128 x 128 with a scale for each row, and another for each column.

    offsets  of experts' rows; None: x is one matrix

    The tile has four dims, [128 / LANES, GROUPS, LANES, 128 / GROUPS], so that a warp holds whole columns: its lanes
    are the third dim, and the warps the second. With two dims the warps would lie along the rows, and the largest
    magnitudes of columns go through shared memory, slowly.
    """
    by_rows, row_scales, rows_stride, by_columns, column_scales, columns_stride = copies
    GROUPS: tl.constexpr = 8
    LANES: tl.constexpr = 32
    DEPTH: tl.constexpr = 128 // LANES
    WIDTH: tl.constexpr = 128 // GROUPS
    column_block = tl.program_id(1)
    if offsets is None:
        block = tl.program_id(0)
        first = block * 128
        position, end, filled, last = first, R, R, columns_stride
        has_columns = True
        is_tile = True
    else:
        expert, first, end, position, last, block = _tile_of_rows(offsets, E, R, BLOCK_E)
        has_columns = expert < E
        is_tile = expert <= E
        filled = tl.where(has_columns, end, first)  # pad rows, which may hold anything, become zeros
        if by_columns is not None and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            _store_segments(segments, offsets, E, BLOCK_E)
    if is_tile:
        rows_2d = first + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        columns_2d = column_block * 128 + tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        row, column = rows_2d[:, None, :, None], columns_2d[None, :, None, :]
        inside = (row < filled) & (column < C)
        values = tl.load(x + row.to(tl.int64) * stride + column, inside, other=0.0).to(tl.float32)
        bits = _magnitude(values)
        if by_rows is not None:
            encode, scale = _block_encode(tl.max(tl.max(bits, 3), 1), MAX)
            tl.store(row_scales + column_block.to(tl.int64) * R + rows_2d, scale, rows_2d < end)
            elements = _elements(values * encode[:, None, :, None], MAX, by_rows)
            place = by_rows + row.to(tl.int64) * rows_stride + column
            tl.store(place, elements, (row < end) & (column < rows_stride))
        if by_columns is not None:
            encode, scale = _block_encode(tl.max(tl.max(bits, 0), 1), MAX)
            scales = column_scales + block.to(tl.int64) * C
            tl.store(scales + columns_2d, scale, (columns_2d < C) & has_columns)
            elements = _elements(values * encode[None, :, None, :], MAX, by_columns)
            elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2)), (128, 128))
            column = (column_block * 128 + tl.arange(0, 128))[:, None]
            token = (position + tl.arange(0, 128))[None, :]
            place = by_columns + column.to(tl.int64) * columns_stride + token
            tl.store(place, elements, (column < C) & (token < last) & has_columns)
