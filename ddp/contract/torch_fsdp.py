"""Weights that ``torch.distributed.fsdp.fully_shard`` (FSDP2) has gathered, and what their gradients are added to.

It hands a module plain parameters for the time of its forward and backward, takes what autograd left in their ``.grad``
when backward has passed the module's inputs, and frees them. Under ``set_requires_gradient_sync(False)`` it keeps what
it took: in ``.grad``, or in the dtype of the reduction beside it. That is an accumulator, and a fused product can add
to it. Whatever is added after that moment would wait there for the next iteration.

torch says nowhere in public which parameter is whose, hence the names with underscores, which are those of torch 2.11
and 2.13; nothing of FSDP2 is imported here.
"""

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchShards", "is_asking", "is_sharded_by_torch"]

_MARK = "_maingrad_torch_shards"


class TorchShards:
    """What FSDP2 knows of one gathered weight. Held weakly, as the weight is: FSDP2 owns both."""

    __slots__ = ("_param",)

    def __init__(self, param: Any) -> None:
        self._param = weakref.ref(param)

    @classmethod
    def of(cls, weight: Tensor) -> "TorchShards | None":
        """That of ``weight``; None where FSDP2 did not make it.

        A search over all sharded models, which marks every weight gathered so far: once per unit, not per weight.
        """
        if not hasattr(weight, _MARK):
            for param in _sharded_params():
                gathered = getattr(param, "_unsharded_param", None)
                if gathered is not None and not hasattr(gathered, _MARK):
                    setattr(gathered, _MARK, cls(param))
        found: TorchShards | None = getattr(weight, _MARK, None)
        return found

    def accumulator(self, weight: Tensor) -> Tensor | None:
        """What this backward's gradient of ``weight`` may be added to: contiguous, of its shape, fp32 or of its dtype.

        None where there is nothing yet, as in the first microbatch and in every one that is reduced on its own, or
        where FSDP2 sums in another dtype: then autograd is to deliver the gradient.
        """
        found = getattr(self._param(), "unsharded_accumulated_grad", None)
        if found is None:
            found = weight.grad
        # The gradient of a weight that is a DTensor itself (tensor parallelism) is one too.
        fits = type(found) is Tensor and found.dtype in (torch.float32, weight.dtype) and found.is_contiguous()
        return found if fits else None

    @staticmethod
    def refuse_delay(owner: str) -> RuntimeError:
        """Why the gradient of such a weight cannot be delayed."""
        return RuntimeError(
            f"{owner}: a delayed weight gradient under torch.distributed.fsdp.fully_shard, which reduces gradients in "
            f"backward: what backward_dw() or drain() adds later would be reduced in the next iteration, or never; "
            f"build the module without delay_wgrad_compute=True and run its forward outside delayed_wgrad(queue), or "
            f"use maingrad.fsdp.fully_shard"
        )


def is_sharded_by_torch(param: Tensor) -> bool:
    """Whether this is a DTensor, or what FSDP2 has gathered of one: for errors."""
    return hasattr(param, "to_local") or TorchShards.of(param) is not None


def is_asking() -> bool:
    """Whether its code is among the callers: for errors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp."):
        frame = frame.f_back
    return frame is not None


def _sharded_params() -> Iterator[Any]:
    """FSDP2's record of every parameter that it shards in this process."""
    registry = sys.modules.get("torch.distributed._composable_state")  # torch loads it before FSDP2
    for reference in list(getattr(registry, "_module_state_mapping", {}).values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older versions have one for each module
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())
