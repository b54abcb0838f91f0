"""Triton kernel of the weight gradients of experts, with quantised operands: ``G_e = beta_e G_e + dy_e^T x_e``.

Legend: E experts, N output features, K input features, T the tokens, along which a product contracts. Both operands are
transposed copies, [N, T] and [K, T]: ``grouped.py`` says where an expert's tokens lie. How G is read and written is in
``grouped/wgrad_triton.py``.

An expert's whole blocks are products of 128 tokens. What is left of its tokens is a multiple of 16, and tensor cores
take 32: the last 16 are read by a descriptor that knows no more than 16, so that the tensor memory accelerator fills
the other half with zeros. What lies behind them may be another expert's.

A sum leaves the tensor cores after 128 terms at most, and is added in fp32.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import device_of
from ..experts import locate_experts
from ..grouped.wgrad_triton import beta_of, update_in_parts
from ..triton_support import Launches, expert_pointer, kinds_of, prefetch_to_l2, tile_of, triton_dtype
from .grouped import GroupedQuantized

__all__ = ["scaled_grouped_wgrad_triton"]


_BLOCK_N, _BLOCK_K, _PARTS, _GROUP = 64, 128, 2, 8
"""A tile; the blocks of columns in which it is read and written; tiles along N that share operands in L2. The fastest
of those measured (H200; 8 experts of 2,048 rows, 64 of 512): larger tiles need more registers than a thread has."""


@triton.jit
def _sum_of_experts(
    dy_desc: tl.tensor,
    x_desc: tl.tensor,
    dy_rest: tl.tensor,
    x_rest: tl.tensor,
    dy_last: tl.tensor,
    x_last: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    rest: tl.tensor,
    rest_end: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Products of elements over the tokens of whole blocks, start to end, and of the rest: [BLOCK_N, BLOCK_K] fp32."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for t in tl.range(start, end, 128):
        dy = dy_desc.load([row, t])
        x = x_desc.load([column, t])
        acc = tl.dot(dy, x.T, acc, max_num_imprecise_acc=128)
    if rest < rest_end:
        acc += _sum_of_rest(dy_rest, x_rest, dy_last, x_last, rest, rest_end, row, column, BLOCK_N, BLOCK_K)
    return acc


@triton.jit
def _sum_of_blocks(
    dy_desc: tl.tensor,
    x_desc: tl.tensor,
    dy_rest: tl.tensor,
    x_rest: tl.tensor,
    dy_last: tl.tensor,
    x_last: tl.tensor,
    dy_scale: tl.tensor,
    x_scale: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    rest: tl.tensor,
    rest_end: tl.tensor,
    rest_block: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The same where each 128 tokens of a feature have a scale; those of the rest have the number ``rest_block``."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    n = row + tl.arange(0, BLOCK_N)
    k = column + tl.arange(0, BLOCK_K)
    for block in tl.range(start // 128, end // 128):
        dy = dy_desc.load([row, block * 128])
        x = x_desc.load([column, block * 128])
        acc += _scaled(tl.dot(dy, x.T), dy_scale, x_scale, block, n, k, N, K)
    if rest < rest_end:
        product = _sum_of_rest(dy_rest, x_rest, dy_last, x_last, rest, rest_end, row, column, BLOCK_N, BLOCK_K)
        acc += _scaled(product, dy_scale, x_scale, rest_block, n, k, N, K)
    return acc


@triton.jit
def _sum_of_rest(
    dy_rest: tl.tensor,
    x_rest: tl.tensor,
    dy_last: tl.tensor,
    x_last: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The product over what is left of an expert's tokens: fewer than 128, with zeros up to a multiple of 16."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    whole = start + (end - start) // 32 * 32
    for t in tl.range(start, whole, 32):
        acc = tl.dot(dy_rest.load([row, t]), x_rest.load([column, t]).T, acc)
    if whole < end:
        dy = dy_last.load([whole // 16, row, 0]).reshape(BLOCK_N, 32)
        x = x_last.load([whole // 16, column, 0]).reshape(BLOCK_K, 32)
        acc = tl.dot(dy, x.T, acc)
    return acc


@triton.jit
def _scaled(
    product: tl.tensor,
    dy_scale: tl.tensor,
    x_scale: tl.tensor,
    block: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
) -> tl.tensor:
    of_dy = tl.load(dy_scale + block.to(tl.int64) * N + n, mask=n < N, other=0.0)
    of_x = tl.load(x_scale + block.to(tl.int64) * K + k, mask=k < K, other=0.0)
    return product * of_dy[:, None] * of_x[None, :]


@triton.jit
def _scaled_wgrad_kernel(
    dy_desc: tl.tensor,
    x_desc: tl.tensor,
    dy_rest: tl.tensor,
    x_rest: tl.tensor,
    dy_last: tl.tensor,
    x_last: tl.tensor,
    dy_scale: tl.tensor,
    x_scale: tl.tensor,
    grad_ptr: tl.tensor,
    table_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_expert: tl.tensor,
    stride_grad: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    tiles_n: tl.tensor,
    tiles_k: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BETA: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    # BETA: 0 overwrites, 1 accumulates, 2 reads a value per expert from beta_ptr [E]: 0, 1, or -1 for frozen.
    program = tl.program_id(0)
    tiles = tiles_n * tiles_k
    expert = program // tiles
    tile_n, tile_k = tile_of(program % tiles, tiles_n, tiles_k, GROUP)
    start = tl.load(offsets_ptr + expert).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    experts = tl.num_programs(0) // tiles
    rest = tl.load(offsets_ptr + experts + expert).to(tl.int32)
    rest_end = tl.load(offsets_ptr + experts + expert + 1).to(tl.int32)
    has_tokens = (start < end) | (rest < rest_end)
    live = (BETA == 0) | has_tokens
    reads = BETA == 1
    if BETA == 2:
        beta = tl.load(beta_ptr + expert)
        reads = beta == 1
        live = (beta == 0) | (reads & has_tokens)
    if live:
        grad = expert_pointer(grad_ptr, table_ptr, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED)
        row, column = tile_n * BLOCK_N, tile_k * BLOCK_K
        if BETA != 0:
            # One address per cache line of 128 bytes, clamped to the matrix.
            lines: tl.constexpr = BLOCK_K * DTYPE.primitive_bitwidth // 1024
            n = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1)[:, None]
            k = tl.minimum(column + tl.arange(0, lines) * (BLOCK_K // lines), K - 1)[None, :]
            prefetch_to_l2(grad + n.to(tl.int64) * stride_grad + k)
        # fmt: off
        if BLOCKS:
            acc = _sum_of_blocks(
                dy_desc, x_desc, dy_rest, x_rest, dy_last, x_last, dy_scale, x_scale,
                start, end, rest, rest_end, rest // 128 + expert, row, column, N, K, BLOCK_N, BLOCK_K,
            )
        else:
            acc = _sum_of_experts(
                dy_desc, x_desc, dy_rest, x_rest, dy_last, x_last, start, end, rest, rest_end, row, column,
                BLOCK_N, BLOCK_K,
            )
            acc *= tl.load(dy_scale + expert) * tl.load(x_scale + expert)
        update_in_parts(
            acc, grad, None, 0, row, column, N, K, stride_grad, reads, BLOCK_N, BLOCK_K, BETA, PARTS, False
        )
        # fmt: on


def scaled_grouped_wgrad_triton(
    dy: GroupedQuantized,
    x: GroupedQuantized,
    main_grads: Tensor | Sequence[Tensor | None],
    overwrite: bool | Sequence[bool],
) -> None:
    """``G_e = beta_e G_e + dy_e^T x_e``: dy [N, T] and x [K, T] are transposed copies.

    All accumulators that are not None have one dtype and one row stride.
    """
    num_experts = len(main_grads)
    n, k = dy.matrix.shape[0], x.matrix.shape[0]
    experts = locate_experts(main_grads)
    beta, betas = beta_of(main_grads, overwrite, dy.offsets.device)
    tiles_n, tiles_k = -(-n // _BLOCK_N), -(-k // _BLOCK_K)
    stride = experts.base.stride(0)
    counts = n, k, experts.stride, stride, experts.first, experts.step, tiles_n, tiles_k
    forms = dy.matrix.spec.block is not None, beta, experts.table is not None, experts.aligned
    kinds = kinds_of(dy.matrix.data, x.matrix.data, experts.base, dy.offsets)
    key = dy.offsets.get_device(), num_experts, counts, forms, kinds
    with device_of(dy.offsets):
        _launch(
            key,
            (num_experts * tiles_n * tiles_k, 1, 1),
            TensorDescriptor.from_tensor(dy.matrix.data, [_BLOCK_N, 128]),
            TensorDescriptor.from_tensor(x.matrix.data, [_BLOCK_K, 128]),
            TensorDescriptor.from_tensor(dy.matrix.data, [_BLOCK_N, 32]),
            TensorDescriptor.from_tensor(x.matrix.data, [_BLOCK_K, 32]),
            _sixteen_columns(dy.matrix.data, _BLOCK_N),
            _sixteen_columns(x.matrix.data, _BLOCK_K),
            dy.matrix.scale,
            x.matrix.scale,
            experts.base,
            experts.table,
            betas,
            dy.offsets,
            *counts,
            triton_dtype(experts.base.dtype),
            _BLOCK_N,
            _BLOCK_K,
            _GROUP,
            _PARTS,
            *forms,
        )


def _sixteen_columns(copy: Tensor, rows: int) -> TensorDescriptor:
    """Number, row, column: the matrix of 16 columns with each number, in boxes of 32 columns. The last 16 are zeros."""
    height, width = copy.shape
    return TensorDescriptor(copy, [width // 16, height, 16], [16, copy.stride(0), 1], [1, rows, 32])


_launch = Launches(_scaled_wgrad_kernel, num_warps=4, num_stages=3)
