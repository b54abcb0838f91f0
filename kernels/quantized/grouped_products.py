"""Products of quantised rows of experts with their weights, and the weight gradients.

GPUs that have kernels run them. Elsewhere the reference runs: it dequantises and multiplies in fp32. The host reads no
split sizes for either.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat import HAS_TRITON
from ..grouped.products import PerExpert, alike, by_layout, grouped_linear, grouped_wgrad_accumulate
from .grouped import GroupedQuantized, QuantizedExperts, dequantize_grouped, rows_of_experts
from .grouped_operands import has_grouped_kernels
from .quantize import dequantize
from .spec import Quantized

if HAS_TRITON:
    from ..grouped.gemm_triton import default_scaled_gemm_config, grouped_gemm_triton
    from ..grouped.wgrad_triton import grouped_wgrad_triton
    from ..wgrad_config import SCALED_WGRAD_CONFIG

__all__ = ["scaled_grouped_product", "scaled_grouped_wgrad_accumulate"]

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def scaled_grouped_product(
    x: GroupedQuantized,
    weights: QuantizedExperts,
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
    if has_grouped_kernels(x.matrix.spec, x.offsets.device):
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
    with torch.autocast(x.offsets.device.type, enabled=False):
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
    if has_grouped_kernels(dy.matrix.spec, dy.offsets.device) and all(map(_takes_kernel, tensors)):
        _run_kernels(dy, x, main_grads, overwrite)
        return
    grads = list(main_grads)
    with torch.autocast(x.offsets.device.type, enabled=False):
        of_dy, offsets = rows_of_experts(dy)
        operands = of_dy, rows_of_experts(x)[0]
        if all(grad is None or grad.dtype is torch.float32 for grad in grads):
            grouped_wgrad_accumulate(*operands, main_grads, offsets, overwrite=overwrite)
            return
        products = torch.empty(len(grads), dy.matrix.shape[0], x.matrix.shape[0], device=dy.offsets.device)
        grouped_wgrad_accumulate(*operands, products, offsets, overwrite=True)
    bits = [overwrite] * len(grads) if isinstance(overwrite, bool) else overwrite
    for grad, product, once in zip(grads, products, bits, strict=True):
        if grad is not None:
            grad.copy_(product) if once else grad.add_(product)


def _takes_kernel(grad: Tensor | None) -> bool:
    return grad is None or (grad.dtype in _SUMMED and (grad.stride(-1) == 1 or not grad.numel()))


def _run_kernels(
    dy: GroupedQuantized,
    x: GroupedQuantized,
    main_grads: Tensor | Sequence[Tensor | None],
    overwrite: bool | Sequence[bool],
) -> None:
    scales = dy.matrix.scale, x.matrix.scale
    for here in [main_grads] if isinstance(main_grads, Tensor) else by_layout(main_grads):
        grouped_wgrad_triton(
            dy.matrix.data, x.matrix.data, here, dy.offsets, overwrite, SCALED_WGRAD_CONFIG, scales=scales
        )


def _check(a: Quantized, b: Quantized | QuantizedExperts) -> None:
    if a.columns != b.columns or a.spec.rotated is not b.spec.rotated:
        raise ValueError(
            f"a product contracts the last dims of two matrices, both rotated or none: got {a.shape} ({a.spec}) and "
            f"{b.shape} ({b.spec})"
        )
