"""Weights that ``torch.distributed.fsdp.fully_shard`` (FSDP2) has gathered, and what their gradients are added to.

FSDP2 gives a module plain parameters for its forward and backward. When backward has passed the module's inputs, FSDP2
takes the parameters' ``.grad`` and frees the parameters. Under ``set_requires_gradient_sync(False)`` FSDP2 keeps the
gradient until the next microbatch, in ``.grad`` or in a tensor of ``reduce_dtype``. That tensor is an accumulator, and
a fused weight gradient is added to it. A gradient that is added after FSDP2 took ``.grad`` would wait for the next
iteration; so weight gradients cannot be delayed here.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.distributed import accumulated_by_fsdp2, gathered_by_fsdp2

__all__ = ["TorchShards", "is_sharded_by_torch"]

_MARK = "_maingrad_torch_shards"


class TorchShards:
    """FSDP2's record of one gathered weight, held weakly: FSDP2 owns record and weight."""

    def __init__(self, param: Any) -> None:
        self._param = weakref.ref(param)

    @classmethod
    def of(cls, weight: Tensor) -> "TorchShards | None":
        """The record of ``weight``; None where FSDP2 did not make that weight.

        The search goes over all sharded models and marks every weight that is gathered now. So one search serves a
        whole unit.
        """
        if not hasattr(weight, _MARK):
            for param, gathered in gathered_by_fsdp2():
                if not hasattr(gathered, _MARK):
                    setattr(gathered, _MARK, cls(param))
        found: TorchShards | None = getattr(weight, _MARK, None)
        return found

    def accumulator(self, weight: Tensor) -> Tensor | None:
        """The tensor that this backward's gradient is added to: contiguous, ``weight``'s shape, fp32 or its dtype.

        None, and then autograd delivers the gradient: in the first microbatch, where each microbatch is reduced on its
        own, and where FSDP2 sums in another dtype.
        """
        found = accumulated_by_fsdp2(self._param())
        if found is None:
            found = weight.grad
        # Under tensor parallelism the weight and its gradient are DTensors, which no GEMM here writes.
        fits = type(found) is Tensor and found.dtype in (torch.float32, weight.dtype) and found.is_contiguous()
        return found if fits else None

    @staticmethod
    def refuse_delay(owner: str) -> RuntimeError:
        """The error for a weight gradient that is delayed under FSDP2."""
        return RuntimeError(
            f"{owner}: a delayed weight gradient under torch.distributed.fsdp.fully_shard, which reduces gradients in "
            f"backward: what backward_dw() or drain() adds later would be reduced in the next iteration, or never; "
            f"build the module without delay_wgrad_compute=True and run its forward outside delayed_wgrad(queue), or "
            f"use maingrad.fsdp.fully_shard"
        )


def is_sharded_by_torch(param: Tensor) -> bool:
    """Whether ``param`` is a DTensor, or a weight that FSDP2 has gathered from one. For error messages."""
    return hasattr(param, "to_local") or TorchShards.of(param) is not None
