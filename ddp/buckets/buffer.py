"""Storage: one flat tensor for each buffer of a plan, and views of single parameters and buckets."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.mapped_memory import MappedPool
from ..plan.layout import BucketLayout, BufferLayout, ParamSlot

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """A flat tensor laid out by a ``BufferLayout``: gradients, or the parameters themselves.

    The tensor starts as zeros, and padding is zero at the start of every iteration: norms and collectives may read all
    of the tensor.

    mapped_in  an NCCL group whose ranks map each other's buffers, so that copy engines can move the elements; None:
               plain memory. Collective over the group. The process keeps mapped memory until the process ends
    """

    def __init__(
        self,
        layout: BufferLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        mapped_in: dist.ProcessGroup | None = None,
    ) -> None:
        self.layout = layout
        pool = None if mapped_in is None else MappedPool(mapped_in, device)
        with nullcontext() if pool is None else pool.allocating():
            self.data = torch.zeros(layout.numel, dtype=dtype, device=device)
        if pool is not None:
            pool.share()

    def param_view(self, slot: ParamSlot) -> Tensor:
        """The parameter's elements in the parameter's shape, contiguous, no copy."""
        return self.data[slot.start : slot.end].view(slot.spec.shape)

    def bucket_view(self, bucket: BucketLayout) -> Tensor:
        """The bucket's elements, padding included: [bucket.numel], no copy."""
        return self.data[bucket.start : bucket.end]
