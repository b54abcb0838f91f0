"""The reference implementation of the dense weight gradient: slow, simple, and correct on any device.

Legend: T rows (tokens), N output features, K input features.
"""

import torch
from torch import Tensor

__all__ = ["wgrad_accumulate_reference"]


def wgrad_accumulate_reference(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad = dy^T x`` or ``main_grad += dy^T x``: one product, then one addition.

    dy         [T, N]  gradient of the output
    x          [T, K]  input of the forward
    main_grad  [N, K]  accumulator, written in place

    The product is computed in the widest dtype of operands and accumulator: bf16 operands are summed over T in fp32,
    and are not rounded to bf16 before an fp32 accumulator. If all dtypes are fp32, the result equals, bit for bit, the
    product of autograd plus the addition of a hook.
    """
    dtype = torch.promote_types(torch.promote_types(dy.dtype, x.dtype), main_grad.dtype)
    dy, x = dy.to(dtype), x.to(dtype)
    if torch.is_autocast_enabled(dy.device.type):  # autocast would round the product
        with torch.autocast(dy.device.type, enabled=False):
            product = dy.t() @ x
    else:
        product = dy.t() @ x
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)
