"""Triton kernel of the forward and the dgrad of grouped linear layers, in half precision, fp32 or 8 bits.

Legend: E experts, T rows, N output features, K input features; C the contracted dim (K in forward, N in dgrad), F the
features of the result (N in forward, K in dgrad).

A program computes one [BLOCK_M, BLOCK_F] tile of rows of one expert. Only the device knows the number of tiles of an
expert. The grid is therefore large enough for any split sizes: each program finds its tile from the offsets, and
surplus programs end at once. A persistent grid was measured to be slower (0.464 ms instead of 0.460 ms with 64 experts
of 512 rows, N = K = 2048, on an H200). Rows behind the last expert form one more group, whose tiles are zeros.

Quantised operands both have C as their last dim: the dgrad takes transposed copies of weights. Hopper's tensor cores
keep about 14 bits of a sum of 8-bit products. A sum leaves them after each BLOCK_C terms, and is added in fp32.
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
    tiles_of_experts,
)

__all__ = [
    "GEMM_CANDIDATES",
    "GemmConfig",
    "default_gemm_config",
    "default_scaled_gemm_config",
    "grouped_gemm_triton",
]


class GemmConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape; under scales of blocks block_c is 128."""

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
    GemmConfig(128, 128, 64, 4, 3, tma=True),
    GemmConfig(64, 128, 64, 4, 4, tma=True),
    GemmConfig(128, 256, 64, 8, 4),
    GemmConfig(128, 128, 64, 4, 3),
    GemmConfig(128, 128, 32, 4, 4),
)
"""Each with ``tma`` is the fastest of 12 for a shape of ``tuned.csv``, or the default of one. The others are for GPUs
before sm90."""


