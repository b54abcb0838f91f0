"""Candidates of the batched products, for tune_orthogonalize.py alone."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Config(NamedTuple):
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 4
    stages: int = 3
    group: int = 8
    persistent: int = 0
    """Programs a multiprocessor; 0: one for each tile."""
    specialized: bool = False
    tma_store: bool = False
    split: bool = False

    def name(self):
        kind = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages} g{self.group}"
        flags = [f"persistent{self.persistent}" if self.persistent else "", "ws" if self.specialized else ""]
        flags += ["tmastore" if self.tma_store else "", "split" if self.split else ""]
        return " ".join([kind, *filter(None, flags)])


@triton.jit
def _one_store(
    acc, out_desc, mirror_desc, addend, out, matrix, row, column, M, N, stride_row, stride_matrix, alpha, beta, gamma,
    BM: tl.constexpr, BN: tl.constexpr, SYMMETRIC: tl.constexpr, TMA_STORE: tl.constexpr,
):
    # Symmetric tiles come here as squares.
    first = matrix.to(tl.int64) * stride_matrix
    m = row + tl.arange(0, BM)[:, None]
    n = column + tl.arange(0, BN)[None, :]
    inside = (m < M) & (n < N)
    at = first + m.to(tl.int64) * stride_row + n
    acc *= alpha
    if addend is not None:
        acc += beta * tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    if gamma is not None:
        acc += tl.where(m == n, gamma, 0.0)
    result = acc.to(tl.float16)
    if SYMMETRIC:
        mirrored = tl.trans(result)
        result = tl.where((m <= n) | (row != column), result, mirrored)
        if row != column:
            if TMA_STORE:
                mirror_desc.store([matrix, column, row], mirrored.reshape(1, BN, BM))
            else:
                m_across = row + tl.arange(0, BM)[None, :]
                n_down = column + tl.arange(0, BN)[:, None]
                below = first + n_down.to(tl.int64) * stride_row + m_across
                tl.store(out + below, mirrored, mask=(n_down < N) & (m_across < M))
    if TMA_STORE:
        out_desc.store([matrix, row, column], result.reshape(1, BM, BN))
    else:
        tl.store(out + at, result, mask=inside)


@triton.jit
def _one_tile(
    a_desc, b_desc, out_desc, mirror_desc, addend, out, tiles, index, num_tiles, M, N, K, stride_row, stride_matrix,
    alpha, beta, gamma, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, TALL: tl.constexpr, TMA_STORE: tl.constexpr, SPLIT: tl.constexpr, WS: tl.constexpr,
):
    matrix = index // num_tiles
    tile = index % num_tiles
    if SYMMETRIC:
        tile_m = tl.load(tiles + 2 * tile)
        tile_n = tl.load(tiles + 2 * tile + 1)
    else:
        tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
        width = GROUP * tiles_n
        first = tile // width * GROUP
        height = tl.maximum(min(tiles_m - first, GROUP), 1)
        tile_m, tile_n = first + tile % width % height, tile % width // height
    row, column = tile_m * BM, tile_n * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=WS):
        if SYMMETRIC:
            if TALL:
                a = a_desc.load([matrix, k, row]).reshape(BK, BM).T
                b = b_desc.load([matrix, k, column]).reshape(BK, BN)
            else:
                a = a_desc.load([matrix, row, k]).reshape(BM, BK)
                b = b_desc.load([matrix, column, k]).reshape(BN, BK).T
        else:
            a = a_desc.load([matrix, row, k]).reshape(BM, BK)
            b = b_desc.load([matrix, k, column]).reshape(BK, BN)
        acc = tl.dot(a, b, acc)
    if SPLIT:
        left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        if not SYMMETRIC or row <= column:
            _one_store(
                left, out_desc, mirror_desc, addend, out, matrix, row, column, M, N, stride_row, stride_matrix, alpha,
                beta, gamma, BM, BN // 2, SYMMETRIC, TMA_STORE,
            )
        _one_store(
            right, out_desc, mirror_desc, addend, out, matrix, row, column + BN // 2, M, N, stride_row, stride_matrix,
            alpha, beta, gamma, BM, BN // 2, SYMMETRIC, TMA_STORE,
        )
    else:
        _one_store(
            acc, out_desc, mirror_desc, addend, out, matrix, row, column, M, N, stride_row, stride_matrix, alpha, beta,
            gamma, BM, BN, SYMMETRIC, TMA_STORE,
        )


@triton.jit(do_not_specialize=["count", "num_tiles"])
def tuned_kernel(
    a_desc, b_desc, out_desc, mirror_desc, addend, out, tiles, num_tiles, count, M, N, K, stride_row, stride_matrix,
    alpha, beta, gamma, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, TALL: tl.constexpr, TMA_STORE: tl.constexpr, SPLIT: tl.constexpr,
    PERSISTENT: tl.constexpr, WS: tl.constexpr,
):
    if PERSISTENT:
        for index in tl.range(
            tl.program_id(0), num_tiles * count, tl.num_programs(0), flatten=not WS, warp_specialize=WS
        ):
            _one_tile(
                a_desc, b_desc, out_desc, mirror_desc, addend, out, tiles, index, num_tiles, M, N, K, stride_row,
                stride_matrix, alpha, beta, gamma, BM, BN, BK, GROUP, SYMMETRIC, TALL, TMA_STORE, SPLIT, False,
            )
    else:
        _one_tile(
            a_desc, b_desc, out_desc, mirror_desc, addend, out, tiles, tl.program_id(0), num_tiles, M, N, K,
            stride_row, stride_matrix, alpha, beta, gamma, BM, BN, BK, GROUP, SYMMETRIC, TALL, TMA_STORE, SPLIT, WS,
        )


_TILES = {}


def upper_tiles(size, config, device):
    key = size, config.block_m, config.block_n, config.group, device
    if key not in _TILES:
        bm, bn, group = config.block_m, config.block_n, config.group
        rows, columns = -(-size // bm), -(-size // bn)
        tiles = [
            (row, column)
            for first in range(0, rows, group)
            for column in range(columns)
            for row in range(first, min(first + group, rows))
            if row * bm < (column + 1) * bn
        ]
        _TILES[key] = torch.tensor(tiles, dtype=torch.int32).to(device)
    return _TILES[key]


def _descriptor(tensor, block):
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.stride(0), tensor.stride(1), 1], [1, *block])


def arguments(config, a, b, out, *, symmetric, tall=False, alpha=1.0, beta=0.0, gamma=None, addend=None):
    """Grid, positional arguments and options. symmetric: a b^T, or of tall ones a^T b."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    count = a.shape[0]
    contracted = a.shape[1] if tall and symmetric else a.shape[2]
    rows, columns = out.shape[1:]
    if symmetric:
        tiles = upper_tiles(rows, config, out.device)
        num_tiles = len(tiles)
        sides = ([bk, bm], [bk, bn]) if tall else ([bm, bk], [bn, bk])
    else:
        tiles, num_tiles = None, -(-rows // bm) * -(-columns // bn)
        sides = [bm, bk], [bk, bn]
    width = bn // 2 if config.split else bn
    stores = (_descriptor(out, [bm, width]), _descriptor(out, [width, bm])) if config.tma_store else (None, None)
    if not symmetric:
        stores = (stores[0], None)
    total = num_tiles * count
    if config.persistent:
        processors = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else 132
        total = min(total, processors * config.persistent)
    positional = (
        *(_descriptor(each, side) for each, side in zip((a, b), sides, strict=True)), *stores, addend, out, tiles,
        num_tiles, count, rows, columns, contracted, out.stride(1), out.stride(0), alpha, beta, gamma, bm, bn, bk,
        config.group, symmetric, tall, config.tma_store, config.split, bool(config.persistent), config.specialized,
    )
    return (total, 1, 1), positional, {"num_warps": config.warps, "num_stages": config.stages}


def tuned(config, a, b, out, **options):
    grid, positional, compiler = arguments(config, a, b, out, **options)
    tuned_kernel[grid](*positional, **compiler)
    return out


def symmetric_configs():
    """By hand, the likeliest first. The first is the tree's."""
    base = Config()
    yield base
    yield base._replace(group=4)
    yield base._replace(group=16)
    yield base._replace(stages=4)
    yield base._replace(stages=2)
    yield base._replace(warps=8)
    yield base._replace(warps=8, stages=4)
    yield base._replace(block_k=128, stages=2)
    yield base._replace(block_k=128, stages=3)
    yield base._replace(block_k=128, stages=3, warps=8)
    yield base._replace(block_k=32, stages=6)
    yield base._replace(block_k=32, stages=5)
    yield base._replace(tma_store=True)
    yield base._replace(tma_store=True, group=16)
    yield base._replace(tma_store=True, block_k=32, stages=5)
    yield base._replace(tma_store=True, warps=8)
    yield base._replace(persistent=2)
    yield base._replace(persistent=2, tma_store=True)
    yield base._replace(persistent=1, stages=4, warps=8)
    yield base._replace(persistent=1, stages=5, warps=8, tma_store=True)
    yield base._replace(persistent=1, stages=4, warps=4, tma_store=True)
    wide = Config(128, 256, 64, 8, 3, split=True)
    yield wide
    yield wide._replace(stages=4)
    yield wide._replace(tma_store=True)
    yield wide._replace(stages=4, tma_store=True)
    yield wide._replace(persistent=1)
    yield wide._replace(persistent=1, tma_store=True)
    yield wide._replace(group=16, tma_store=True)


def specialized_configs():
    """These may hang: they are tried last, by a process of their own."""
    base = Config(specialized=True, tma_store=True)
    yield base
    yield base._replace(stages=4)
    yield base._replace(persistent=1)
    yield base._replace(persistent=1, stages=4)


def full_configs():
    """The first is the tree's."""
    base = Config(128, 256, 64, 8, 3)
    yield base
    yield base._replace(group=4)
    yield base._replace(group=16)
    yield base._replace(stages=4)
    yield base._replace(stages=4, split=True)
    yield base._replace(block_k=32, stages=6)
    yield base._replace(tma_store=True)
    yield base._replace(tma_store=True, group=16)
    yield base._replace(tma_store=True, split=True)
    yield base._replace(tma_store=True, split=True, stages=4)
    yield base._replace(persistent=1)
    yield base._replace(persistent=1, split=True)
    yield base._replace(persistent=1, tma_store=True)
    yield base._replace(persistent=1, tma_store=True, split=True)
    yield base._replace(persistent=1, tma_store=True, split=True, stages=4)
    yield base._replace(block_m=256, block_n=128)
    small = Config(128, 128, 64, 4, 3)
    yield small
    yield small._replace(tma_store=True)
    yield small._replace(stages=4, warps=8)
    yield small._replace(persistent=2, tma_store=True)
