"""Launches of the quantiser's kernels: for a matrix, for the rows of experts, and for matrices of experts.

Where the largest magnitude of a tensor decides its scale, a kernel leaves the largest of each program's share, and the
cast takes the largest of those. For rows of experts it is found by atomic maxima. A scale that is given needs no such
pass; the cast then records the largest magnitude. No host reads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat import adjacent_columns, device_of
from ..experts import Experts, PerExpert, locate_experts
from ..triton_support import Launches
from .grouped import GroupedQuantized, most_columns
from .quantize_kernels import amax_kernel, blocks_kernel, rows_amax_kernel, rows_of_experts_kernel, tiles_kernel
from .spec import Quantized, QuantSpec

__all__ = ["empty_copy", "quantize_experts_triton", "quantize_grouped_triton", "quantize_triton"]

_BLOCK = 128
"""Rows and columns of a block, and rows of a tile."""
_PARTIALS = 512
"""At most so many programs look for the largest magnitude of a tensor, or for those of all experts. Each leaves one: a
share of a power of two."""
_CHUNK = 1024
"""Columns in which one program looks for the largest magnitude of an expert's rows."""


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
    x = adjacent_columns(x)
    return _quantize(x, None, 1, rows, columns, partial(empty_copy, x), scale, amax)


def quantize_experts_triton(
    matrices: PerExpert, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """Each expert's matrix [R, C] as it is by ``rows``, and transposed by ``columns``; None: not this copy.

    Both specs are equal: one scale for each matrix, or powers of two for blocks of 128 x 128. The matrices have
    adjacent columns, and equal row strides.
    """
    experts, count = locate_experts(matrices), len(matrices)
    return _quantize(experts.base, experts, count, rows, columns, partial(_empty_matrices, experts.base, count))


def _quantize(
    x: Tensor,
    experts: Experts | None,
    count: int,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    empty: Callable[..., Quantized],
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """``quantize_triton`` and ``quantize_experts_triton``. ``experts`` None: of x alone."""
    place, is_experts, aligned = (x, False, False) if experts is None else (experts.argument, True, experts.aligned)
    by_rows, by_columns, spec, copies = _copies(rows, columns, empty)
    sizes, largest = (*x.shape, x.stride(0)), spec.element.max
    form = rows is None, columns is None, spec.block, scale is None, amax is None, count, experts and experts.form
    key = x.get_device(), x.dtype, x.data_ptr() % 16, sizes, largest, form
    with device_of(x):
        if spec.block == (1, _BLOCK):
            _launch_blocks(key, _grid(copies, sizes, 128), x, copies, *sizes, None, None, 0, largest, 1)
        elif spec.block is not None:
            grid = _grid(copies, sizes, 128, count)
            _launch_squares(key, grid, place, copies, *sizes, None, 0, None, None, largest, is_experts, aligned)
        else:
            found: tuple[Tensor | None, int] = None, 0
            if scale is None:
                tiles = -(-x.shape[0] // 32) * -(-x.shape[1] // 256)
                programs = 1 << (max(1, min(_PARTIALS // count, tiles)).bit_length() - 1)
                found = x.new_empty(count, programs, dtype=torch.int32), programs
                _launch_amax(key, (programs, 1, count), place, found[0], *sizes, tiles, is_experts, aligned)
            grid = _grid(copies, sizes, 64, count)
            _launch_tiles(key, grid, place, copies, *sizes, *found, scale, amax, largest, is_experts, aligned)
    return by_rows, by_columns


def quantize_grouped_triton(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, offsets: Tensor
) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
    """Each expert's rows of x [T, C] as they are by ``rows``, and transposed by ``columns``; None: not this copy.

    Both specs are equal: one scale for each expert, or powers of two for blocks of 1 x 128. A copy as it is holds zeros
    for pad rows. What lies behind the last expert's columns of a transposed copy is not written.
    """
    x = adjacent_columns(x)
    (height, width), num_experts = x.shape, offsets.shape[0] - 1
    by_rows, by_columns, spec, copies = _copies(rows, columns, partial(_empty_rows, x, num_experts))
    segments = None if columns is None else offsets.new_empty(2 * num_experts + 1)
    tiles = height // _BLOCK + min(num_experts + 1, height)  # each expert has at most one partial tile
    across = max(width, copies[2])
    sizes, largest, searched = (height, width, x.stride(0)), spec.element.max, 1 << num_experts.bit_length()
    form = rows is None, columns is None, num_experts, offsets.dtype, offsets.data_ptr() % 16
    key = x.get_device(), x.dtype, x.data_ptr() % 16, sizes, largest, form
    with device_of(x):
        if spec.block is not None:
            grid = tiles, -(-across // _BLOCK), 1
            _launch_blocks(key, grid, x, copies, *sizes, offsets, segments, num_experts, largest, searched)
        else:
            amax = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
            grid = tiles, -(-width // _CHUNK), 1
            _launch_rows_amax(key, grid, x, offsets, amax, num_experts, *sizes, searched, _CHUNK)
            grid = tiles, -(-across // 256), 1
            _launch_rows(key, grid, x, copies, *sizes, amax, offsets, segments, num_experts, largest, searched)
    as_it_is = None if by_rows is None else GroupedQuantized(by_rows, offsets, transposed=False)
    if by_columns is None or segments is None:
        return as_it_is, None
    return as_it_is, GroupedQuantized(by_columns, segments, transposed=True)


# ---- Memory for copies. ----


def _copies(
    rows: QuantSpec | None, columns: QuantSpec | None, empty: Callable[..., Quantized]
) -> tuple[Quantized | None, Quantized | None, QuantSpec, tuple[Any, ...]]:
    """Both copies without elements yet, the spec of either, and what kernels take of them.

    One scale of the tensor, or of each expert, is that of both copies.
    """
    spec = rows or columns
    assert spec is not None, "a copy is wanted"
    by_rows = None if rows is None else empty(spec, transposed=False)
    shared = None if by_rows is None or spec.block is not None else by_rows.scale
    by_columns = None if columns is None else empty(spec, transposed=True, scale=shared)
    return by_rows, by_columns, spec, (*_arguments(by_rows), *_arguments(by_columns))


def _arguments(copy: Quantized | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Elements, scales and row stride."""
    return (None, None, 0) if copy is None else (copy.data, copy.scale, copy.data.stride(-2))


def empty_copy(x: Tensor, spec: QuantSpec, *, transposed: bool, scale: Tensor | None = None) -> Quantized:
    """Memory for x [R, C] quantised, or ``transposed``; scales lie as cuBLAS reads them.

    scale  0-dim, where one scale is the tensor's: another copy's; None: a new one

    Scales of 1 x 128 of one block column lie together, those of 128 x 128 of one block row. The latter come in fours;
    and so do those of 1 x 128 but for transposed copies, which only meet one another.
    """
    rows, columns = reversed(x.shape) if transposed else x.shape
    dtype = spec.element.dtype
    if spec.block is None:
        data = x.new_empty(rows, -(-columns // 16) * 16, dtype=dtype)
        scale = x.new_empty((), dtype=torch.float32) if scale is None else scale
        return Quantized(data, scale, None, spec, columns)
    square = spec.block != (1, _BLOCK)
    count = _BLOCK if transposed and not square else 4 * _BLOCK
    blocks = -(-columns // count) * (count // _BLOCK)
    data = x.new_empty(rows, blocks * _BLOCK, dtype=dtype)
    if square:
        scale = x.new_empty(-(-rows // _BLOCK), blocks, dtype=torch.float32)
    else:
        scale = x.new_empty(blocks, rows, dtype=torch.float32).t()
    return Quantized(data, scale, None, spec, columns)


def _empty_rows(
    x: Tensor, num_experts: int, spec: QuantSpec, *, transposed: bool, scale: Tensor | None = None
) -> Quantized:
    """The same for the rows of experts, x [T, C]: see ``GroupedQuantized``.

    Scales of a block column lie together: a tile of a product reads them for its rows.
    """
    rows, columns = x.shape
    if transposed:
        rows, columns = columns, most_columns(rows, num_experts, spec)
    data = x.new_empty(rows, -(-columns // 16) * 16, dtype=spec.element.dtype)
    if spec.block is not None:
        blocks = -(-columns // _BLOCK) + num_experts * transposed
        scale = x.new_empty(blocks, rows, dtype=torch.float32).t()
    elif scale is None:
        scale = x.new_empty(num_experts, dtype=torch.float32)
    return Quantized(data, scale, None, spec, columns)


def _empty_matrices(
    base: Tensor, num_experts: int, spec: QuantSpec, *, transposed: bool, scale: Tensor | None = None
) -> Quantized:
    """The same for matrices of experts, each like ``base`` [R, C]."""
    rows, columns = reversed(base.shape) if transposed else base.shape
    data = base.new_empty(num_experts, rows, -(-columns // 16) * 16, dtype=spec.element.dtype)
    if scale is None:
        blocks = () if spec.block is None else (-(-rows // _BLOCK), -(-columns // _BLOCK))
        scale = base.new_empty((num_experts, *blocks), dtype=torch.float32)
    return Quantized(data, scale, None, spec, columns)


# ---- Launches. ----


def _grid(copies: Any, sizes: tuple[int, int, int], width: int, num_matrices: int = 1) -> tuple[int, int, int]:
    """Tiles of 128 rows and ``width`` columns. Programs beyond a matrix write the zeros behind a copy's columns."""
    down, across = max(sizes[0], copies[5]), max(sizes[1], copies[2])
    return -(-down // _BLOCK), -(-across // width), num_matrices


_launch_amax = Launches(amax_kernel, ("R", "C"), num_warps=8)
_launch_rows_amax = Launches(rows_amax_kernel, ("R", "C"), num_warps=4)
_launch_tiles = Launches(tiles_kernel, ("R", "C"), num_warps=4)
_launch_squares = Launches(tiles_kernel, ("R", "C"), num_warps=8)
_launch_rows = Launches(rows_of_experts_kernel, ("R", "C"), num_warps=4)
_launch_blocks = Launches(blocks_kernel, ("R", "C"), num_warps=4)
