"""Muon's passes over elements, before and behind the orthogonalisation: one launch each where Triton runs.

Bytes for an element in fp32, O in fp16::

    update_momentum   reads G and M, writes M and U     16      by torch's operations 24
    apply_update      reads W and O, writes W           10                            18

Kernels round as torch's operations on CUDA do, so that weights have the same bits by both.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...compat import HAS_TRITON, runs_on_triton

if HAS_TRITON:
    from .elements_triton import apply_on_triton, momentum_on_triton

__all__ = ["apply_update", "update_momentum"]


def update_momentum(buffer: Tensor, grad: Tensor, update: Tensor, momentum: float, *, nesterov: bool) -> None:
    """``M = momentum M + (1 - momentum) G``, and ``U``: with ``nesterov`` the same of M and G once more, else M.

    buffer, grad, update  M, G and U: of one shape and dtype
    """
    if _has_kernel(buffer, grad, update):
        momentum_on_triton(buffer, grad, update, momentum, nesterov=nesterov)
        increment_version((buffer, update))
        return
    buffer.lerp_(grad, 1 - momentum)
    if nesterov:
        torch.lerp(grad, buffer, momentum, out=update)
    else:
        update.copy_(buffer)


def apply_update(param: Tensor, orthogonal: Tensor, lr: float | Tensor, weight_decay: float, ratio: float) -> None:
    """``W = (1 - lr weight_decay) W - lr ratio O``.

    lr  a tensor is read on the device, by torch's operations
    """
    if isinstance(lr, Tensor):
        param.mul_(1 - lr * weight_decay)
        param.addcmul_(orthogonal.to(param.dtype), lr.to(param.device, param.dtype), value=-ratio)
    elif _has_kernel(param, orthogonal):
        apply_on_triton(param, orthogonal, 1 - lr * weight_decay, -lr * ratio)
        increment_version(param)
    else:
        param.mul_(1 - lr * weight_decay)
        param.add_(orthogonal, alpha=-lr * ratio)


def _has_kernel(written: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take tensors: each matrix's elements are adjacent, and arithmetic is fp32."""
    return (
        written.numel() > 0
        and written.dtype is torch.float32
        and all(each.dtype in (torch.float32, torch.float16) for each in others)
        and all(each[0].is_contiguous() if each.dim() == 3 else each.is_contiguous() for each in (written, *others))
        and runs_on_triton("Muon", written)
    )
