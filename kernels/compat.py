"""What this machine's torch and Triton have, and which kernels serve whom: Triton may be missing."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["HAS_TRITON", "device_of", "runs_on_triton"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton publishes wheels for Linux on x86-64 only."""


def runs_on_triton(operation: str, tensor: Tensor) -> bool:
    """Whether a kernel or the oracle serves ``tensor``: CUDA, and not fp64, for which there is no hardware to win.

    Where only Triton is missing, that is said once for each ``operation``: an oracle may wait for the device.
    """
    if not tensor.is_cuda or tensor.dtype is torch.float64:
        return False
    if not HAS_TRITON:
        _warn_without_triton(operation)
    return HAS_TRITON


@functools.cache
def _warn_without_triton(operation: str) -> None:
    warnings.warn(
        f"{operation} runs as plain PyTorch, slowly and with waits for the device, since Triton is not installed: "
        f"pip install triton",
        RuntimeWarning,
        stacklevel=4,
    )


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
