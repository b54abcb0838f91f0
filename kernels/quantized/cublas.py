"""Products of quantised matrices by cuBLAS, through ``torch._scaled_mm``.

cuBLAS takes a row-major ``a`` and a column-major ``b``, and counts of rows of ``b`` and of columns in sixteens. The
quantiser's copies are padded along the columns; rows are padded here, where they must be.
"""

import torch
from torch import Tensor

from .spec import Quantized

__all__ = ["cublas_product", "takes_out"]

_COUNT = 16
"""Rows of ``b``, and columns, come in multiples of it."""
_ROWS = 4
"""So do rows of ``a``, whose scales are addressed in 16 bytes."""


def takes_out(out: Tensor) -> bool:
    """Whether ``cublas_product`` can write ``out`` [M, N]: fp32, whole rows of 16 bytes."""
    rows, features = out.shape
    return out.dtype is torch.float32 and out.is_contiguous() and rows % _ROWS == 0 and features % _COUNT == 0


def cublas_product(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``a b^T + bias`` [M, N] in ``dtype``: bf16, fp16 or fp32. One scale each, or blocks of 128 columns each.

    bias  [N] of ``dtype``, not fp32
    fast  sums stay in the tensor cores; else they are promoted to fp32 on the way. Block scaling always promotes
    out   [M, N], which ``takes_out``: memory for the result
    """
    rows, features = a.shape[0], b.shape[0]
    one_scale = a.spec.block is None
    squares = not one_scale and (a.spec.block, b.spec.block) != ((1, 128), (1, 128))
    step = _COUNT if one_scale else 512 if squares else 128
    width = -(-max(a.data.shape[1], b.data.shape[1]) // step) * step
    left, right = _padded(a, _ROWS, width), _padded(b, _COUNT, width)
    if bias is not None and features % _COUNT:  # without the question, torch copies it
        bias = torch.nn.functional.pad(bias, (0, -features % _COUNT))
    product = torch._scaled_mm(
        left.data,
        right.data.t(),
        left.scale,
        right.scale if one_scale else right.scale.t(),
        bias,
        out_dtype=dtype,
        use_fast_accum=fast and one_scale,
        **({} if out is None else {"out": out}),
    )
    return product if product.shape == (rows, features) else product[:rows, :features].contiguous()


def _padded(q: Quantized, step: int, width: int) -> Quantized:
    """With zeros: rows in multiples of ``step``, and ``width`` columns. As it is, where nothing is missing."""
    more, wider = -q.data.shape[0] % step, width - q.data.shape[1]
    if more or wider:
        q = q._replace(data=torch.nn.functional.pad(q.data.view(torch.uint8), (0, wider, 0, more)).view(q.data.dtype))
    if q.spec.block is None:
        return q
    height, scale = q.spec.block[0], q.scale
    shape = -(-q.data.shape[0] // height), width // 128
    strides = (shape[1], 1) if height > 1 else (1, shape[0])
    if scale.shape != shape:
        scale = torch.nn.functional.pad(scale, (0, shape[1] - scale.shape[1], 0, shape[0] - scale.shape[0]))
    if scale.stride() != strides:  # rows of a larger matrix, or the reference's
        scale = torch.empty_strided(shape, strides, dtype=scale.dtype, device=scale.device).copy_(scale)
    return q._replace(scale=scale)
