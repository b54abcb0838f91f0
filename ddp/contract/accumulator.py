"""Which tensors may be a weight's accumulator, by shape, dtype, device and strides."""

import torch
from torch import Tensor

__all__ = ["check_accumulator"]


def check_accumulator(owner: str, weight: Tensor, main_grad: Tensor, rows_apart: bool) -> None:
    """Raise ``RuntimeError`` that names shape and stride: see ``main_grad.accumulator_of``."""
    if (
        main_grad.shape != weight.shape
        or main_grad.device != weight.device
        or main_grad.dtype not in (torch.float32, weight.dtype)
        or not (_rows_fit(main_grad) if rows_apart else main_grad.is_contiguous())
    ):
        raise RuntimeError(
            f"{owner}: main_grad must {'have adjacent columns and be' if rows_apart else 'be contiguous,'} of the "
            f"weight's shape {tuple(weight.shape)} on {weight.device}, fp32 or {weight.dtype}; got shape "
            f"{tuple(main_grad.shape)}, stride {tuple(main_grad.stride())}, {main_grad.dtype} on {main_grad.device}"
        )


def _rows_fit(main_grad: Tensor) -> bool:
    """Whether columns are adjacent and no two elements share memory."""
    if main_grad.is_contiguous():
        return True
    end = 1
    for stride, size in sorted(zip(main_grad.stride(), main_grad.shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end = max(end, stride * size)
    return main_grad.stride(-1) == 1
