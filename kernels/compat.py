"""What this machine's torch and Triton have, and nothing else: torch is 2.11 or newer, Triton may be missing."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "all_gather_single",
    "device_of",
    "premultiplied_sum",
    "reduce_scatter_single",
    "runs_on_triton",
    "zero_cta_options",
]


def _either(new: str, old: str) -> Callable[..., Any]:
    """The function under its new name, or under the old one where torch does not have the new name yet."""
    return getattr(dist, new, None) or getattr(dist, old)  # type: ignore[no-any-return]


# torch 2.13 renamed these collectives and warns at each call of the old names, which 2.11 and 2.12 still need.
if dist.is_available():
    reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather_single = _either("all_gather_single", "all_gather_into_tensor")


def premultiplied_sum(factor: float) -> Any:
    """NCCL's sum of values times ``factor``, scaled on the way. torch has it under a private name, for its own FSDP."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def zero_cta_options() -> Any:
    """Options of an NCCL group whose gathers take no multiprocessor; None where torch does not know them."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(nccl, "NCCL_CTA_POLICY_ZERO", None)
    if nccl is None or policy is None:
        return None
    options = nccl.Options()
    options.config.cta_policy = policy
    return options


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
