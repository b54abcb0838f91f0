"""Triton kernel of the forward and the dgrad of experts, with quantised operands: ``out[t] = x[t] W_e^T + s[t] b_e``.

Legend: E experts, T rows; C the contracted dim, F the features of the result. Both operands have C as their last dim:
the dgrad takes transposed copies of weights. Tiles are found as in ``grouped/gemm_triton.py``.

Hopper's tensor cores keep about 14 bits of a sum of 8-bit products. A sum leaves them after each BLOCK_C terms, and is
added in fp32.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import device_of
from ..experts import PerExpert, locate_experts
from ..grouped.gemm_triton import find_tile
from ..triton_support import Launches, expert_pointer, kinds_of, triton_dtype
from .grouped import GroupedQuantized, QuantizedExperts

__all__ = ["ScaledGemmConfig", "default_scaled_gemm_config", "scaled_grouped_gemm_triton"]


class ScaledGemmConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape; under scales of blocks block_c is 128."""

    block_m: int
    block_f: int
    block_c: int
    num_warps: int
    num_stages: int
    group: int = 8
    """Number of tiles along an expert's rows that share operands in L2."""


def default_scaled_gemm_config(rows_per_expert: float, *, blocks: bool) -> ScaledGemmConfig:
    """The fastest of those measured (H200; 8 experts of 2,048 rows, 64 of 512); ``blocks``: scales are those of blocks.

    Two or three programs share a multiprocessor: one's sums leave the tensor cores while another's products run.
    """
    if blocks or rows_per_expert <= 1024:
        return ScaledGemmConfig(64, 128, 128, 4, 3)
    return ScaledGemmConfig(128, 128, 128, 4, 3, group=16)


@triton.jit
def _scaled_gemm_kernel(
    x_desc: tl.tensor,
    x_scale: tl.tensor,
    weight_desc: tl.tensor,
    weight_scale: tl.tensor,
    bias_ptr: tl.tensor,
    bias_table: tl.tensor,
    bias_scale: tl.tensor,
    out_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    F: tl.tensor,
    C: tl.tensor,
    stride_x_scale: tl.tensor,
    stride_weight_scale: tl.tensor,
    stride_bias: tl.tensor,
    stride_out: tl.tensor,
    bias_first: tl.tensor,
    bias_step: tl.tensor,
    tiles_f: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_SCATTERED: tl.constexpr,
    BIAS_SCALE: tl.constexpr,
) -> None:
    # BLOCKS: scales are those of 1 x 128 of x and of 128 x 128 of the weight; else those of experts.
    program = tl.program_id(0)
    expert, row, end, tile_f = find_tile(program, offsets_ptr, E, T, tiles_f, BLOCK_E, BLOCK_M, GROUP)
    if expert <= E:
        m = row + tl.arange(0, BLOCK_M)
        f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
        inside_m = m < end
        inside_f = f < F
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        if expert < E:
            if BLOCKS:
                tl.static_assert(BLOCK_C == 128 and 128 % BLOCK_F == 0)
                blocks_c = tl.cdiv(C, 128)
                blocks_f = tl.cdiv(F, 128)
                scales = weight_scale + (expert * blocks_f + tile_f * BLOCK_F // 128) * stride_weight_scale
                for block in tl.range(0, blocks_c):
                    x = x_desc.load([row, block * 128])
                    w = weight_desc.load([expert, tile_f * BLOCK_F, block * 128]).reshape(BLOCK_F, BLOCK_C)
                    of_x = tl.load(x_scale + block.to(tl.int64) * stride_x_scale + m, mask=inside_m, other=0.0)
                    of_both = of_x * tl.load(scales + block)
                    acc += tl.dot(x, w.T) * of_both[:, None]
            else:
                for c in tl.range(0, C, BLOCK_C):
                    x = x_desc.load([row, c])
                    w = weight_desc.load([expert, tile_f * BLOCK_F, c]).reshape(BLOCK_F, BLOCK_C)
                    acc = tl.dot(x, w.T, acc, max_num_imprecise_acc=BLOCK_C)
                acc *= tl.load(x_scale + expert) * tl.load(weight_scale + expert)
            if BIAS:
                bias = expert_pointer(
                    bias_ptr, bias_table, expert, bias_first, bias_step, stride_bias, DTYPE, BIAS_SCATTERED, False
                )
                b = tl.load(bias + f, mask=inside_f, other=0.0).to(tl.float32)[None, :]
                if BIAS_SCALE:
                    b = b * tl.load(bias_scale + m, mask=inside_m, other=0.0).to(tl.float32)[:, None]
                acc += b
        at = out_ptr + m[:, None].to(tl.int64) * stride_out + f[None, :]
        tl.store(at, acc.to(DTYPE), mask=inside_m[:, None] & inside_f[None, :])


def scaled_grouped_gemm_triton(
    x: GroupedQuantized,
    weights: QuantizedExperts,
    out: Tensor,
    config: ScaledGemmConfig,
    *,
    bias: PerExpert | None = None,
    bias_scale: Tensor | None = None,
) -> None:
    """``out[t] = x[t] W_e^T + s[t] b_e``: x [T, C], W_e [F, C], out [T, F] with adjacent columns, b_e of its dtype."""
    data, of_weights = x.matrix.data, weights.data
    rows, features = out.shape
    num_experts = of_weights.shape[0]
    blocks = x.matrix.spec.block is not None
    biases = None if bias is None else locate_experts(bias)
    tiles_f = -(-features // config.block_f)
    tiles_m = rows // config.block_m + min(num_experts + 1, rows)  # each group has at most one partial tile
    strides = (x.matrix.scale.stride(1), weights.scale.stride(1)) if blocks else (0, 0)
    of_bias = (0, 0, 0) if biases is None else (biases.stride, biases.first, biases.step)
    forms = biases is not None, biases is not None and biases.table is not None, bias_scale is not None
    counts = num_experts, rows, features, x.matrix.columns, *strides, of_bias[0], out.stride(0), *of_bias[1:], tiles_f
    bias_base = None if biases is None else biases.base
    key = (
        out.get_device(),
        counts,
        blocks,
        forms,
        config,
        kinds_of(data, of_weights, bias_base, bias_scale, out, x.offsets),
    )
    with device_of(out):
        _launch(
            key,
            (tiles_m * tiles_f, 1, 1),
            TensorDescriptor.from_tensor(data, [config.block_m, config.block_c]),
            x.matrix.scale,
            TensorDescriptor.from_tensor(of_weights, [1, config.block_f, config.block_c]),
            weights.scale,
            bias_base,
            None if biases is None else biases.table,
            bias_scale,
            out,
            x.offsets,
            *counts,
            triton_dtype(out.dtype),
            1 << num_experts.bit_length(),
            config.block_m,
            config.block_f,
            config.block_c,
            config.group,
            blocks,
            *forms,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


_launch = Launches(_scaled_gemm_kernel)
