"""Triton kernel of the grouped weight gradient: ``G_e = beta_e G_e + dy_e^T x_e``, in half precision, fp32 or 8 bits.

Legend: E experts, T rows, N output features, K input features.

A program computes one [BLOCK_N, BLOCK_K] tile of one G_e, and sums over the rows of expert e. The number of programs
does not depend on split sizes. One program writes each element, so the order of summation depends only on the expert's
rows.

An expert with few rows spends as much time on memory traffic for G as on products. Three measures hide the traffic. Two
or three programs share a multiprocessor (small tiles, few registers): products of one program overlap loads and stores
of another. The tile of G is prefetched into L2 before the products. Stores of G bypass the caches (``.cs``), which
leaves L2 to the operands. On an H200 with 64 experts of 512 rows, N = K = 2048: 0.87 ms, and 0.94 ms with plain stores
and two programs.

Quantised operands are transposed copies: see ``quantized_triton.py``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import device_of
from ..experts import device_table, locate_experts
from ..triton_support import (
    Launches,
    dot_precision,
    expert_pointer,
    experts_descriptor,
    is_interpreted,
    kinds_of,
    num_multiprocessors,
    prefetch_to_l2,
    takes_tma,
    tile_of,
)
from .quantized_triton import sum_of_quantized
from .wgrad_config import WgradConfig

__all__ = ["grouped_wgrad_triton"]


@triton.jit
def _update(
    part: tl.tensor,
    target: tl.tuple,
    row: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BETA: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Add ``part`` [rows, columns] fp32 to G at (row, column), or store it there, in PARTS blocks of columns.

    target  G's address; a descriptor to add by, or None; the expert's place in it; row stride; whether G is read
    """
    ROWS: tl.constexpr = part.shape[0]
    COLUMNS: tl.constexpr = part.shape[1]
    grad, grad_desc, place, stride, reads = target
    if PARTS > 1:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = part.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        _update(left, target, row, column, N, K, BETA, PARTS // 2)
        _update(right, target, row, column + HALF, N, K, BETA, PARTS // 2)
    elif grad_desc is not None:
        grad_desc.atomic_add([place, row, column], part.reshape(1, ROWS, COLUMNS))
    else:
        n = row + tl.arange(0, ROWS)
        k = column + tl.arange(0, COLUMNS)
        places = grad + n[:, None].to(tl.int64) * stride + k[None, :]
        inside = (n < N)[:, None] & (k < K)[None, :]
        if BETA == 1:
            part += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        elif BETA == 2:
            part += tl.load(places, mask=inside & reads, other=0.0).to(tl.float32)
        tl.store(places, part.to(grad.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _products(
    dy: tl.tuple,
    x: tl.tuple,
    start: tl.tensor,
    end: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    CONFIG: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``dy^T x`` over rows start to end: the tile [BLOCK_N, BLOCK_K] from (row, column) on, fp32."""
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    BLOCK_T: tl.constexpr = CONFIG.block_t
    dy_desc, x_desc = dy[2], x[2]
    n = row + tl.arange(0, BLOCK_N)
    k = column + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if dy_desc is not None:
        whole = start + (end - start) // BLOCK_T * BLOCK_T
        for token in tl.range(start, whole, BLOCK_T):
            of_dy = dy_desc.load([token, row])  # [BLOCK_T, BLOCK_N]
            of_x = x_desc.load([token, column])  # [BLOCK_T, BLOCK_K]
            acc = tl.dot(of_dy.T, of_x, acc, input_precision=PRECISION)
        if whole < end:
            # Later rows are the next expert's, or padding with any values: both operands read 0 instead.
            acc = _add_masked(acc, dy, x, whole, end, n, k, N, K, BLOCK_T, PRECISION)
    else:
        for token in tl.range(start, end, BLOCK_T):
            acc = _add_masked(acc, dy, x, token, end, n, k, N, K, BLOCK_T, PRECISION)
    return acc


@triton.jit
def _add_masked(
    acc: tl.tensor,
    dy: tl.tuple,
    x: tl.tuple,
    token: tl.tensor,
    end: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Add the product of the rows from ``token`` on."""
    dy_ptr, stride_dy, _, _, _, _ = dy
    x_ptr, stride_x, _, _, _, _ = x
    t = tl.arange(0, BLOCK_T)
    rows = (token + t).to(tl.int64)[:, None]
    inside = (token + t < end)[:, None]
    of_dy = tl.load(dy_ptr + rows * stride_dy + n[None, :], mask=inside & (n < N)[None, :], other=0.0)
    of_x = tl.load(x_ptr + rows * stride_x + k[None, :], mask=inside & (k < K)[None, :], other=0.0)
    return tl.dot(of_dy.T, of_x, acc, input_precision=PRECISION)


@triton.jit
def _one_tile(
    tile: tl.tensor,
    dy: tl.tuple,
    x: tl.tuple,
    grads: tl.tuple,
    grad_desc: tl.tensor,
    betas: tl.tensor,
    offsets: tl.tensor,
    sizes: tl.tuple,
    CONFIG: tl.constexpr,
    BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """dy, x: pointer, row stride, descriptors and scales, as ``_grouped_wgrad_kernel`` packs them."""
    QUANTIZED: tl.constexpr = dy[5] is not None
    E, T, N, K, stride_grad, tiles_n, tiles_k = sizes
    tiles = tiles_n * tiles_k
    expert = tile // tiles
    tile_n, tile_k = tile_of(tile % tiles, tiles_n, tiles_k, CONFIG.group)
    start = 0
    end = T
    if offsets is not None:
        start = tl.load(offsets + expert).to(tl.int32)
        end = tl.load(offsets + expert + 1).to(tl.int32)
    has_rows = start < end
    if QUANTIZED:
        rest = tl.load(offsets + E + expert).to(tl.int32)
        rest_end = tl.load(offsets + E + expert + 1).to(tl.int32)
        has_rows = has_rows | (rest < rest_end)
    live = (BETA == 0) | has_rows
    reads = BETA == 1
    if BETA == 2:
        beta = tl.load(betas + expert)
        reads = beta == 1
        live = (beta == 0) | (reads & has_rows)
    if live:
        grad = expert_pointer(grads, expert, ALIGNED)
        row = tile_n * CONFIG.block_n
        column = tile_k * CONFIG.block_k
        if PREFETCH:
            # One address per cache line of 128 bytes; one per row in a narrow tile.
            bits: tl.constexpr = CONFIG.block_k * grad.dtype.element_ty.primitive_bitwidth
            lines: tl.constexpr = bits // 1024 if bits > 1024 else 1
            n = row + tl.arange(0, CONFIG.block_n)
            line = column + tl.arange(0, lines) * (CONFIG.block_k // lines)
            # Clamp addresses to the matrix: a prefetch outside does not fault, but costs bandwidth.
            at = tl.minimum(n, N - 1)[:, None].to(tl.int64) * stride_grad + tl.minimum(line, K - 1)[None, :]
            prefetch_to_l2(grad + at)
        if QUANTIZED:
            acc = sum_of_quantized(dy, x, expert, start, end, rest, rest_end, row, column, N, K, CONFIG, BLOCKS)
        else:
            acc = _products(dy, x, start, end, row, column, N, K, CONFIG, PRECISION)
        _, _, _, first, step = grads
        target = grad, grad_desc, first + step * expert, stride_grad, reads
        _update(acc, target, row, column, N, K, BETA, CONFIG.parts)


@triton.jit
def _grouped_wgrad_kernel(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dy_desc: tl.tensor,
    x_desc: tl.tensor,
    dy_rest: tl.tensor,
    x_rest: tl.tensor,
    dy_last: tl.tensor,
    x_last: tl.tensor,
    dy_scale: tl.tensor,
    x_scale: tl.tensor,
    grads: tl.tuple,
    grad_desc: tl.tensor,
    betas: tl.tensor,
    offsets: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_dy: tl.tensor,
    stride_x: tl.tensor,
    stride_grad: tl.tensor,
    tiles_n: tl.tensor,
    tiles_k: tl.tensor,
    CONFIG: tl.constexpr,
    BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # BETA: 0 overwrites, 1 accumulates, 2 reads a value per expert from betas [E]: 0, 1, or -1 for frozen.
    # What may be absent is None. BLOCKS: scales, if given, are those of blocks, else of experts.
    dy = dy_ptr, stride_dy, dy_desc, dy_rest, dy_last, dy_scale
    x = x_ptr, stride_x, x_desc, x_rest, x_last, x_scale
    sizes = E, T, N, K, stride_grad, tiles_n, tiles_k
    # fmt: off
    if CONFIG.persistent > 0:
        for tile in tl.range(tl.program_id(0), E * tiles_n * tiles_k, tl.num_programs(0), flatten=True):
            _one_tile(
                tile, dy, x, grads, grad_desc, betas, offsets, sizes,
                CONFIG, BETA, ALIGNED, PREFETCH, BLOCKS, PRECISION,
            )
    else:
        _one_tile(
            tl.program_id(0), dy, x, grads, grad_desc, betas, offsets, sizes,
            CONFIG, BETA, ALIGNED, PREFETCH, BLOCKS, PRECISION,
        )
    # fmt: on


def grouped_wgrad_triton(
    dy: Tensor,
    x: Tensor,
    main_grads: Tensor | Sequence[Tensor | None],
    offsets: Tensor | None,
    overwrite: bool | Sequence[bool],
    config: WgradConfig,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """See ``grouped_wgrad_accumulate``, which checks the arguments. dy [T, N] and x [T, K] have adjacent columns.

    All accumulators that are not None have one dtype and one row stride. ``offsets`` None: one expert has all rows.

    scales  of dy and x where these are transposed copies of ``kernels.quantized``: of experts, or of blocks
    """
    num_experts = len(main_grads)
    (rows, n), k = dy.shape, x.shape[1]
    if scales is not None:
        (n, rows), k = dy.shape, x.shape[0]
    experts = locate_experts(main_grads)
    beta, betas = _beta_of(main_grads, overwrite, dy.device)
    tma = config.tma and rows > 0 and takes_tma(dy) and takes_tma(x)
    evenly = experts.table is None and experts.aligned
    reduce = tma and config.reduce and beta == 1 and evenly and experts.base.dtype is torch.float32
    box = [1, config.block_n, config.block_k // config.parts]
    tiles_n, tiles_k = -(-n // config.block_n), -(-k // config.block_k)
    programs = num_experts * tiles_n * tiles_k
    if config.persistent:
        programs = min(programs, config.persistent * num_multiprocessors(dy.device))
    nvidia = torch.version.hip is None and not is_interpreted()
    registers = {"maxnreg": config.max_registers} if nvidia and config.max_registers is not None else {}
    strides = dy.stride(0), x.stride(0), experts.base.stride(0)
    counts = num_experts, rows, n, k, *strides, tiles_n, tiles_k
    prefetches = nvidia and beta != 0 and not reduce
    forms = beta, experts.aligned, prefetches, scales is not None and scales[0].dim() == 2, dot_precision()
    key = dy.get_device(), config, counts, forms, experts.form, tma, reduce, kinds_of(dy, x, experts.base, offsets)
    with device_of(dy):
        _launch(
            key,
            (programs, 1, 1),
            dy,
            x,
            *_descriptors(dy, x, config, tma=tma, quantized=scales is not None),
            *(scales or (None, None)),
            experts.argument,
            experts_descriptor(experts, num_experts, box) if reduce else None,
            betas,
            offsets,
            *counts,
            config,
            *forms,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **registers,
        )


def _descriptors(
    dy: Tensor, x: Tensor, config: WgradConfig, *, tma: bool, quantized: bool
) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of dy and x in turn: of all; and of quantised ones' rest, and of their last 16 tokens."""
    if not tma:
        return (None,) * 6
    sides = (dy, config.block_n), (x, config.block_k)
    if not quantized:
        whole = [TensorDescriptor.from_tensor(operand, [config.block_t, side]) for operand, side in sides]
        return *whole, None, None, None, None
    found = [TensorDescriptor.from_tensor(copy, [side, width]) for width in (128, 32) for copy, side in sides]
    for copy, side in sides:
        # Number, row, column: the matrix of 16 columns with each number, in boxes of 32 columns. The last 16 are zeros.
        shape = [copy.shape[1] // 16, copy.shape[0], 16]
        found.append(TensorDescriptor(copy, shape, [16, copy.stride(0), 1], [1, side, 32]))
    return tuple(found)


def _beta_of(
    main_grads: Tensor | Sequence[Tensor | None], overwrite: bool | Sequence[bool], device: torch.device
) -> tuple[int, Tensor | None]:
    """BETA of the kernel; if experts differ, also the table of their values: 0, 1, or -1 for a frozen expert."""
    bits = [overwrite] * len(main_grads) if isinstance(overwrite, bool) else overwrite
    frozen = not isinstance(main_grads, Tensor) and any(grad is None for grad in main_grads)
    if not frozen and len(set(bits)) == 1:
        return int(not bits[0]), None
    betas = [-1 if grad is None else int(not once) for grad, once in zip(main_grads, bits, strict=True)]
    return 2, device_table(tuple(betas), device)


_launch = Launches(_grouped_wgrad_kernel)
