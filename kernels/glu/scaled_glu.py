"""Gated activations scaled by row: the operation between the two products of an expert.

Legend: T rows, F features.
"""

import torch
from torch import Tensor

from ..compat import HAS_TRITON, runs_on_triton
from .reference import GLU_ACTIVATIONS, Glu, scaled_glu_backward_reference, scaled_glu_reference

if HAS_TRITON:
    from .triton_kernels import scaled_glu_backward_triton, scaled_glu_triton

__all__ = ["SWIGLU", "glu_named", "scaled_glu", "scaled_glu_backward"]


def glu_named(activation: str, *, limit: float = 7.0, alpha: float = 1.702, linear_offset: float = 1.0) -> Glu:
    """The activation of a name: swiglu, geglu (tanh approximation), qgeglu, glu, reglu, sreglu or clamped_swiglu.

    Only clamped_swiglu (GPT-OSS) uses the three parameters: ``min(g, limit) sigmoid(alpha min(g, limit)) (clamp(l,
    -limit, limit) + linear_offset)``. Raises ``ValueError`` for an unknown name, and for a ``limit`` of 0 or less.
    """
    if activation not in GLU_ACTIVATIONS:
        raise ValueError(f"no gated activation '{activation}': it is one of {', '.join(GLU_ACTIVATIONS)}")
    function, own_alpha = GLU_ACTIVATIONS[activation]
    if activation != "clamped_swiglu":
        return Glu(function, own_alpha, limit=None, offset=0.0)
    if not limit > 0:
        raise ValueError(f"{activation} needs a limit above 0, got {limit}")
    return Glu(function, alpha, limit, linear_offset)


SWIGLU = glu_named("swiglu")


def scaled_glu(h: Tensor, probs: Tensor | None = None, glu: Glu = SWIGLU) -> Tensor:
    """``a[t] = p[t] act(g[t]) l[t]``, where g is the first half of ``h`` and l the second.

    =====  ========  =================================================================
    h      [T, 2F]   bf16, fp16, fp32 or fp64
    probs  [T]       p, any floating dtype; None: 1
    a      [T, F]    dtype of ``h``; computed in fp32 (fp64 for fp64) and rounded once
    =====  ========  =================================================================

    Each output row depends on its input row only. If autograd records, the reference runs.

    Raises ``ValueError`` for shapes that do not match, ``TypeError`` for wrong dtypes.
    """
    check_halves("scaled_glu", h, probs)
    if not _recorded(h, probs) and runs_on_triton("scaled_glu", h):
        return scaled_glu_triton(h, probs, glu)
    return scaled_glu_reference(h, probs, glu)


def scaled_glu_backward(
    da: Tensor, h: Tensor, probs: Tensor | None = None, glu: Glu = SWIGLU
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``scaled_glu``: ``dg = da p act'(g) l``, ``dl = da p act(g)``, ``dp = sum over F of da act(g) l``.

    ======  =======  ===================================================================================
    da      [T, F]   gradient of the output, dtype of ``h``
    h       [T, 2F]  as in the forward, like ``probs``
    dh      [T, 2F]  dtype of ``h``
    dprobs  [T]      fp32 (fp64 for fp64), summed in a fixed order; None if ``probs`` is None
    ======  =======  ===================================================================================

    One pass over ``da`` and ``h``, which recomputes the activation, so that the forward need not save it. If autograd
    records (for second derivatives), the reference runs.
    """
    check_halves("scaled_glu_backward", h, probs)
    if da.shape != (h.shape[0], h.shape[1] // 2) or da.dtype is not h.dtype or da.device != h.device:
        raise ValueError(
            f"scaled_glu_backward needs da {(h.shape[0], h.shape[1] // 2)}, {h.dtype} on {h.device}; got "
            f"{tuple(da.shape)}, {da.dtype} on {da.device}"
        )
    if not _recorded(da, h, probs) and runs_on_triton("scaled_glu_backward", h):
        return scaled_glu_backward_triton(da, h, probs, glu)
    return scaled_glu_backward_reference(da, h, probs, glu)


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_halves(op: str, h: Tensor, probs: Tensor | None) -> None:
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"{op} needs h [rows, 2 features], got {tuple(h.shape)}")
    if not h.is_floating_point() or not (probs is None or probs.is_floating_point()):
        raise TypeError(f"{op} needs floating dtypes, got {h.dtype} and {None if probs is None else probs.dtype}")
    if probs is not None and (probs.shape != h.shape[:1] or probs.device != h.device):
        raise ValueError(f"{op} needs probs ({h.shape[0]},) on {h.device}, got {tuple(probs.shape)} on {probs.device}")
