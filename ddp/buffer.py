"""Storage: one flat tensor for each buffer of a plan, and the views that parameters and buckets have of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import BucketLayout, BufferLayout, ParamSlot

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """A flat tensor laid out by a ``BufferLayout``: gradients, or the parameters themselves.

    It starts as zeros, and so does its padding in every iteration: norms and collectives may read all of it.

    mapped_in  an NCCL group whose ranks map each other's buffer, so that copy engines can move it; None: plain memory.
               Collective over the group. The process keeps mapped memory until it ends
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
        if mapped_in is None:
            self.data = torch.zeros(layout.numel, dtype=dtype, device=device)
        else:
            self._allocate_mapped(dtype, device, mapped_in)

    def param_view(self, slot: ParamSlot) -> Tensor:
        """The parameter's elements in the parameter's shape, contiguous, no copy."""
        return self.data[slot.start : slot.end].view(slot.spec.shape)

    def bucket_view(self, bucket: BucketLayout) -> Tensor:
        """The bucket's elements, padding included: [bucket.numel], no copy."""
        return self.data[bucket.start : bucket.end]

    def _allocate_mapped(self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        """NCCL's user buffer registration, as a symmetric window (torch's and NCCL's documentation call it so)."""
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # a communicator is made by its first collective
        backend = group._get_backend(device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            self.data = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group=group)
        backend.register_mem_pool(pool, symm=True)  # type: ignore[attr-defined]
        torch.cuda.synchronize(device)
        dist.barrier(group=group)
        _MAPPED.append(pool)


_MAPPED: list[Any] = []
"""Pools of mapped memory, for as long as the process lives: torch 2.11 aborts where one is freed with its group."""
