"""Storage: one flat tensor for each buffer of a plan, and views of single parameters and buckets.

``MappedPool`` is memory that the ranks of an NCCL group map into each other's address space, so that copy engines can
move it. NCCL's documentation: user buffer registration, symmetric windows.

Memory of a ``ReleasableBuffer`` is freed and taken again. Autograd saves views of a weight (``weight.t()``) for
backward. Such a view must be valid again after the weight was freed and gathered again. So the views are made once, and
the one storage below them is resized. A program may keep a view too. Without memory its pointer is null, and most of
torch's functions do not check that: the process ends. So a storage without memory refuses reads by itself where torch
can (``refuse_storage_reads``).
"""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.streams import current_stream, record_call
from ..plan.layout import BucketLayout, BufferLayout, ParamSlot
from ..torch_internals import allow_storage_reads, refuse_storage_reads
from ..torch_internals.distributed import backend_on

__all__ = ["FlatBuffer", "MappedPool", "Meter", "ReleasableBuffer"]


class MappedPool:
    """A pool of mapped memory. ``share`` maps all memory that was allocated in the pool before.

    All ranks must allocate and free the same sizes in the same order, so that a tensor has the same offset on all
    ranks. The process keeps the memory until it ends: torch 2.11 aborts where a pool is freed with its group.

    group   the ranks that map the memory; the constructor is collective over them
    device  this rank's device
    """

    num_made: ClassVar[int] = 0
    """Pools of this process so far."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        MappedPool.num_made += 1
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL makes the communicator now
        self._group = group
        self._device = device
        assert backend_on is not None, "check_copy_engines"
        self._backend = backend_on(group, device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        # The pool's destructor would run at exit, find the group gone, and abort. This reference keeps the pool alive.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))

    def allocating(self) -> AbstractContextManager[None]:
        """A ``with`` block in which this thread allocates from the pool."""
        return torch.cuda.use_mem_pool(self._pool, device=self._device)

    def share(self) -> None:
        """Map the memory that was allocated so far. Collective; the host waits."""
        torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)
        self._backend.register_mem_pool(self._pool, symm=True)
        torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)


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


# ---- Memory that is freed and taken again. ----


class Meter:
    """Counts the bytes of some buffers: now (``held_nbytes``) and at most so far (``peak_nbytes``)."""

    __slots__ = ("held_nbytes", "peak_nbytes")

    def __init__(self) -> None:
        self.held_nbytes = 0
        self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        """``nbytes`` bytes were taken, or freed if negative."""
        self.held_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)


class ReleasableBuffer:
    """A flat tensor [numel] that has memory from ``take`` to ``release``. Its values are lost at ``release``.

    A new buffer has memory, because views can be made only then.

    On CUDA the memory belongs to the stream that is current at ``take``, and returns to that stream. Before ``release``
    that stream must wait for all other streams that use the memory.
    """

    __slots__ = ("_storage", "data", "meter", "nbytes", "pool", "refusal", "resident", "stream")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data: Tensor = torch.empty(numel, dtype=dtype, device=device)
        """[numel]"""
        self._storage = self.data.untyped_storage()
        self.nbytes: int = self._storage.nbytes()
        """Bytes of the memory while the buffer is resident."""
        self.meter: Meter | None = None
        self.pool: MappedPool | None = None
        """The memory comes from here; None: from torch's caching allocator."""
        self.resident = True
        self.stream: torch.cuda.Stream | None = None
        """The stream that was current at ``take``; None on CPU."""
        self.refusal = "this memory was freed"
        """Text of the ``RuntimeError`` for reads without memory."""

    def take(self) -> None:
        """Give the buffer memory, unless it has some."""
        if self.resident:
            return
        if self.data.is_cuda:
            self.stream = current_stream(self.data.device)
        if self.pool is None:
            self._resize(self.nbytes)
        else:
            with self.pool.allocating():
                self._resize(self.nbytes)
        self.resident = True
        if self.meter is not None:
            self.meter.add(self.nbytes)

    def release(self) -> None:
        """Free the memory, if the buffer has some."""
        if not self.resident or self.nbytes == 0:
            return
        self._resize(0)
        self.resident = False
        if self.meter is not None:
            self.meter.add(-self.nbytes)

    def _resize(self, nbytes: int) -> None:
        resize = partial(_resize, self._storage, nbytes, self.refusal)
        resize()
        if not self.data.is_cuda:
            record_call(resize)  # a CUDA graph has memory of its own


def _resize(storage: torch.UntypedStorage, nbytes: int, refusal: str) -> None:
    if nbytes:
        allow_storage_reads(storage._cdata)
    storage.resize_(nbytes)
    if not nbytes:
        refuse_storage_reads(storage._cdata, refusal)
