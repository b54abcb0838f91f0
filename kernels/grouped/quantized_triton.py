"""Sums of products of quantised operands for weight gradients: device functions of their kernel.

Legend: E experts, T rows, N output features, K input features.

``kernels/quantized/grouped.py`` says where an expert's tokens lie in a transposed copy. Its whole blocks are products
of 128 tokens. What is left of its tokens is a multiple of 16, and tensor cores take 32: the last 16 are read by a
descriptor that knows no more than 16, so that the tensor memory accelerator fills the other half with zeros. What lies
behind them may be another expert's.

Hopper's tensor cores keep about 14 bits of a sum of 8-bit products. A sum leaves them after 128 terms at most, and is
added in fp32.
"""

import triton
import triton.language as tl

__all__ = ["sum_of_quantized"]


@triton.jit
def sum_of_quantized(
    dy: tl.tuple,
    x: tl.tuple,
    expert: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    rest: tl.tensor,
    rest_end: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    CONFIG: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """A tile of ``dy^T x`` from transposed copies [N, T] and [K, T]: [BLOCK_N, BLOCK_K] fp32.

    The sum is over the tokens of whole blocks, start to end, and of the rest.
    BLOCKS: each 128 tokens of a feature have a scale; those of the rest have the number ``rest // 128 + expert``.
    """
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    _, _, dy_desc, dy_rest, dy_last, dy_scale = dy
    _, _, x_desc, x_rest, x_last, x_scale = x
    n = row + tl.arange(0, BLOCK_N)
    k = column + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if BLOCKS:
        for block in tl.range(start // 128, end // 128):
            product = tl.dot(dy_desc.load([row, block * 128]), x_desc.load([column, block * 128]).T)
            acc += _scaled(product, dy_scale, x_scale, block, n, k, N, K)
    else:
        for t in tl.range(start, end, 128):
            acc = tl.dot(dy_desc.load([row, t]), x_desc.load([column, t]).T, acc, max_num_imprecise_acc=128)
    if rest < rest_end:
        # Fewer than 128 tokens, with zeros up to a multiple of 16.
        product = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        whole = rest + (rest_end - rest) // 32 * 32
        for t in tl.range(rest, whole, 32):
            product = tl.dot(dy_rest.load([row, t]), x_rest.load([column, t]).T, product)
        if whole < rest_end:
            of_dy = dy_last.load([whole // 16, row, 0]).reshape(BLOCK_N, 32)
            of_x = x_last.load([whole // 16, column, 0]).reshape(BLOCK_K, 32)
            product = tl.dot(of_dy, of_x.T, product)
        if BLOCKS:
            product = _scaled(product, dy_scale, x_scale, rest // 128 + expert, n, k, N, K)
        acc += product
    if not BLOCKS:
        acc *= tl.load(dy_scale + expert) * tl.load(x_scale + expert)
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
    of_dy = tl.load(dy_scale + tl.cast(block, tl.int64) * N + n, mask=n < N, other=0.0)
    of_x = tl.load(x_scale + tl.cast(block, tl.int64) * K + k, mask=k < K, other=0.0)
    return product * of_dy[:, None] * of_x[None, :]
