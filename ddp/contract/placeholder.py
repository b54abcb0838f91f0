"""Gradients that nobody reads, for foreign providers whose hooks run only where autograd delivers a tensor."""

import torch
from torch import Tensor

__all__ = ["placeholder"]

_scratch: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int]] = {}
"""Zeros by (device, dtype), with the version at which they were last known to be zeros. The one process-global here:
placeholders are never read, so that all of them can share the memory of the largest."""


def placeholder(weight: Tensor) -> Tensor:
    """Zeros of ``weight``'s shape, dtype and device that cost nothing: a view of one shared scratch tensor.

    Autograd takes a detached view over as ``.grad`` without a copy (it would clone a stride-0 expand). Zeros make mixed
    use safe: placeholder + real gradient = real gradient. Somebody who wrote into an earlier placeholder changed the
    scratch's version, and it is zeroed again.
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
