"""Triton kernel of the forward and the dgrad of grouped linear layers.

Legend: E experts, T rows, N output features, K input features; C the contracted dim (K in forward, N in dgrad), F the
features of the result (N in forward, K in dgrad).

A program computes one [BLOCK_M, BLOCK_F] tile of rows of one expert. Only the device knows the number of tiles of an
expert. The grid is therefore large enough for any split sizes: each program finds its tile from the offsets, and
surplus programs end at once. A persistent grid was measured to be slower (0.464 ms instead of 0.460 ms with 64 experts
of 512 rows, N = K = 2048, on an H200). Rows behind the last expert form one more group, whose tiles are zeros.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import device_of
from ..experts import PerExpert, locate_experts
from ..triton_support import (
    Launches,
    dot_precision,
    expert_pointer,
    experts_descriptor,
    kinds_of,
    takes_tma,
    tile_of,
    triton_dtype,
)

__all__ = ["GEMM_CANDIDATES", "GemmConfig", "default_gemm_config", "find_tile", "grouped_gemm_triton"]


class GemmConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape."""

    block_m: int
    block_f: int
    block_c: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Load operands by the tensor memory accelerator (sm90 and newer) if possible, else by masked loads."""
    group: int = 8
    """Number of tiles along an expert's rows that share operands in L2."""


GEMM_CANDIDATES = (
    GemmConfig(128, 256, 64, 8, 3, tma=True),
    GemmConfig(128, 256, 64, 8, 4, tma=True),
    GemmConfig(128, 256, 64, 8, 4, tma=True, group=16),
    GemmConfig(256, 128, 64, 8, 3, tma=True),
    GemmConfig(128, 128, 64, 4, 3, tma=True),
    GemmConfig(128, 128, 64, 8, 3, tma=True),
    GemmConfig(64, 256, 64, 4, 3, tma=True),
    GemmConfig(64, 128, 64, 4, 4, tma=True),
    GemmConfig(128, 256, 64, 8, 3),
    GemmConfig(128, 256, 64, 8, 4),
    GemmConfig(128, 128, 64, 4, 3),
    GemmConfig(128, 128, 32, 4, 4),
)


