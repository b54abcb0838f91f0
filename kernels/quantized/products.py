"""Products of two quantised matrices, ``a b^T``, and the weight gradient by one; and those of experts.

On GPUs cuBLAS multiplies the forms that it takes, and kernels those of experts. Elsewhere the reference runs: it
dequantises and multiplies in fp32. The host reads no split sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat import HAS_TRITON
from ..grouped.products import PerExpert, alike, by_layout, grouped_linear, grouped_wgrad_accumulate
from .cublas import cublas_product, takes_out
from .grouped import GroupedQuantized, dequantize_grouped, rows_of_experts
from .operands import has_kernels
from .quantize import dequantize
from .spec import Quantized

if HAS_TRITON:
    from ..grouped.gemm_triton import default_scaled_gemm_config, grouped_gemm_triton
    from ..grouped.wgrad_config import SCALED_WGRAD_CONFIG
    from ..grouped.wgrad_triton import grouped_wgrad_triton

__all__ = [
    "scaled_grouped_product",
    "scaled_grouped_wgrad_accumulate",
    "scaled_product",
    "scaled_wgrad_accumulate",
]

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


# ---- Experts. ----


def scaled_grouped_product(
    x: GroupedQuantized,
    weights: Quantized,
    dtype: torch.dtype,
    *,
    bias: PerExpert | None = None,
    bias_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e`` for row t of expert e, [T, N] of ``dtype``; pad rows are zeros.

    ==========  ========================  =============================================
    x           [T, K]                    by rows
    weights     E x [N, K]                one for each expert
    bias        [E, N], or E x [N]        b; None: no bias
    bias_scale  [T]                       s; None: 1
    out         [T, N] of ``dtype``       written and returned; None: allocated
    ==========  ========================  =============================================

    Sums are fp32, rounded once. Raises ``ValueError`` where K differs, or one of the two alone is rotated.
    """
    _check(x.matrix, weights)
    if has_kernels(x.matrix.spec, x.offsets.device, experts=True):
        rows, features = x.matrix.shape[0], weights.data.shape[1]
        y = out if out is not None and out.stride(1) == 1 else x.matrix.data.new_empty(rows, features, dtype=dtype)
        grouped_gemm_triton(
            x.matrix.data,
            weights.data,
            x.offsets,
            y,
            default_scaled_gemm_config(rows / len(weights.data), blocks=x.matrix.spec.block is not None),
            transposed=True,
            bias=None if bias is None else alike(bias),
            bias_scale=None if bias_scale is None else bias_scale.contiguous(),
            scales=(x.matrix.scale, weights.scale),
        )
        return y if out is None or out is y else out.copy_(y)
    together = None
    if bias is not None:
        together = (bias if isinstance(bias, Tensor) else torch.stack(tuple(bias))).float()
    # One packed tensor: a capture takes no table of the addresses of separate ones.
    packed = torch.stack([dequantize(weight) for weight in weights.unbind()])
    y = grouped_linear(dequantize_grouped(x), packed, x.offsets, bias=together, bias_scale=bias_scale)
    return y.to(dtype) if out is None else out.copy_(y)


def scaled_grouped_wgrad_accumulate(
    dy: GroupedQuantized,
    x: GroupedQuantized,
    main_grads: Tensor | Sequence[Tensor | None],
    *,
    overwrite: bool | Sequence[bool] = False,
) -> None:
    """``G_e = beta_e G_e + dy_e^T x_e`` in place, of operands that are quantised along the rows T of each expert.

    dy          [N, T]  the transposed gradient of the output
    x           [K, T]  the transposed input
    main_grads          G, in any dtype; these and ``overwrite`` are those of ``grouped_wgrad_accumulate``
    """
    _check(dy.matrix, x.matrix)
    tensors = [main_grads] if isinstance(main_grads, Tensor) else main_grads
    if has_kernels(dy.matrix.spec, dy.offsets.device, experts=True) and all(map(_takes_kernel, tensors)):
        operands, scales = (dy.matrix.data, x.matrix.data), (dy.matrix.scale, x.matrix.scale)
        for here in by_layout(main_grads):
            grouped_wgrad_triton(*operands, here, dy.offsets, overwrite, SCALED_WGRAD_CONFIG, scales=scales)
        return
    grads = list(main_grads)
    of_dy, offsets = rows_of_experts(dy)
    operands = of_dy, rows_of_experts(x)[0]
    if all(grad is None or grad.dtype is torch.float32 for grad in grads):
        grouped_wgrad_accumulate(*operands, main_grads, offsets, overwrite=overwrite)
        return
    shape = len(grads), dy.matrix.shape[0], x.matrix.shape[0]
    products = torch.empty(shape, dtype=torch.float32, device=dy.offsets.device)
    grouped_wgrad_accumulate(*operands, products, offsets, overwrite=True)
    bits = [overwrite] * len(grads) if isinstance(overwrite, bool) else overwrite
    for grad, product, once in zip(grads, products, bits, strict=True):
        if grad is not None:
            grad.copy_(product) if once else grad.add_(product)


def _takes_kernel(grad: Tensor | None) -> bool:
    return grad is None or (grad.dtype in _OUTPUTS and grad.stride(-1) == 1)


def _check(a: Quantized, b: Quantized) -> None:
    if a.columns != b.columns or a.spec.rotated is not b.spec.rotated:
        raise ValueError(
            f"a product contracts the last dims of two matrices, both rotated or none: got {a.shape} ({a.spec}) and "
            f"{b.shape} ({b.spec})"
        )
