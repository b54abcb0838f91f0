"""Flat tensors whose memory is freed and taken again, and a meter of its bytes.

Autograd saves views of a weight (``weight.t()``) for backward. Such a view must be valid again after the weight was
freed and gathered again. So the views are made once, and the one storage below them is resized.

A program may keep a view too. Without memory its pointer is null, and most of torch's functions do not check that: the
process ends. So a storage without memory refuses reads by itself where torch can (``refuse_storage_reads``).
"""

from functools import partial

import torch
from torch import Tensor

from ..collectives.mapped_memory import MappedPool
from ..collectives.streams import current_stream, record_call
from ..torch_internals import allow_storage_reads, refuse_storage_reads

__all__ = ["Meter", "ReleasableBuffer"]


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

    __slots__ = ("_nbytes", "_storage", "data", "meter", "pool", "refusal", "resident", "stream")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data: Tensor = torch.empty(numel, dtype=dtype, device=device)
        """[numel]"""
        self._storage = self.data.untyped_storage()
        self._nbytes: int = self._storage.nbytes()
        self.meter: Meter | None = None
        self.pool: MappedPool | None = None
        """The memory comes from here; None: from torch's caching allocator."""
        self.resident = True
        self.stream: torch.cuda.Stream | None = None
        """The stream that was current at ``take``; None on CPU."""
        self.refusal = "this memory was freed"
        """Text of the ``RuntimeError`` for reads without memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory while the buffer is resident."""
        return self._nbytes

    def take(self) -> None:
        """Give the buffer memory, unless it has some."""
        if self.resident:
            return
        if self.data.is_cuda:
            self.stream = current_stream(self.data.device)
        if self.pool is None:
            self._resize(self._nbytes)
        else:
            with self.pool.allocating():
                self._resize(self._nbytes)
        self.resident = True
        if self.meter is not None:
            self.meter.add(self._nbytes)

    def release(self) -> None:
        """Free the memory, if the buffer has some."""
        if not self.resident or self._nbytes == 0:
            return
        self._resize(0)
        self.resident = False
        if self.meter is not None:
            self.meter.add(-self._nbytes)

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
