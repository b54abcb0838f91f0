"""What this machine's torch and Triton have, and nothing else: torch is 2.11 or newer, Triton may be missing."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed import distributed_c10d as c10d

__all__ = [
    "HAS_TRITON",
    "device_of",
    "premultiplied_sum",
    "runs_on_triton",
    "start_all_gather",
    "start_reduce_scatter",
    "zero_cta_options",
]


# torch.distributed's functions around these two take 90 us of a collective's host time on 2.11, by counters and checks.
# torch 2.13 renamed the methods below them.
if dist.is_available():
    _GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
    _SCATTER = (
        "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
    )


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, on_stream: bool = False) -> Any:
    """Fill ``output`` [n] with every rank's ``input`` [n / ranks], asynchronously; returns the ``Work``.

    on_stream  NCCL runs it on the current CUDA stream instead of one of torch's own, which saves the host two events
    """
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = not on_stream
    return getattr(group, _GATHER)(_real(output), _real(input), options) or _OnStream()


def start_reduce_scatter(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, *, on_stream: bool = False
) -> Any:
    """Fill ``output`` [n / ranks] with this rank's part of the reduced ``input`` [n]; returns the ``Work``.

    on_stream  as for ``start_all_gather``
    """
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    return getattr(group, _SCATTER)(_real(output), _real(input), options) or _OnStream()


class _OnStream:
    """The ``Work`` of a collective on the current stream, for which torch returns none: the stream is what waits."""

    def wait(self) -> bool:
        """Nothing to do."""
        return True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
