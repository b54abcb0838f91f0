"""Storage: one flat tensor for each buffer of a plan, and views of single parameters and buckets.

``MappedPool`` is memory that the ranks of an NCCL group map into each other's address space, so that copy engines can
move it. NCCL's documentation: user buffer registration, symmetric windows.
"""

import ctypes
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.layout import BucketLayout, BufferLayout, ParamSlot
from ..torch_internals.distributed import backend_on, zero_cta_options

__all__ = ["FlatBuffer", "MappedPool", "check_copy_engines"]


class MappedPool:
    """A pool of mapped memory. ``share`` maps all memory that was allocated in the pool before.

    All ranks must allocate and free the same sizes in the same order, so that a tensor has the same offset on all
    ranks. The process keeps the memory until it ends: torch 2.11 aborts where a pool is freed with its group.

    group   the ranks that map the memory; the constructor is collective over them
    device  this rank's device
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL makes the communicator now
        self._group = group
        self._device = device
        assert backend_on is not None, "check_copy_engines"
        self._backend = backend_on(group, device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        # The pool's destructor would run at exit, find the group gone, and abort. This reference keeps the pool alive.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """In this block, this thread allocates from the pool."""
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield

    def share(self) -> None:
        """Map the memory that was allocated so far. Collective; the host waits."""
        torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)
        self._backend.register_mem_pool(self._pool, symm=True)
        torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)


def check_copy_engines(backends: Collection[str], device: torch.device, option: str) -> None:
    """Raise ``ValueError`` where all-gathers cannot run on copy engines.

    backends  of the groups on ``device``; none in a world of one
    option    that asks for copy engines, for the error
    """
    on_nccl = device.type == "cuda" and all("nccl" in backend for backend in backends)
    if not (on_nccl and zero_cta_options() is not None and backend_on is not None):
        raise ValueError(
            f"{option} needs parameters on CUDA, NCCL 2.28 or newer, and a torch that knows its zero-CTA policy; got "
            f"{device} and {', '.join(sorted(backends)) or 'no process group'}; leave it False"
        )


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