def default_gemm_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> GemmConfig:
    """The configuration for unmeasured shapes. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return GemmConfig(64, 64, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        return GemmConfig(128, 256, 64, 8, 4, tma=True) if rows_per_expert > 64 else GemmConfig(64, 128, 64, 4, 4, True)
    if capability is not None:
        return GemmConfig(128, 128, 32, 4, 3)
    return GemmConfig(128, 128, 32, 8, 2)


def default_scaled_gemm_config(rows_per_expert: float, *, blocks: bool) -> GemmConfig:
    """The fastest of those measured (H200; 8 experts of 2,048 rows, 64 of 512); ``blocks``: scales are those of blocks.

    Two or three programs share a multiprocessor: one's sums leave the tensor cores while another's products run.
    """
    if blocks or rows_per_expert <= 1024:
        return GemmConfig(64, 128, 128, 4, 3, tma=True)
    return GemmConfig(128, 128, 128, 4, 3, tma=True, group=16)


@triton.jit
def _products(
    x: tl.tuple,
    weight: tl.tuple,
    row: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    T: tl.tensor,
    F: tl.tensor,
    C: tl.tensor,
    CONFIG: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The tile from ``row`` and ``column`` on: [BLOCK_M, BLOCK_F] fp32.

    x       pointer, or descriptor if not None; row stride; scales of quantised rows
    weight  the same of the expert's; its place in the descriptor and among the scales

    BLOCKS: scales are those of 1 x 128 of x, [blocks, T], and of 128 x 128 of W_e, [E, blocks, blocks].
    """
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_F: tl.constexpr = CONFIG.block_f
    BLOCK_C: tl.constexpr = CONFIG.block_c
    x_ptr, x_desc, stride_x, x_scale = x
    weight_ptr, weight_desc, stride_weight, weight_scale, place = weight
    m = row + tl.arange(0, BLOCK_M)
    f = column + tl.arange(0, BLOCK_F)
    inside_m = m < end
    inside_f = f < F
    if BLOCKS:
        tl.static_assert(BLOCK_C == 128 and 128 % BLOCK_F == 0)
        weight_scale += (place * tl.cdiv(F, 128) + column // 128) * tl.cdiv(C, 128)
    acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for block in tl.range(0, tl.cdiv(C, BLOCK_C)):
        start = block * BLOCK_C
        c = start + tl.arange(0, BLOCK_C)
        if x_desc is not None:
            rows = x_desc.load([row, start])  # [BLOCK_M, BLOCK_C]; results of the next expert's rows are dropped
        else:
            at = x_ptr + m[:, None].to(tl.int64) * stride_x + c[None, :]
            rows = tl.load(at, mask=inside_m[:, None] & (c < C)[None, :], other=0.0)
        if weight_desc is not None:
            if TRANSPOSED:
                w = weight_desc.load([place, column, start]).reshape(BLOCK_F, BLOCK_C).T
            else:
                w = weight_desc.load([place, start, column]).reshape(BLOCK_C, BLOCK_F)
        elif TRANSPOSED:
            at = weight_ptr + f[:, None].to(tl.int64) * stride_weight + c[None, :]
            w = tl.load(at, mask=inside_f[:, None] & (c < C)[None, :], other=0.0).T
        else:
            at = weight_ptr + c[:, None].to(tl.int64) * stride_weight + f[None, :]
            w = tl.load(at, mask=(c < C)[:, None] & inside_f[None, :], other=0.0)
        if BLOCKS:
            of_x = tl.load(x_scale + tl.cast(block, tl.int64) * T + m, mask=inside_m, other=0.0)
            of_both = of_x * tl.load(weight_scale + block)
            acc += tl.dot(rows, w) * of_both[:, None]
        elif x_scale is not None:
            acc = tl.dot(rows, w, acc, max_num_imprecise_acc=BLOCK_C)
        else:
            acc = tl.dot(rows, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _grouped_gemm_kernel(
    x_ptr: tl.tensor,
    x_desc: tl.tensor,
    x_scale: tl.tensor,
    weights: tl.tuple,
    weight_desc: tl.tensor,
    weight_scale: tl.tensor,
    biases: tl.tuple,
    bias_scale: tl.tensor,
    out_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    F: tl.tensor,
    C: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    stride_out: tl.tensor,
    tiles_f: tl.tensor,
    CONFIG: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # The weight is [F, C] if TRANSPOSED (forward), else [C, F] (dgrad). What may be absent is None.
    # BLOCKS: scales of x and weights, if given, are those of blocks, else of experts.
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_F: tl.constexpr = CONFIG.block_f
    program = tl.program_id(0)
    expert, groups, starts, ends, tiles_m, tiles_until = tiles_of_experts(
        program, offsets_ptr, E, T, tiles_f, BLOCK_E, BLOCK_M
    )
    mine = groups == expert
    end = tl.sum(tl.where(mine, ends, 0), 0)
    height = tl.maximum(tl.sum(tl.where(mine, tiles_m, 0), 0), 1)
    before = tl.sum(tl.where(mine, tiles_until - tiles_m, 0), 0)
    tile_m, tile_f = tile_of(program - before * tiles_f, height, tiles_f, CONFIG.group)
    row = tl.sum(tl.where(mine, starts, 0), 0) + tile_m * BLOCK_M
    if expert <= E:
        m = row + tl.arange(0, BLOCK_M)
        column = tile_f * BLOCK_F
        f = column + tl.arange(0, BLOCK_F)
        inside_m = m < end
        inside_f = f < F
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        if expert < E:
            _, _, _, first, step = weights
            place = expert if x_scale is not None else first + step * expert  # quantised weights are one packed tensor
            x = x_ptr, x_desc, stride_x, x_scale
            pointer = expert_pointer(weights, expert, ALIGNED)
            weight = pointer, weight_desc, stride_weight, weight_scale, place
            acc = _products(x, weight, row, end, column, T, F, C, CONFIG, TRANSPOSED, BLOCKS, PRECISION)
            if x_scale is not None and not BLOCKS:
                acc *= tl.load(x_scale + expert) * tl.load(weight_scale + expert)
            if BIAS:  # Triton 3.6 does not compare a tuple with None
                b = tl.load(expert_pointer(biases, expert, False) + f, mask=inside_f, other=0.0)
                b = b.to(tl.float32)[None, :]
                if bias_scale is not None:
                    b = b * tl.load(bias_scale + m, mask=inside_m, other=0.0).to(tl.float32)[:, None]
                acc += b
        at = out_ptr + m[:, None].to(tl.int64) * stride_out + f[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_f[None, :])


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
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``out[t] = x[t] W_e^T + s[t] b_e`` (``transposed``), or ``x[t] W_e``; the caller has checked the arguments.

    x [T, C] and out [T, F] have adjacent columns. W_e are [F, C] (``transposed``) or [C, F], with equal row strides.

    scales  those of quantised x and W_e (``transposed``, by ``kernels.quantized``): of experts, or of blocks
    """
    (rows, contracted), features = x.shape, out.shape[1]
    num_experts = offsets.shape[0] - 1
    experts = locate_experts(weights)
    biases = None if bias is None else locate_experts(bias)
    x_scale, weight_scale = scales or (None, None)
    tiles_f = -(-features // config.block_f)
    # Each group has at most one partial tile.
    tiles_m = rows // config.block_m + min(num_experts + 1, rows)
    tma_x = config.tma and takes_tma(x)
    tma_weight = config.tma and experts.table is None and experts.aligned and takes_tma(experts.base)
    if tiles_m * tiles_f == 0:
        return
    sides = [config.block_f, config.block_c] if transposed else [config.block_c, config.block_f]
    strides = x.stride(0), experts.base.stride(0), out.stride(0)
    counts = num_experts, rows, features, contracted, *strides, tiles_f
    blocks = x_scale is not None and x_scale.dim() == 2
    forms = transposed, experts.aligned, blocks, biases is not None, dot_precision()
    key = (
        x.get_device(),
        config,
        counts,
        (experts.form, biases and biases.form, tma_x, tma_weight),
        forms,
        kinds_of(x, experts.base, biases and biases.base, bias_scale, out, offsets),
    )
    with device_of(x):
        _launch(
            key,
            (tiles_m * tiles_f, 1, 1),
            x,
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_c]) if tma_x else None,
            x_scale,
            experts.argument,
            experts_descriptor(experts, num_experts, [1, *sides]) if tma_weight else None,
            weight_scale,
            biases and biases.argument,
            bias_scale,
            out,
            offsets,
            *counts,
            config,
            1 << num_experts.bit_length(),
            *forms,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


_launch = Launches(_grouped_gemm_kernel)
