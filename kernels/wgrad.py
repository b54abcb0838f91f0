"""The weight gradient of a linear layer, added to its accumulator by one GEMM.

Legend: T rows (tokens), N output features, K input features.
"""

from typing import Any

import torch
from torch import Tensor

from .compat import HAS_TRITON
from .grouped.reference import wgrad_accumulate_reference
from .tuning import config_of

if HAS_TRITON:
    from .grouped.wgrad_config import WgradConfig
    from .grouped.wgrad_triton import grouped_wgrad_triton

__all__ = ["cublas_wgrad", "wgrad_accumulate"]

_HALF = (torch.bfloat16, torch.float16)


def wgrad_accumulate(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """Accumulate a linear layer's weight gradient in place: ``main_grad = beta * main_grad + dy^T x``.

    dy         [T, N]  gradient of the output, bf16, fp16, fp32 or fp64; any strides
    x          [T, K]  input of the forward, dtype of ``dy``; any strides
    main_grad  [N, K]  accumulator, contiguous: fp32 under half-precision operands, or the operands' own dtype
    overwrite          beta = 0: ``main_grad`` is write-only and may hold anything, NaN included; otherwise beta = 1

    On CUDA one kernel runs: there is no product tensor and no second pass over ``main_grad`` (relative error against
    fp64: 9e-6 for bf16 operands on an H200). The kernel is cuBLAS with an fp32 epilogue, or the grouped kernel with one
    expert for shapes where the tuning table says that it is faster (few tokens). On a CPU the reference runs. T may be
    0.

    Quantised operands have ``kernels.quantized.scaled_wgrad_accumulate``.

    Raises ``ValueError`` for shapes that do not match and ``TypeError`` for operands of different dtypes. The method is
    Megatron-LM's ``gradient_accumulation_fusion``, with cuBLAS called through ``torch.addmm``.
    """
    rows = dy.shape[0] if dy.dim() == 2 == x.dim() else -1
    if rows != x.shape[0] or main_grad.shape != (dy.shape[1], x.shape[1]):
        raise ValueError(
            f"wgrad_accumulate needs dy [T, N], x [T, K] and main_grad [N, K]; "
            f"got {tuple(dy.shape)}, {tuple(x.shape)} and {tuple(main_grad.shape)}"
        )
    if dy.dtype is not x.dtype:
        raise TypeError(f"wgrad_accumulate needs dy and x of one dtype; got {dy.dtype} and {x.dtype}")
    if rows == 0:
        if overwrite:
            main_grad.zero_()
    elif not main_grad.is_cuda:
        wgrad_accumulate_reference(dy, x, main_grad, overwrite=overwrite)
    elif main_grad.dtype is torch.float32 and dy.dtype in _HALF:
        config = _kernel_for(dy, x, overwrite)
        if config is None:
            cublas_wgrad(dy, x, main_grad, overwrite=overwrite)
        else:
            grouped_wgrad_triton(dy, x, main_grad[None], None, overwrite, config)
    elif main_grad.dtype is dy.dtype:
        if overwrite:
            torch.mm(dy.t(), x, out=main_grad)
        else:
            torch.addmm(main_grad, dy.t(), x, out=main_grad)
    else:
        wgrad_accumulate_reference(dy, x, main_grad, overwrite=overwrite)


def cublas_wgrad(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool) -> None:
    """Half-precision operands and an fp32 accumulator, which cuBLAS both reads (as C) and writes (as D)."""
    if overwrite:
        torch.mm(dy.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)


def _kernel_for(dy: Tensor, x: Tensor, overwrite: bool) -> "WgradConfig | None":
    """The kernel's configuration; None where cuBLAS is faster, or no near shape was measured on this GPU."""
    if not HAS_TRITON or dy.stride(1) != 1 or x.stride(1) != 1:
        return None
    op = "wgrad_overwrite" if overwrite else "wgrad_accumulate"
    sizes = dy.shape[0], dy.shape[1], x.shape[1]
    config: WgradConfig | None = config_of(WgradConfig, _cublas, dy.device, dy.dtype, op, 1, *sizes)
    return config


def _cublas(*_: Any) -> None:
    """The default of ``config_of``: no configuration of the kernel."""
