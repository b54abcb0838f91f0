"""Weight gradients, added to their accumulators: the dense one by one GEMM, and experts' by grouped products.

Legend: T rows (tokens), N output features, K input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .compat import HAS_TRITON
from .grouped.products import config_of, grouped_wgrad_accumulate
from .quantized import (
    GroupedQuantized,
    Quantized,
    scaled_grouped_wgrad_accumulate,
    scaled_product,
    scaled_wgrad_accumulate,
)
from .reference import wgrad_accumulate_reference

if HAS_TRITON:
    from .grouped.wgrad_config import WgradConfig
    from .grouped.wgrad_triton import grouped_wgrad_triton

__all__ = [
    "GroupedWgradOperand",
    "WgradOperand",
    "cublas_wgrad",
    "grouped_wgrad",
    "tensors_of",
    "wgrad_accumulate",
    "wgrad_features",
    "wgrad_product",
]

_HALF = (torch.bfloat16, torch.float16)

WgradOperand = Tensor | Quantized
"""An operand of ``dy^T x``: [T, features]; or quantised along the tokens, and so transposed: [features, T]."""

GroupedWgradOperand = Tensor | GroupedQuantized
"""An operand of ``dy_e^T x_e``: [T, features]; or quantised along each expert's tokens: [features, T]."""


def tensors_of(operand: WgradOperand | GroupedQuantized) -> tuple[Tensor, ...]:
    """The tensors that hold ``operand``."""
    return operand.tensors if isinstance(operand, Quantized | GroupedQuantized) else (operand,)


def wgrad_features(operand: GroupedWgradOperand) -> int:
    """The number of features of an operand."""
    return operand.matrix.shape[0] if isinstance(operand, GroupedQuantized) else operand.shape[1]


def wgrad_product(dy: WgradOperand, x: WgradOperand, dtype: torch.dtype) -> Tensor:
    """``dy^T x`` [N, K] as a new tensor of ``dtype``; both operands are tensors, or both are quantised."""
    if isinstance(dy, Quantized) and isinstance(x, Quantized):
        return scaled_product(dy, x, dtype)
    assert isinstance(dy, Tensor) and isinstance(x, Tensor), "both alike"
    return (dy.t() @ x).to(dtype)


def wgrad_accumulate(dy: WgradOperand, x: WgradOperand, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """Accumulate a linear layer's weight gradient in place: ``main_grad = beta * main_grad + dy^T x``.

    dy         [T, N]  gradient of the output, bf16, fp16, fp32 or fp64; any strides
    x          [T, K]  input of the forward, dtype of ``dy``; any strides
    main_grad  [N, K]  accumulator, contiguous: fp32 under half-precision operands, or the operands' own dtype
    overwrite          beta = 0: ``main_grad`` is write-only and may hold anything, NaN included; otherwise beta = 1

    On CUDA one kernel runs: there is no product tensor and no second pass over ``main_grad`` (relative error against
    fp64: 9e-6 for bf16 operands on an H200). The kernel is cuBLAS with an fp32 epilogue, or the grouped kernel with one
    expert for shapes where the tuning table says that it is faster (few tokens). On a CPU the reference runs. T may be
    0.

    Quantised operands: see ``scaled_wgrad_accumulate``.

    Raises ``ValueError`` for shapes that do not match and ``TypeError`` for operands of different dtypes. The method is
    Megatron-LM's ``gradient_accumulation_fusion``, with cuBLAS called through ``torch.addmm``.
    """
    if isinstance(dy, Quantized) or isinstance(x, Quantized):
        assert isinstance(dy, Quantized) and isinstance(x, Quantized), "both alike"
        scaled_wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)
        return
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


def grouped_wgrad(
    dy: GroupedWgradOperand,
    x: GroupedWgradOperand,
    main_grads: Tensor | Sequence[Tensor | None],
    offsets: Tensor,
    *,
    overwrite: bool | Sequence[bool] = False,
) -> None:
    """``grouped_wgrad_accumulate``, which describes the arguments. Quantised operands have offsets of their own."""
    if isinstance(dy, GroupedQuantized) or isinstance(x, GroupedQuantized):
        assert isinstance(dy, GroupedQuantized) and isinstance(x, GroupedQuantized), "both alike"
        scaled_grouped_wgrad_accumulate(dy, x, main_grads, overwrite=overwrite)
    else:
        grouped_wgrad_accumulate(dy, x, main_grads, offsets, overwrite=overwrite)


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
    sizes = 1, dy.shape[0], dy.shape[1], x.shape[1]
    config: WgradConfig | None = config_of(WgradConfig, _by_cublas, dy.device, dy.dtype, op, *sizes)
    return config


def _by_cublas(*_: object) -> None:
    """Stand for the configuration of a shape without one."""
