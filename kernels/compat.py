"""Which implementation of an operation runs: a Triton kernel, or the reference where Triton cannot run."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .private_names import private_name

__all__ = ["HAS_TRITON", "device_of", "runs_on_triton"]

HAS_TRITON: bool = importlib.util.find_spec("triton") is not None and private_name(
    "triton.tools.tensor_descriptor.TensorDescriptor",
    loss="all kernels run as plain PyTorch, slowly",
    use=True,
    fallback=False,
)
"""False without Triton, which publishes wheels for Linux on x86-64 only, and with one whose names are others."""


def runs_on_triton(operation: str, tensor: Tensor) -> bool:
    """Whether a Triton kernel runs ``operation`` on ``tensor``: on CUDA, and not for fp64, where it gains nothing.

    On CUDA without Triton the reference runs, which may wait for the device; a warning says so once per ``operation``.
    """
    if not tensor.is_cuda or tensor.dtype is torch.float64:
        return False
    if not HAS_TRITON:
        _warn_without_triton(operation)
    return HAS_TRITON


@functools.cache
def _warn_without_triton(operation: str) -> None:
    warnings.warn(
        f"{operation} runs as plain PyTorch, slowly and with waits for the device, without a Triton that fits: "
        f"pip install triton",
        RuntimeWarning,
        stacklevel=4,
    )


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``tensor`` current: Triton launches on the current CUDA device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
