"""The experts' weight gradients into their accumulators, in Triton: ``G_e = beta_e G_e + dy_e^T x_e``.

Legend: E experts, T rows, N output features, K input features. A program owns one [BLOCK_N, BLOCK_K] tile of one G_e
and sums over the expert's rows, so that the number of programs is known without the split sizes, and no two programs
write one element: the order of summation depends on the expert's rows alone.

A fine-grained expert has few rows, and its tiles cost as much memory traffic for G as time in products. Three things
hide it: two or three programs share a multiprocessor (small tiles, few registers), so that one's products run under
another's loads and stores; the tile of G is prefetched into L2 before the products that precede its use; and G is
stored past the caches (``.cs``), which leaves L2 to the operands. On an H200 with 64 experts of 512 rows, N = K = 2048:
0.94 ms with plain stores and two programs, 0.87 with all three.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .compat import device_of
from .experts import device_table, locate_experts
from .triton_support import (
    dot_precision,
    expert_pointer,
    experts_descriptor,
    is_interpreted,
    prefetch_to_l2,
    takes_tma,
    tile_of,
    triton_dtype,
)

__all__ = ["WGRAD_CANDIDATES", "WgradConfig", "default_wgrad_config", "grouped_wgrad_triton"]


class WgradConfig(NamedTuple):
    """How the kernel is cut and compiled; any is right for any shape, but for ``tma`` (falls back to pointers)."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Operands by the tensor memory accelerator (sm90 and newer), otherwise by masked loads."""
    reduce: bool = False
    """Accumulate by the accelerator's reduce-add: the tile of G is never read by a program. Evenly spaced G only."""
    parts: int = 1
    """G is read and written in so many column blocks (1, 2 or 4), which takes fewer registers."""
    group: int = 8
    """Tiles in a row of tiles over N that share operands in L2."""
    max_registers: int | None = None
    """Per thread: fewer let more programs share a multiprocessor."""


WGRAD_CANDIDATES = (
    WgradConfig(128, 256, 64, 8, 4, tma=True, reduce=True, parts=2, group=8),
    WgradConfig(128, 256, 64, 8, 4, tma=True, reduce=True, parts=2, group=16),
    WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=2, group=8, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, group=8, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, group=16, max_registers=168),
    WgradConfig(128, 128, 64, 4, 3, tma=True, parts=2, group=8),
    WgradConfig(128, 128, 64, 8, 3, tma=True, parts=2, group=8),
    WgradConfig(128, 128, 32, 4, 4, parts=4, group=8, max_registers=168),
    WgradConfig(128, 128, 64, 8, 3, parts=2, group=8, max_registers=128),
    WgradConfig(128, 128, 64, 4, 3, parts=2, group=8),
    WgradConfig(128, 256, 64, 8, 4, parts=2, group=8),
    WgradConfig(64, 128, 32, 4, 4, parts=2, group=8, max_registers=96),
)


