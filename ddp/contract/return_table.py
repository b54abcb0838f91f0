"""What a fused backward returns to autograd for a weight: one pure function for every module."""

import enum
import functools
from typing import NamedTuple

__all__ = ["Returned", "WgradOutcome", "Written", "wgrad_outcome"]


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
