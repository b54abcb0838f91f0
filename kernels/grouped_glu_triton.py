"""The gated activation as an epilogue of the grouped products, in Triton: forward, and dgrad with its gradients.

Legend: E experts, T rows, F features of the activation's output; h [T, 2F] is the gate's half and then the linear half;
C what a product sums over (K forward, N in dgrad). A program owns BLOCK_M rows of one expert and BLOCK_F features, of
both halves. What the unfused operations would write to memory and read again is rounded as they would round it, so that
results are theirs. Programs find their tiles as in ``grouped_gemm_triton``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .compat import device_of
from .experts import PerExpert, locate_experts
from .grouped_gemm_triton import GemmConfig, find_tile, products
from .scaled_glu_reference import Glu
from .scaled_glu_triton import glu_gradients, glu_numbers, glu_value
from .triton_support import dot_precision, expert_pointer, experts_descriptor, takes_tma, triton_dtype

__all__ = [
    "GLU_BACKWARD_CANDIDATES",
    "GLU_CANDIDATES",
    "default_glu_backward_config",
    "default_glu_config",
    "grouped_dgrad_glu_triton",
    "grouped_linear_glu_triton",
]

_PART = 32
"""Columns whose gradients are computed at a time: 128 at once spill, 64 do where halves are clamped, and 32 leave room
for two programs of 8 warps on a multiprocessor of an H100."""

# ``block_f`` is of each half: the forward has two accumulators of it.
GLU_CANDIDATES = (
    GemmConfig(128, 128, 64, 8, 3, tma=True),
    GemmConfig(128, 128, 64, 8, 4, tma=True),
    GemmConfig(128, 64, 64, 4, 4, tma=True),
    GemmConfig(64, 64, 64, 4, 4, tma=True),
    GemmConfig(128, 128, 64, 8, 3),
    GemmConfig(128, 64, 32, 4, 4),
)
GLU_BACKWARD_CANDIDATES = (
    GemmConfig(128, 128, 64, 8, 3, tma=True),
    GemmConfig(128, 128, 64, 8, 4, tma=True),
    GemmConfig(128, 256, 64, 8, 3, tma=True),
    GemmConfig(64, 128, 64, 4, 4, tma=True),
    GemmConfig(128, 128, 64, 8, 3),
    GemmConfig(128, 128, 32, 8, 4),
)


def default_glu_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> GemmConfig:
    """Of the forward. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return GemmConfig(64, 32, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        return GemmConfig(128, 128, 64, 8, 3, tma=True) if rows_per_expert > 64 else GemmConfig(64, 64, 64, 4, 4, True)
    return GemmConfig(128, 64, 32, 4, 3) if capability is not None else GemmConfig(128, 64, 32, 8, 2)


def default_glu_backward_config(
    dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float
) -> GemmConfig:
    """Of dgrad with the activation's gradients, which has one accumulator."""
    if dtype is torch.float32:
        return GemmConfig(64, 32, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        return GemmConfig(128, 128, 64, 8, 3, tma=True) if rows_per_expert > 64 else GemmConfig(64, 128, 64, 4, 4, True)
    return GemmConfig(128, 64, 32, 4, 3) if capability is not None else GemmConfig(128, 64, 32, 8, 2)


@triton.jit
def _two_products(
    x_ptr: tl.tensor, x_desc: tl.tensor, stride_x: tl.tensor,
    weight: tl.tensor, weight_desc: tl.tensor, stride_weight: tl.tensor,
    place: tl.tensor, row: tl.tensor, end: tl.tensor, column: tl.tensor, F: tl.tensor, C: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    TMA_X: tl.constexpr, TMA_WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Two tiles from ``row`` on, of the gate's columns and the linear ones; x is loaded once. The weight is [2F, C]."""
    m = row + tl.arange(0, BLOCK_M)
    f = column + tl.arange(0, BLOCK_F)
    inside_m = m < end
    inside_f = f < F
    gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    linear = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for block in tl.range(0, C, BLOCK_C):
        c = block + tl.arange(0, BLOCK_C)
        if TMA_X:
            x = x_desc.load([row, block])  # [BLOCK_M, BLOCK_C]; rows of the next expert give rows nobody keeps
        else:
            at = x_ptr + m[:, None].to(tl.int64) * stride_x + c[None, :]
            x = tl.load(at, mask=inside_m[:, None] & (c < C)[None, :], other=0.0)
        if TMA_WEIGHT:
            # Columns beyond F of the gate's tile are the linear half's, which nobody keeps.
            w_gate = weight_desc.load([place, column, block]).reshape(BLOCK_F, BLOCK_C).T
            w_linear = weight_desc.load([place, F + column, block]).reshape(BLOCK_F, BLOCK_C).T
        else:
            at = weight + f[:, None].to(tl.int64) * stride_weight + c[None, :]
            inside = inside_f[:, None] & (c < C)[None, :]
            w_gate = tl.load(at, mask=inside, other=0.0).T
            w_linear = tl.load(at + F.to(tl.int64) * stride_weight, mask=inside, other=0.0).T
        gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
        linear = tl.dot(x, w_linear, linear, input_precision=PRECISION)
    return gate, linear


@triton.jit
def _grouped_linear_glu_kernel(
    x_ptr: tl.tensor, x_desc: tl.tensor, weight_ptr: tl.tensor, weight_desc: tl.tensor, weight_table: tl.tensor,
    bias_ptr: tl.tensor, bias_table: tl.tensor, probs_ptr: tl.tensor, h_ptr: tl.tensor, a_ptr: tl.tensor,
    offsets_ptr: tl.tensor, E: tl.tensor, T: tl.tensor, F: tl.tensor, C: tl.tensor,
    stride_x: tl.tensor, stride_expert: tl.tensor, stride_weight: tl.tensor, stride_bias: tl.tensor,
    first: tl.tensor, step: tl.tensor, bias_first: tl.tensor, bias_step: tl.tensor, tiles_f: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, offset: tl.tensor,
    DTYPE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, TMA_X: tl.constexpr, TMA_WEIGHT: tl.constexpr, SCATTERED: tl.constexpr, ALIGNED: tl.constexpr,
    BIAS: tl.constexpr, BIAS_SCATTERED: tl.constexpr, PRECISION: tl.constexpr,
    FUNCTION: tl.constexpr, CLAMPED: tl.constexpr, SCALED: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    expert, row, end, tile_f = find_tile(program, offsets_ptr, E, T, tiles_f, BLOCK_E, BLOCK_M, GROUP)
    if expert <= E:
        m = row + tl.arange(0, BLOCK_M)
        f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
        inside_f = f < F
        mask = (m < end)[:, None] & inside_f[None, :]
        gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        linear = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        if expert < E:
            weight = expert_pointer(
                weight_ptr, weight_table, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED
            )
            gate, linear = _two_products(
                x_ptr, x_desc, stride_x, weight, weight_desc, stride_weight, first + step * expert,
                row, end, tile_f * BLOCK_F, F, C, BLOCK_M, BLOCK_F, BLOCK_C, TMA_X, TMA_WEIGHT, PRECISION,
            )  # fmt: skip
            if BIAS:
                bias = expert_pointer(
                    bias_ptr, bias_table, expert, bias_first, bias_step, stride_bias, DTYPE, BIAS_SCATTERED, False
                )
                gate += tl.load(bias + f, mask=inside_f, other=0.0).to(tl.float32)[None, :]
                linear += tl.load(bias + F + f, mask=inside_f, other=0.0).to(tl.float32)[None, :]
        gate_h, linear_h = gate.to(DTYPE), linear.to(DTYPE)
        at = h_ptr + m[:, None].to(tl.int64) * (2 * F) + f[None, :]
        tl.store(at, gate_h, mask=mask)
        tl.store(at + F, linear_h, mask=mask)
        value = glu_value(gate_h.to(tl.float32), linear_h.to(tl.float32), alpha, limit, offset, FUNCTION, CLAMPED)
        if SCALED:
            # Pad rows may have any probability, NaN included.
            p = tl.load(probs_ptr + m, mask=(m < end) & (expert < E), other=0.0).to(tl.float32)
            value = value * p[:, None]
        tl.store(a_ptr + m[:, None].to(tl.int64) * F + f[None, :], value.to(DTYPE), mask=mask)


@triton.jit
def _write_gradients(
    acc: tl.tensor, expert: tl.tensor, row: tl.tensor, end: tl.tensor, column: tl.tensor,
    h_ptr: tl.tensor, probs_ptr: tl.tensor, dh_ptr: tl.tensor, E: tl.tensor, F: tl.tensor, stride_h: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, offset: tl.tensor,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    FUNCTION: tl.constexpr, CLAMPED: tl.constexpr, SCALED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of h in the tile [ROWS, COLUMNS] whose da is ``acc``, in PARTS blocks of columns; the terms of dp, summed."""
    if PARTS > 1:
        left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        sums = _write_gradients(
            left, expert, row, end, column, h_ptr, probs_ptr, dh_ptr, E, F, stride_h, alpha, limit, offset,
            DTYPE, ROWS, COLUMNS // 2, PARTS // 2, FUNCTION, CLAMPED, SCALED,
        )  # fmt: skip
        sums += _write_gradients(
            right, expert, row, end, column + COLUMNS // 2, h_ptr, probs_ptr, dh_ptr, E, F, stride_h,
            alpha, limit, offset, DTYPE, ROWS, COLUMNS // 2, PARTS // 2, FUNCTION, CLAMPED, SCALED,
        )  # fmt: skip
    else:
        m = row + tl.arange(0, ROWS)
        f = column + tl.arange(0, COLUMNS)
        # Pad rows of h and p may hold anything.
        used = (m < end) & (expert < E)
        inside = used[:, None] & (f < F)[None, :]
        at = h_ptr + m[:, None].to(tl.int64) * stride_h + f[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
        p = 1.0
        if SCALED:
            p = tl.load(probs_ptr + m, mask=used, other=0.0).to(tl.float32)[:, None]
        # The unfused product would have rounded it. Columns beyond F are zeros, and no terms of a sum.
        da = acc.to(DTYPE).to(tl.float32)
        dgate, dlinear, terms = glu_gradients(da, p, gate, linear, alpha, limit, offset, FUNCTION, CLAMPED, SCALED)
        to = dh_ptr + m[:, None].to(tl.int64) * (2 * F) + f[None, :]
        mask = (m < end)[:, None] & (f < F)[None, :]
        tl.store(to, dgate.to(DTYPE), mask=mask)
        tl.store(to + F, dlinear.to(DTYPE), mask=mask)
        sums = tl.sum(terms, axis=1)
    return sums


@triton.jit
def _grouped_dgrad_glu_kernel(
    dy_ptr: tl.tensor, dy_desc: tl.tensor, weight_ptr: tl.tensor, weight_desc: tl.tensor, weight_table: tl.tensor,
    h_ptr: tl.tensor, probs_ptr: tl.tensor, dh_ptr: tl.tensor, partials_ptr: tl.tensor,
    offsets_ptr: tl.tensor, E: tl.tensor, T: tl.tensor, F: tl.tensor, C: tl.tensor,
    stride_dy: tl.tensor, stride_expert: tl.tensor, stride_weight: tl.tensor, stride_h: tl.tensor,
    first: tl.tensor, step: tl.tensor, tiles_f: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, offset: tl.tensor,
    DTYPE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, TMA_DY: tl.constexpr, TMA_WEIGHT: tl.constexpr, SCATTERED: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, FUNCTION: tl.constexpr, CLAMPED: tl.constexpr, SCALED: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    expert, row, end, tile_f = find_tile(program, offsets_ptr, E, T, tiles_f, BLOCK_E, BLOCK_M, GROUP)
    if expert <= E:
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        if expert < E:
            weight = expert_pointer(
                weight_ptr, weight_table, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED
            )
            acc = products(
                dy_ptr, dy_desc, stride_dy, weight, weight_desc, stride_weight, first + step * expert,
                row, end, tile_f * BLOCK_F, F, C, BLOCK_M, BLOCK_F, BLOCK_C, False, TMA_DY, TMA_WEIGHT, PRECISION,
            )  # fmt: skip
        sums = _write_gradients(
            acc, expert, row, end, tile_f * BLOCK_F, h_ptr, probs_ptr, dh_ptr, E, F, stride_h, alpha, limit, offset,
            DTYPE, BLOCK_M, BLOCK_F, PARTS, FUNCTION, CLAMPED, SCALED,
        )  # fmt: skip
        if SCALED:
            m = row + tl.arange(0, BLOCK_M)
            tl.store(partials_ptr + tile_f.to(tl.int64) * T + m, sums, mask=m < end)


def grouped_linear_glu_triton(
    x: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    probs: Tensor | None,
    h: Tensor,
    a: Tensor,
    glu: Glu,
    config: GemmConfig,
    *,
    bias: PerExpert | None = None,
) -> None:
    """``h[t] = x[t] W_e^T + b_e`` and ``a[t] = p[t] glu(h[t])``; arguments were checked by the caller.

    x [T, K] with adjacent columns, W_e [2F, K], all of one row stride; h [T, 2F] and a [T, F] contiguous.
    """
    (rows, contracted), features = x.shape, a.shape[1]
    num_experts = offsets.shape[0] - 1
    experts = locate_experts(weights)
    biases = None if bias is None else locate_experts(bias)
    tiles_f, tiles = _tiles(rows, features, num_experts, config)
    if not tiles:
        return
    tma_x = config.tma and takes_tma(x)
    tma_weight = config.tma and experts.table is None and experts.aligned and takes_tma(experts.base)
    block = [1, config.block_f, config.block_c]
    with device_of(x):
        _grouped_linear_glu_kernel[(tiles,)](
            x,
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_c]) if tma_x else None,
            experts.base,
            experts_descriptor(experts, num_experts, block) if tma_weight else None,
            experts.table,
            None if biases is None else biases.base,
            None if biases is None else biases.table,
            probs, h, a, offsets, num_experts, rows, features, contracted,
            x.stride(0), experts.stride, experts.base.stride(0), 0 if biases is None else biases.stride,
            experts.first, experts.step,
            0 if biases is None else biases.first, 0 if biases is None else biases.step,
            tiles_f, *glu_numbers(glu),
            DTYPE=triton_dtype(x.dtype), BLOCK_E=triton.next_power_of_2(num_experts + 1),
            BLOCK_M=config.block_m, BLOCK_F=config.block_f, BLOCK_C=config.block_c, GROUP=config.group,
            TMA_X=tma_x, TMA_WEIGHT=tma_weight, SCATTERED=experts.table is not None, ALIGNED=experts.aligned,
            BIAS=biases is not None, BIAS_SCATTERED=biases is not None and biases.table is not None,
            PRECISION=dot_precision(),
            FUNCTION=glu.function, CLAMPED=glu.limit is not None, SCALED=probs is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def grouped_dgrad_glu_triton(
    dy: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    h: Tensor,
    probs: Tensor | None,
    dh: Tensor,
    glu: Glu,
    config: GemmConfig,
) -> Tensor | None:
    """Write the gradient of ``h`` from that of what ``W_e`` made of the activation; return ``probs``', or None.

    dy [T, N] and h [T, 2F] with adjacent columns, W_e [N, F], all of one row stride; dh [T, 2F] contiguous.
    """
    (rows, contracted), features = dy.shape, h.shape[1] // 2
    num_experts = offsets.shape[0] - 1
    experts = locate_experts(weights)
    tiles_f, tiles = _tiles(rows, features, num_experts, config)
    if not tiles:
        return None if probs is None else dy.new_empty(rows, dtype=torch.float32).zero_()
    # One sum for each column of tiles, added up afterwards: in an order, which atomics have not.
    partials = None if probs is None else dy.new_empty(tiles_f, rows, dtype=torch.float32)
    tma_dy = config.tma and takes_tma(dy)
    tma_weight = config.tma and experts.table is None and experts.aligned and takes_tma(experts.base)
    block = [1, config.block_c, config.block_f]
    with device_of(dy):
        _grouped_dgrad_glu_kernel[(tiles,)](
            dy,
            TensorDescriptor.from_tensor(dy, [config.block_m, config.block_c]) if tma_dy else None,
            experts.base,
            experts_descriptor(experts, num_experts, block) if tma_weight else None,
            experts.table,
            h, probs, dh, partials, offsets, num_experts, rows, features, contracted,
            dy.stride(0), experts.stride, experts.base.stride(0), h.stride(0),
            experts.first, experts.step, tiles_f, *glu_numbers(glu),
            DTYPE=triton_dtype(dy.dtype), BLOCK_E=triton.next_power_of_2(num_experts + 1),
            BLOCK_M=config.block_m, BLOCK_F=config.block_f, BLOCK_C=config.block_c, GROUP=config.group,
            TMA_DY=tma_dy, TMA_WEIGHT=tma_weight, SCATTERED=experts.table is not None, ALIGNED=experts.aligned,
            PRECISION=dot_precision(), PARTS=max(1, config.block_f // _PART),
            FUNCTION=glu.function, CLAMPED=glu.limit is not None, SCALED=probs is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return None if partials is None else partials.sum(0)


def _tiles(rows: int, features: int, num_experts: int, config: GemmConfig) -> tuple[int, int]:
    """Columns of tiles, and as many tiles as any split sizes need: each group adds at most one that is not full."""
    tiles_f = int(triton.cdiv(features, config.block_f))
    return tiles_f, (rows // config.block_m + min(num_experts + 1, rows)) * tiles_f
