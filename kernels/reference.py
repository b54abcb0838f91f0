"""The plain PyTorch oracle of every operation in this folder: slow, obvious, and right on any device.

Legend: T rows (tokens), N output features, K input features.
"""

import torch
from torch import Tensor

__all__ = ["wgrad_accumulate_reference"]


def wgrad_accumulate_reference(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad = dy^T x`` or ``main_grad += dy^T x``: the product first, then one addition.

    dy         [T, N]  gradient of the output
    x          [T, K]  input of the forward
    main_grad  [N, K]  accumulator, written in place

    The product is taken in the wider of the operands' and the accumulator's dtypes, so that bf16 operands are summed
    over T in fp32 and never rounded to bf16 on the way to an fp32 accumulator. With every dtype fp32 this is bit for
    bit what autograd's product and a hook's addition give.
    """
    dtype = torch.promote_types(torch.promote_types(dy.dtype, x.dtype), main_grad.dtype)
    dy, x = dy.to(dtype), x.to(dtype)
    if torch.is_autocast_enabled(dy.device.type):  # a backward run inside the block would round the product
        with torch.autocast(dy.device.type, enabled=False):
            product = dy.t() @ x
    else:
        product = dy.t() @ x
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)
