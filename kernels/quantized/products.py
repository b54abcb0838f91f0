"""Products of two quantised matrices, ``a b^T``, and the weight gradient by one.

cuBLAS multiplies the forms that it takes, on GPUs. Elsewhere the reference runs: it dequantises and multiplies in fp32.
"""

import torch
from torch import Tensor

from .cublas import cublas_product, takes_out
from .operands import has_kernels
from .quantize import dequantize
from .spec import Quantized

__all__ = ["scaled_product", "scaled_wgrad_accumulate"]

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def scaled_product(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """``a b^T + bias`` [M, N] in ``dtype``: a [M, K], b [N, K], bias [N]; sums are fp32, rounded once.

    fast  on GPUs, where each matrix has one scale: sums of a tile stay in the tensor cores, which keep 14 bits or so.
          The relative error of 8,192 terms was 2.4e-3 in place of 2.3e-4 (H200)

    Raises ``ValueError`` where K differs, or one of the two alone is rotated.
    """
    _check(a, b)
    by_cublas = _by_cublas(a, b)
    if by_cublas and dtype in _OUTPUTS and (bias is None or bias.dtype is dtype is not torch.float32):
        return cublas_product(a, b, dtype, bias, fast=fast)
    product = _product(a, b, by_cublas=by_cublas)
    return (product if bias is None else product + bias.float()).to(dtype)


def scaled_wgrad_accumulate(dy: Quantized, x: Quantized, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad = beta * main_grad + dy^T x``, of operands that are quantised along the tokens T.

    dy         [N, T]  the transposed gradient of the output
    x          [K, T]  the transposed input
    main_grad  [N, K]  accumulator, fp32 or another dtype
    overwrite          beta = 0; ``main_grad`` may hold anything

    cuBLAS writes a first product straight into an fp32 ``main_grad``. It adds to none: a later product is a tensor of
    its own, and is added by a second pass.
    """
    _check(dy, x)
    by_cublas = _by_cublas(dy, x)
    if overwrite and by_cublas and takes_out(main_grad):
        cublas_product(dy, x, torch.float32, out=main_grad)
        return
    product = _product(dy, x, by_cublas=by_cublas)
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


def _product(a: Quantized, b: Quantized, *, by_cublas: bool) -> Tensor:
    """[M, N] fp32."""
    if by_cublas:
        return cublas_product(a, b, torch.float32)
    with torch.autocast(a.data.device.type, enabled=False):
        return dequantize(a) @ dequantize(b).t()


def _by_cublas(a: Quantized, b: Quantized) -> bool:
    device = a.data.device
    squares = a.spec.block == b.spec.block == (128, 128)  # cuBLAS wants one matrix of the two in blocks of 1 x 128
    if a.spec.scale is not b.spec.scale or squares or not has_kernels(a.spec, device):
        return False
    return a.spec is b.spec or has_kernels(b.spec, device)


def _check(a: Quantized, b: Quantized) -> None:
    if a.columns != b.columns or a.spec.rotated is not b.spec.rotated:
        raise ValueError(
            f"a product contracts the last dims of two matrices, both rotated or none: got {a.shape} ({a.spec}) and "
            f"{b.shape} ({b.spec})"
        )
