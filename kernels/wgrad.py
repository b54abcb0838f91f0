"""Dense weight gradient into its accumulator: the one GEMM that this project is about.

Legend: T rows (tokens), N output features, K input features.
"""

import torch
from torch import Tensor

from .reference import wgrad_accumulate_reference

__all__ = ["wgrad_accumulate"]


def wgrad_accumulate(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """Accumulate a linear layer's weight gradient in place: ``main_grad = beta * main_grad + dy^T x``.

    dy         [T, N]  gradient of the output, bf16, fp16, fp32 or fp64; any strides
    x          [T, K]  input of the forward, dtype of ``dy``; any strides
    main_grad  [N, K]  accumulator, contiguous: fp32 under half-precision operands, or the operands' own dtype
    overwrite          beta = 0: ``main_grad`` is write-only and may hold anything, NaN included; otherwise beta = 1

    On CUDA this is one cuBLAS call with an fp32 epilogue: no product tensor, no second pass over ``main_grad``
    (relative error 9e-6 against fp64 for bf16 operands on an H200). Elsewhere it is the reference. T may be 0.

    Raises ``ValueError`` for shapes that do not fit together and ``TypeError`` for operands of different dtypes.
    The method is Megatron-LM's ``gradient_accumulation_fusion``, with cuBLAS called through ``torch.addmm``.
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
    elif main_grad.dtype is dy.dtype:
        if overwrite:
            torch.mm(dy.t(), x, out=main_grad)
        else:
            torch.addmm(main_grad, dy.t(), x, out=main_grad)
    elif main_grad.dtype is torch.float32:
        # The accumulator is both the addend and the output: cuBLAS reads C and writes D in place.
        if overwrite:
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=main_grad)
        else:
            torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        wgrad_accumulate_reference(dy, x, main_grad, overwrite=overwrite)
