"""Placeholder gradients: foreign providers' hooks run only if autograd delivers a tensor, which nobody reads."""

import torch
from torch import Tensor

__all__ = ["placeholder"]

_scratch: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int]] = {}
"""One scratch tensor for each (device, dtype), with its version when it was last known to hold zeros. All placeholders
share it, as nobody reads them."""


def placeholder(weight: Tensor) -> Tensor:
    """Zeros of ``weight``'s shape, dtype and device: a view of one shared scratch tensor, without new memory.

    Autograd uses a detached view as ``.grad`` without a copy; it would clone a stride-0 expand. Zeros make mixed use
    safe: placeholder + gradient = gradient. A write into an earlier placeholder changes the scratch's version, and the
    scratch is zeroed again.
    """
    key = (weight.device, weight.dtype)
    scratch, version = _scratch.get(key, (None, 0))
    if scratch is None or scratch.numel() < weight.numel():
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a placeholder gradient cannot be allocated during a CUDA graph capture: run one eager iteration first"
            )
        scratch = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
        _scratch[key] = (scratch, scratch._version)
    elif scratch._version != version:
        scratch.zero_()
        _scratch[key] = (scratch, scratch._version)
    return scratch[: weight.numel()].view(weight.shape).detach()
