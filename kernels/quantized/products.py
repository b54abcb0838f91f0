"""Products of two quantised matrices, ``a b^T``, and the weight gradient by one.

On every device the reference runs: it dequantises and multiplies in fp32.
"""

import torch
from torch import Tensor

from .quantize import dequantize
from .spec import Quantized

__all__ = ["scaled_product", "scaled_wgrad_accumulate"]


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a b^T + bias`` [M, N] in ``dtype``: a [M, K], b [N, K], bias [N]; sums are fp32, rounded once.

    Raises ``ValueError`` where K differs, or one of the two alone is rotated.
    """
    _check(a, b)
    product = _product(a, b)
    return (product if bias is None else product + bias.float()).to(dtype)


def scaled_wgrad_accumulate(dy: Quantized, x: Quantized, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad = beta * main_grad + dy^T x``, of operands that are quantised along the tokens T.

    dy         [N, T]  the transposed gradient of the output
    x          [K, T]  the transposed input
    main_grad  [N, K]  accumulator, fp32 or another dtype
    overwrite          beta = 0; ``main_grad`` may hold anything
    """
    _check(dy, x)
    product = _product(dy, x)
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


def _product(a: Quantized, b: Quantized) -> Tensor:
    with torch.autocast(a.data.device.type, enabled=False):
        return dequantize(a) @ dequantize(b).t()


def _check(a: Quantized, b: Quantized) -> None:
    if a.columns != b.columns or a.spec.rotated is not b.spec.rotated:
        raise ValueError(
            f"a product contracts the last dims of two matrices, both rotated or none: got {a.shape} ({a.spec}) and "
            f"{b.shape} ({b.spec})"
        )
