"""What a fused backward returns to autograd for a weight: one pure function for every module, and the placeholder."""

import enum
import functools
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Returned", "WgradOutcome", "Written", "placeholder", "wgrad_outcome"]


class Returned(enum.Enum):
    """What backward hands to autograd as the weight's gradient."""

    WGRAD = "the gradient itself"
    NONE = "None"
    PLACEHOLDER = "a tensor of the right shape that nobody may read"


class Written(enum.Enum):
    """When ``main_grad`` is written."""

    NO = "not at all"
    BACKWARD = "in backward"
    BACKWARD_DW = "in backward_dw"


class WgradOutcome(NamedTuple):
    """One row of the table."""

    returned: Returned
    written: Written
    sets_flag: bool


@functools.cache
def wgrad_outcome(
    needs_grad: bool, delayed: bool, has_main_grad: bool, has_flag: bool, provider_is_ours: bool
) -> WgradOutcome:
    """The return table: what autograd gets, when ``main_grad`` is written, and whether the flag is set.

    needs_grad        the weight is not frozen
    delayed           ``backward_dw`` computes the weight gradient, after the main backward
    has_main_grad     the gradient goes into ``main_grad`` (fused). Otherwise autograd or ``backward_dw`` delivers it
    has_flag          ``grad_added_to_main_grad`` exists: the provider's hook must run
    provider_is_ours  our provider's hook runs for None too, so no placeholder is needed

    The flag means "``.grad`` is a placeholder". A delayed weight's flag is set in backward, before the write.
    """
    if not needs_grad:
        return WgradOutcome(Returned.NONE, Written.NO, sets_flag=False)
    if not has_main_grad:
        return WgradOutcome(Returned.NONE if delayed else Returned.WGRAD, Written.NO, sets_flag=False)
    returned = Returned.PLACEHOLDER if has_flag and not provider_is_ours else Returned.NONE
    return WgradOutcome(returned, Written.BACKWARD_DW if delayed else Written.BACKWARD, sets_flag=has_flag)


# ---- Placeholder gradients: foreign providers' hooks run only if autograd delivers a tensor, which nobody reads. ----

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
