"""Triton kernels of batched products in half precision: whole ones, and symmetric ones of which half is computed.

Legend: B matrices, M rows, N columns of the result, K the contracted dim. A program computes one tile of one matrix's
result. Of a symmetric result only tiles on and above the diagonal have a program, which writes its tile a second time,
mirrored. The bits of a matrix's result depend on no other matrix: those of cuBLAS, which is 3 % faster with some
shapes, may depend on the batch, and on what a user has set for fp16 products.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...compat import device_of
from ...triton_support import Launches, kinds_of, tile_of

__all__ = ["ProductConfig", "full_product", "symmetric_product"]


class ProductConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape; tiles of symmetric products are square."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    """Number of tiles along the rows that share operands in L2."""


# The fastest of 27 and 21 on an H200, for matrices of 1,024 and 4,096 rows, one and several.
_GRAM = ProductConfig(128, 128, 64, 8, 4)
"""For products of a matrix with itself, often with a long contracted dim."""
_POLYNOMIAL = ProductConfig(128, 128, 64, 4, 3)
"""For products of symmetric matrices, which have an addend."""
_FULL = ProductConfig(128, 256, 64, 8, 4)


@triton.jit
def _symmetric_kernel(
    a_desc: tl.tensor,
    b_desc: tl.tensor,
    addend: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_row: tl.tensor,
    stride_matrix: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    diagonal: tl.tensor,
    CONFIG: tl.constexpr,
    TALL: tl.constexpr,
) -> None:
    BLOCK: tl.constexpr = CONFIG.block_m
    BLOCK_K: tl.constexpr = CONFIG.block_k
    matrix = tl.program_id(1)
    tile_m = tl.load(tiles + 2 * tl.program_id(0))
    tile_n = tl.load(tiles + 2 * tl.program_id(0) + 1)
    row, column = tile_m * BLOCK, tile_n * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        if TALL:
            a = a_desc.load([matrix, k, row]).reshape(BLOCK_K, BLOCK).T
            b = b_desc.load([matrix, k, column]).reshape(BLOCK_K, BLOCK)
        else:
            a = a_desc.load([matrix, row, k]).reshape(BLOCK, BLOCK_K)
            b = b_desc.load([matrix, column, k]).reshape(BLOCK, BLOCK_K).T
        acc = tl.dot(a, b, acc)
    first = matrix.to(tl.int64) * stride_matrix
    m = row + tl.arange(0, BLOCK)[:, None]
    n = column + tl.arange(0, BLOCK)[None, :]
    inside = (m < M) & (n < M)
    at = first + m.to(tl.int64) * stride_row + n
    acc *= alpha
    if addend is not None:
        acc += beta * tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    if diagonal is not None:
        acc += tl.where(m == n, diagonal, 0.0)
    result = acc.to(out.dtype.element_ty)
    # Masks along the diagonal in place of tl.where would cost a third: stores are then element by element.
    mirrored = tl.trans(result)
    result = tl.where((m <= n) | (tile_m != tile_n), result, mirrored)
    if tile_m != tile_n:
        m_across = row + tl.arange(0, BLOCK)[None, :]
        n_down = column + tl.arange(0, BLOCK)[:, None]
        below = first + n_down.to(tl.int64) * stride_row + m_across
        tl.store(out + below, mirrored, mask=(n_down < M) & (m_across < M))
    tl.store(out + at, result, mask=inside)


@triton.jit
def _full_kernel(
    a_desc: tl.tensor,
    b_desc: tl.tensor,
    out_desc: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    alpha: tl.tensor,
    CONFIG: tl.constexpr,
) -> None:
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    HALF: tl.constexpr = BLOCK_N // 2
    matrix = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), CONFIG.group)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = a_desc.load([matrix, row, k]).reshape(BLOCK_M, BLOCK_K)
        b = b_desc.load([matrix, k, column]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc)
    # Two halves take half of the shared memory of one tile, which the four stages of loads leave no room for.
    left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
    out_desc.store([matrix, row, column], (alpha * left).to(out_desc.dtype).reshape(1, BLOCK_M, HALF))
    out_desc.store([matrix, row, column + HALF], (alpha * right).to(out_desc.dtype).reshape(1, BLOCK_M, HALF))


@functools.lru_cache(maxsize=256)
def _upper_tiles(size: int, config: ProductConfig, device: torch.device) -> Tensor:
    """Row and column [tiles, 2] of the square tiles on and above the diagonal, in groups as ``tile_of``'s."""
    across = -(-size // config.block_m)
    tiles = [
        (row, column)
        for first in range(0, across, config.group)
        for column in range(first, across)
        for row in range(first, min(first + config.group, column + 1))
    ]
    return torch.tensor(tiles, dtype=torch.int32).to(device)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    tall: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    addend: Tensor | None = None,
    diagonal: float | None = None,
) -> Tensor:
    """``out = alpha a b^T + beta addend + diagonal I`` where that is symmetric; ``alpha a^T b + ..`` of ``tall`` ones.

    Returns ``out``.

    a, b  [B, M, K] fp16 or bf16, with adjacent columns, rows of whole 16 bytes and matrices one after the other; tall
          ones [B, K, M]
    out   [B, M, M] of the same form; no operand but ``addend``, whose strides are ``out``'s, may share its memory
    """
    if not out.numel():
        return out
    config = _GRAM if addend is None else _POLYNOMIAL
    count, rows, _ = out.shape
    tiles = _upper_tiles(rows, config, out.device)
    side = [config.block_k, config.block_m] if tall else [config.block_m, config.block_k]
    counts = rows, a.shape[1 if tall else 2], out.stride(1), out.stride(0)
    key = out.get_device(), config, counts, count, tall, diagonal is None, kinds_of(a, b, addend, out)
    with device_of(out):
        _launch_symmetric(
            (key, a.stride(), b.stride()),
            (tiles.shape[0], count, 1),
            _descriptor(a, side),
            _descriptor(b, side),
            addend,
            out,
            tiles,
            *counts,
            alpha,
            beta,
            diagonal,
            config,
            tall,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def full_product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0) -> Tensor:
    """``out = alpha a b`` of [B, M, K] and [B, K, N], in the form of ``symmetric_product``'s; returns ``out``.

    Elements behind a row's last column, up to whole 16 bytes, may become zeros.
    """
    if not out.numel():
        return out
    config = _FULL
    count, rows, columns = out.shape
    counts = rows, columns, a.shape[2]
    key = out.get_device(), config, counts, count, a.stride(), b.stride(), out.stride(), kinds_of(a, b, out)
    with device_of(out):
        _launch_full(
            key,
            (-(-rows // config.block_m) * -(-columns // config.block_n), count, 1),
            _descriptor(a, [config.block_m, config.block_k]),
            _descriptor(b, [config.block_k, config.block_n]),
            _descriptor(out, [config.block_m, config.block_n // 2]),
            *counts,
            alpha,
            config,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _descriptor(matrices: Tensor, tile: list[int]) -> TensorDescriptor:
    """A descriptor of matrices, which meets no number of the next one."""
    strides = [matrices.shape[1] * matrices.stride(1), matrices.stride(1), 1]
    return TensorDescriptor(matrices, list(matrices.shape), strides, [1, *tile])


_launch_symmetric, _launch_full = Launches(_symmetric_kernel), Launches(_full_kernel)