def default_wgrad_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> WgradConfig:
    """What is used where no measurement says better. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return WgradConfig(64, 64, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        if rows_per_expert >= 1024:
            return WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16)
        return WgradConfig(128, 128, 32, 4, 4, tma=True, parts=2, max_registers=168)
    if capability is not None:
        return WgradConfig(128, 128, 32, 8, 3, parts=2)
    return WgradConfig(128, 128, 32, 8, 2, parts=2)


@triton.jit
def _update(
    part: tl.tensor,
    grad: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride: tl.tensor,
    reads: tl.tensor,
    BETA: tl.constexpr,
) -> None:
    """Write one block of columns of the tile; part [BLOCK_N, columns] fp32."""
    places = grad + n[:, None].to(tl.int64) * stride + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if BETA == 1:
        part += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    elif BETA == 2:
        part += tl.load(places, mask=inside & reads, other=0.0).to(tl.float32)
    tl.store(places, part.to(grad.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _products(
    dy_ptr: tl.tensor,
    dy_desc: tl.tensor,
    stride_dy: tl.tensor,
    x_ptr: tl.tensor,
    x_desc: tl.tensor,
    stride_x: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    tile_n: tl.tensor,
    tile_k: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``dy^T x`` over rows start to end: [BLOCK_N, BLOCK_K] fp32."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    t = tl.arange(0, BLOCK_T)
    if TMA:
        whole = start + (end - start) // BLOCK_T * BLOCK_T
        for row in tl.range(start, whole, BLOCK_T):
            dy = dy_desc.load([row, tile_n * BLOCK_N])  # [BLOCK_T, BLOCK_N]
            x = x_desc.load([row, tile_k * BLOCK_K])  # [BLOCK_T, BLOCK_K]
            acc = tl.dot(dy.T, x, acc, input_precision=PRECISION)
        if whole < end:
            # What follows is the next expert's, or padding with anything in it: zeros in both operands.
            inside = (whole + t < end)[:, None]
            dy = tl.where(inside, dy_desc.load([whole, tile_n * BLOCK_N]), 0.0)
            x = tl.where(inside, x_desc.load([whole, tile_k * BLOCK_K]), 0.0)
            acc = tl.dot(dy.T, x, acc, input_precision=PRECISION)
    else:
        for row in tl.range(start, end, BLOCK_T):
            rows = (row + t).to(tl.int64)[:, None]
            inside = (row + t < end)[:, None]
            dy = tl.load(dy_ptr + rows * stride_dy + n[None, :], mask=inside & (n < N)[None, :], other=0.0)
            x = tl.load(x_ptr + rows * stride_x + k[None, :], mask=inside & (k < K)[None, :], other=0.0)
            acc = tl.dot(dy.T, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _update_in_parts(
    acc: tl.tensor,
    grad: tl.tensor,
    n: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride: tl.tensor,
    reads: tl.tensor,
    BETA: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write the tile that begins at ``column``, in PARTS blocks of columns."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_K: tl.constexpr = acc.shape[1]
    if PARTS == 1:
        _update(acc, grad, n, column + tl.arange(0, BLOCK_K), N, K, stride, reads, BETA)
    else:
        half: tl.constexpr = BLOCK_K // 2
        left, right = acc.reshape(BLOCK_N, 2, half).permute(0, 2, 1).split()
        if PARTS == 2:
            k = column + tl.arange(0, half)
            _update(left, grad, n, k, N, K, stride, reads, BETA)
            _update(right, grad, n, k + half, N, K, stride, reads, BETA)
        else:
            quarter: tl.constexpr = BLOCK_K // 4
            k = column + tl.arange(0, quarter)
            a, b = left.reshape(BLOCK_N, 2, quarter).permute(0, 2, 1).split()
            _update(a, grad, n, k, N, K, stride, reads, BETA)
            _update(b, grad, n, k + quarter, N, K, stride, reads, BETA)
            a, b = right.reshape(BLOCK_N, 2, quarter).permute(0, 2, 1).split()
            _update(a, grad, n, k + 2 * quarter, N, K, stride, reads, BETA)
            _update(b, grad, n, k + 3 * quarter, N, K, stride, reads, BETA)


@triton.jit
def _grouped_wgrad_kernel(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dy_desc: tl.tensor,
    x_desc: tl.tensor,
    grad_ptr: tl.tensor,
    grad_desc: tl.tensor,
    table_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_dy: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_grad: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    tiles_n: tl.tensor,
    tiles_k: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    REDUCE: tl.constexpr,
    BETA: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # BETA: 0 overwrites, 1 accumulates, 2 reads which from beta_ptr [E]: 0, 1, or -1 for a frozen expert.
    program = tl.program_id(0)
    tiles = tiles_n * tiles_k
    expert = program // tiles
    tile_n, tile_k = tile_of(program % tiles, tiles_n, tiles_k, GROUP)
    start = 0
    end = T
    if offsets_ptr is not None:
        start = tl.load(offsets_ptr + expert).to(tl.int32)
        end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    live = (BETA == 0) | (start < end)
    reads = BETA == 1
    if BETA == 2:
        beta = tl.load(beta_ptr + expert)
        reads = beta == 1
        live = (beta == 0) | (reads & (start < end))
    if live:
        grad = expert_pointer(grad_ptr, table_ptr, expert, first, step, stride_expert, DTYPE, SCATTERED, ALIGNED)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        if PREFETCH:
            lines: tl.constexpr = BLOCK_K * DTYPE.primitive_bitwidth // 1024  # of 128 bytes
            column = tile_k * BLOCK_K + tl.arange(0, lines) * (BLOCK_K // lines)
            # The address is kept inside the matrix: a prefetch outside an allocation faults nothing, but fetches.
            row = tl.minimum(n, N - 1)[:, None].to(tl.int64)
            prefetch_to_l2(grad + row * stride_grad + tl.minimum(column, K - 1)[None, :])
        acc = _products(
            dy_ptr,
            dy_desc,
            stride_dy,
            x_ptr,
            x_desc,
            stride_x,
            start,
            end,
            n,
            k,
            N,
            K,
            tile_n,
            tile_k,
            BLOCK_N,
            BLOCK_K,
            BLOCK_T,
            TMA,
            PRECISION,
        )
        if REDUCE:
            grad_desc.atomic_add(
                [first + step * expert, tile_n * BLOCK_N, tile_k * BLOCK_K], acc.reshape(1, BLOCK_N, BLOCK_K)
            )
        else:
            _update_in_parts(acc, grad, n, tile_k * BLOCK_K, N, K, stride_grad, reads, BETA, PARTS)


def grouped_wgrad_triton(
    dy: Tensor,
    x: Tensor,
    main_grads: Tensor | Sequence[Tensor | None],
    offsets: Tensor | None,
    overwrite: bool | Sequence[bool],
    config: WgradConfig,
) -> None:
    """See ``grouped_wgrad_accumulate``, which has checked the arguments; dy [T, N] and x [T, K] have adjacent columns.

    All accumulators that are there have one dtype and one row stride. ``offsets`` None: one expert has all rows.
    """
    num_experts = len(main_grads)
    (rows, n), k = dy.shape, x.shape[1]
    experts = locate_experts(main_grads)
    beta, betas = _beta(main_grads, overwrite, dy.device)
    tma = config.tma and rows > 0 and takes_tma(dy) and takes_tma(x)
    evenly = experts.table is None and experts.aligned
    reduce = tma and config.reduce and beta == 1 and evenly and experts.base.dtype is torch.float32
    grad_desc = experts_descriptor(experts, num_experts, [1, config.block_n, config.block_k]) if reduce else None
    tiles_n, tiles_k = triton.cdiv(n, config.block_n), triton.cdiv(k, config.block_k)
    nvidia = torch.version.hip is None and not is_interpreted()
    registers = {"maxnreg": config.max_registers} if nvidia and config.max_registers is not None else {}
    with device_of(dy):
        _grouped_wgrad_kernel[(num_experts * tiles_n * tiles_k,)](
            dy,
            x,
            TensorDescriptor.from_tensor(dy, [config.block_t, config.block_n]) if tma else None,
            TensorDescriptor.from_tensor(x, [config.block_t, config.block_k]) if tma else None,
            experts.base,
            grad_desc,
            experts.table,
            betas,
            offsets,
            rows,
            n,
            k,
            dy.stride(0),
            x.stride(0),
            experts.stride,
            experts.base.stride(0),
            experts.first,
            experts.step,
            tiles_n,
            tiles_k,
            DTYPE=triton_dtype(experts.base.dtype),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            BLOCK_T=config.block_t,
            GROUP=config.group,
            PARTS=config.parts,
            TMA=tma,
            REDUCE=reduce,
            BETA=beta,
            SCATTERED=experts.table is not None,
            ALIGNED=experts.aligned,
            PREFETCH=nvidia and beta != 0 and not reduce,
            PRECISION=dot_precision(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **registers,
        )


def _beta(
    main_grads: Tensor | Sequence[Tensor | None], overwrite: bool | Sequence[bool], device: torch.device
) -> tuple[int, Tensor | None]:
    """The kernel's BETA, and where it differs between experts the table of it: 0, 1, or -1 for a frozen expert."""
    frozen = not isinstance(main_grads, Tensor) and any(grad is None for grad in main_grads)
    if not frozen:
        if isinstance(overwrite, bool):
            return int(not overwrite), None
        if len(set(overwrite)) == 1:
            return int(not overwrite[0]), None
    bits = [overwrite] * len(main_grads) if isinstance(overwrite, bool) else overwrite
    betas = [-1 if grad is None else int(not once) for grad, once in zip(main_grads, bits, strict=True)]
    return 2, device_table(tuple(betas), device)
