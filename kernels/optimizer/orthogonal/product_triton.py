"""Triton kernel of batched products in half precision, which computes half of a symmetric one.

Legend: B matrices, M rows, N columns of the result, K the contracted dim. A program computes one tile of one matrix's
result. Of a symmetric result only tiles on and above the diagonal have a program, which writes its tile a second time,
mirrored. The bits of a matrix's result depend on no other matrix.
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

__all__ = ["ProductConfig", "product"]


class ProductConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape; tiles of symmetric products are square."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    """Number of tiles along the rows that share operands in L2."""


# The fastest of eleven on an H200, for matrices of 768 to 8,192 rows.
_SYMMETRIC = ProductConfig(128, 128, 64, 4, 3)
_RECTANGULAR = ProductConfig(128, 256, 64, 8, 3)


@triton.jit
def _product_kernel(
    a_desc: tl.tensor,
    b_desc: tl.tensor,
    addend: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_row: tl.tensor,
    stride_matrix: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    CONFIG: tl.constexpr,
    SYMMETRIC: tl.constexpr,
) -> None:
    # SYMMETRIC: the result's other factor is b's [N, K] transposed, and descriptors are of the rows of all matrices;
    # else b's matrices are [K, N], and descriptors are of matrices, so that no number of the next one is met.
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    matrix = tl.program_id(1)
    if SYMMETRIC:
        tile_m = tl.load(tiles + 2 * tl.program_id(0))
        tile_n = tl.load(tiles + 2 * tl.program_id(0) + 1)
    else:
        tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), CONFIG.group)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        if SYMMETRIC:  # rows of the next matrix give elements outside the result
            a = a_desc.load([matrix * M + row, k])
            b = b_desc.load([matrix * M + column, k]).T
        else:
            a = a_desc.load([matrix, row, k]).reshape(BLOCK_M, BLOCK_K)
            b = b_desc.load([matrix, k, column]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc)
    first = matrix.to(tl.int64) * stride_matrix
    m = row + tl.arange(0, BLOCK_M)[:, None]
    n = column + tl.arange(0, BLOCK_N)[None, :]
    inside = (m < M) & (n < N)
    at = first + m.to(tl.int64) * stride_row + n
    acc *= alpha
    if addend is not None:
        acc += beta * tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    if (
        SYMMETRIC
    ):  # masks along the diagonal in place of tl.where would cost a third: stores are then element by element
        mirrored = tl.trans(result)
        result = tl.where((m <= n) | (tile_m != tile_n), result, mirrored)
        if tile_m != tile_n:
            m_across = row + tl.arange(0, BLOCK_M)[None, :]
            n_down = column + tl.arange(0, BLOCK_N)[:, None]
            below = first + n_down.to(tl.int64) * stride_row + m_across
            tl.store(out + below, mirrored, mask=(n_down < N) & (m_across < M))
    tl.store(out + at, result, mask=inside)


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


def product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    symmetric: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    addend: Tensor | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """``out = alpha a b^T + beta addend`` where that is ``symmetric``, else ``alpha a b + beta addend``.

    Returns ``out``.

    a       [B, M, K] fp16 or bf16, with adjacent columns, rows of whole 16 bytes and matrices one after the other
    b       [B, M, K] likewise where ``symmetric``; else [B, K, N]
    out     [B, M, N] of the same form; no operand but ``addend``, whose strides are ``out``'s, may share its memory
    """
    config = config or (_SYMMETRIC if symmetric else _RECTANGULAR)
    (count, rows, contracted), columns = a.shape, out.shape[2]
    if not out.numel():
        return out
    if symmetric:
        tiles = _upper_tiles(rows, config, out.device)
        num_tiles = tiles.shape[0]
    else:
        tiles = None
        num_tiles = -(-rows // config.block_m) * -(-columns // config.block_n)
    counts = rows, columns, contracted, out.stride(1), out.stride(0)
    key = out.get_device(), config, counts, count, symmetric, a.stride(), b.stride(), kinds_of(a, b, addend, out)
    with device_of(out):
        _launch(
            key,
            (num_tiles, count, 1),
            *_descriptors(a, b, config, symmetric=symmetric),
            addend,
            out,
            tiles,
            *counts,
            alpha,
            beta,
            config,
            symmetric,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _descriptors(a: Tensor, b: Tensor, config: ProductConfig, *, symmetric: bool) -> list[TensorDescriptor]:
    if symmetric:
        sides = [config.block_m, config.block_k], [config.block_n, config.block_k]
        return [
            TensorDescriptor(each, [each.shape[0] * each.shape[1], each.shape[2]], [each.stride(1), 1], list(side))
            for each, side in zip((a, b), sides, strict=True)
        ]
    sides = [1, config.block_m, config.block_k], [1, config.block_k, config.block_n]
    return [
        TensorDescriptor(each, list(each.shape), [each.shape[1] * each.stride(1), each.stride(1), 1], list(side))
        for each, side in zip((a, b), sides, strict=True)
    ]


_launch = Launches(_product_kernel)