def default_gemm_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> GemmConfig:
    """The configuration for unmeasured shapes. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return GemmConfig(64, 64, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        return GemmConfig(128, 256, 64, 8, 4, tma=True) if rows_per_expert > 64 else GemmConfig(64, 128, 64, 4, 4, True)
    if capability is not None:
        return GemmConfig(128, 128, 32, 4, 3)
    return GemmConfig(128, 128, 32, 8, 2)


@triton.jit
def find_tile(
    program: tl.tensor,
    offsets_ptr: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    tiles_f: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Expert, first row of the tile, end of the expert's rows, and column of tiles, of a program.

    Expert E stands for the rows behind the last expert. A program without a tile gets an expert above E.
    """
    groups = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + groups, mask=groups <= E, other=0).to(tl.int32)
    ends = tl.load(offsets_ptr + groups + 1, mask=groups < E, other=0).to(tl.int32)
    ends = tl.where(groups == E, T, ends)
    tiles_m = tl.where(groups <= E, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_until = tl.cumsum(tiles_m, 0)
    expert = tl.sum((tiles_until * tiles_f <= program).to(tl.int32), 0)
    mine = groups == expert
    end = tl.sum(tl.where(mine, ends, 0), 0)
    height = tl.maximum(tl.sum(tl.where(mine, tiles_m, 0), 0), 1)
    before = tl.sum(tl.where(mine, tiles_until - tiles_m, 0), 0)
    tile_m, tile_f = tile_of(program - before * tiles_f, height, tiles_f, GROUP)
    row = tl.sum(tl.where(mine, starts, 0), 0) + tile_m * BLOCK_M
    return expert, row, end, tile_f


@triton.jit
def _products(
    x_ptr: tl.tensor,
    x_desc: tl.tensor,
    stride_x: tl.tensor,
    weight: tl.tensor,
    weight_desc: tl.tensor,
    stride_weight: tl.tensor,
    place: tl.tensor,
    row: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    F: tl.tensor,
    C: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The tile from ``row`` and ``column`` on: [BLOCK_M, BLOCK_F] fp32; ``place`` of the expert in ``weight_desc``."""
    m = row + tl.arange(0, BLOCK_M)
    f = column + tl.arange(0, BLOCK_F)
    inside_m = m < end
    inside_f = f < F
    acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for block in tl.range(0, C, BLOCK_C):
        c = block + tl.arange(0, BLOCK_C)
        if TMA_X:
            x = x_desc.load([row, block])  # [BLOCK_M, BLOCK_C]; results of the next expert's rows are dropped
        else:
            at = x_ptr + m[:, None].to(tl.int64) * stride_x + c[None, :]
            x = tl.load(at, mask=inside_m[:, None] & (c < C)[None, :], other=0.0)
        if TMA_WEIGHT:
            if TRANSPOSED:
                w = weight_desc.load([place, column, block])
                w = w.reshape(BLOCK_F, BLOCK_C).T
            else:
                w = weight_desc.load([place, block, column])
                w = w.reshape(BLOCK_C, BLOCK_F)
        elif TRANSPOSED:
            at = weight + f[:, None].to(tl.int64) * stride_weight + c[None, :]
            w = tl.load(at, mask=inside_f[:, None] & (c < C)[None, :], other=0.0).T
        else:
            at = weight + c[:, None].to(tl.int64) * stride_weight + f[None, :]
            w = tl.load(at, mask=(c < C)[:, None] & inside_f[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_desc: tl.tensor,
    weight_ptr: tl.tensor,
    weight_desc: tl.tensor,
    weight_table: tl.tensor,
    bias_ptr: tl.tensor,
    bias_table: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    F: tl.tensor,
    C: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_weight: tl.tensor,
    stride_bias: tl.tensor,
    stride_out: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    bias_first: tl.tensor,
    bias_step: tl.tensor,
    tiles_f: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_SCATTERED: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # The weight is [F, C] if TRANSPOSED (forward), else [C, F] (dgrad).
    program = tl.program_id(0)
    expert, row, end, tile_f = find_tile(program, offsets_ptr, E, T, tiles_f, BLOCK_E, BLOCK_M, GROUP)
    if expert <= E:
        m = row + tl.arange(0, BLOCK_M)
        f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
        inside_m = m < end
        inside_f = f < F
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        if expert < E:
            weight = expert_pointer(
                weight_ptr, weight_table, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED
            )
            place = first + step * expert
            # fmt: off
            acc = _products(
                x_ptr, x_desc, stride_x, weight, weight_desc, stride_weight, place, row, end, tile_f * BLOCK_F, F, C,
                BLOCK_M, BLOCK_F, BLOCK_C, TRANSPOSED, TMA_X, TMA_WEIGHT, PRECISION
            )
            # fmt: on
            if BIAS:
                bias = expert_pointer(
                    bias_ptr, bias_table, expert, bias_first, bias_step, stride_bias, DTYPE, BIAS_SCATTERED, False
                )
                b = tl.load(bias + f, mask=inside_f, other=0.0).to(tl.float32)[None, :]
                if SCALE:
                    b = b * tl.load(scale_ptr + m, mask=inside_m, other=0.0).to(tl.float32)[:, None]
                acc += b
        at = out_ptr + m[:, None].to(tl.int64) * stride_out + f[None, :]
        tl.store(at, acc.to(DTYPE), mask=inside_m[:, None] & inside_f[None, :])


def grouped_gemm_triton(
    x: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    out: Tensor,
    config: GemmConfig,
    *,
    transposed: bool,
    bias: PerExpert | None = None,
    bias_scale: Tensor | None = None,
) -> None:
    """``out[t] = x[t] W_e^T + s[t] b_e`` (``transposed``), or ``x[t] W_e``; the caller has checked the arguments.

    x [T, C] and out [T, F] have adjacent columns. W_e are [F, C] (``transposed``) or [C, F], with equal row strides.
    """
    (rows, contracted), features = x.shape, out.shape[1]
    num_experts = offsets.shape[0] - 1
    experts = locate_experts(weights)
    biases = None if bias is None else locate_experts(bias)
    tiles_f = -(-features // config.block_f)
    # Each group has at most one partial tile.
    tiles_m = rows // config.block_m + min(num_experts + 1, rows)
    tma_x = config.tma and takes_tma(x)
    tma_weight = config.tma and experts.table is None and experts.aligned and takes_tma(experts.base)
    if tiles_m * tiles_f == 0:
        return
    sides = [config.block_f, config.block_c] if transposed else [config.block_c, config.block_f]
    counts = (
        num_experts,
        rows,
        features,
        contracted,
        x.stride(0),
        experts.stride,
        experts.base.stride(0),
        0 if biases is None else biases.stride,
        out.stride(0),
        experts.first,
        experts.step,
        *((0, 0) if biases is None else (biases.first, biases.step)),
        tiles_f,
    )
    forms = (
        transposed,
        tma_x,
        tma_weight,
        experts.table is not None,
        experts.aligned,
        biases is not None,
        biases is not None and biases.table is not None,
        bias_scale is not None,
        dot_precision(),
    )
    bias_base = None if biases is None else biases.base
    key = x.get_device(), config, counts, forms, kinds_of(x, experts.base, bias_base, bias_scale, out, offsets)
    with device_of(x):
        _launch(
            key,
            (tiles_m * tiles_f, 1, 1),
            x,
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_c]) if tma_x else None,
            experts.base,
            experts_descriptor(experts, num_experts, [1, *sides]) if tma_weight else None,
            experts.table,
            bias_base,
            None if biases is None else biases.table,
            bias_scale,
            out,
            offsets,
            *counts,
            triton_dtype(x.dtype),
            1 << num_experts.bit_length(),
            config.block_m,
            config.block_f,
            config.block_c,
            config.group,
            *forms,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


_launch = Launches(_grouped_gemm_kernel)
