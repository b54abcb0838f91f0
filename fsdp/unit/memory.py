"""Flat tensors whose memory comes and goes, and how much of it there may be.

Autograd saves views of a weight (``weight.t()``) that must see the weight again after it was freed and gathered anew.
So a buffer's views are made once, and its memory is given to and taken from the one storage below them.
"""

import torch
from torch import Tensor

from ...ddp.collectives.mapped_memory import MappedPool
from ...ddp.collectives.streams import current_stream

__all__ = ["Meter", "ReleasableBuffer"]


class Meter:
    """Bytes of one kind of memory, now and at most."""

    __slots__ = ("held_nbytes", "peak_nbytes")

    def __init__(self) -> None:
        self.held_nbytes = 0
        self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        """So many bytes were taken; returned where negative."""
        self.held_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)


class ReleasableBuffer:
    """A flat tensor [numel] that has memory between ``take`` and ``release``; what it holds is lost in between.

    It starts with memory, as views can be made only then.

    On CUDA memory belongs to the stream that is current when it is taken, and goes back to it: by then that stream must
    wait for all that other streams do with it.
    """

    __slots__ = ("_nbytes", "_storage", "data", "meter", "pool", "resident", "stream")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data: Tensor = torch.empty(numel, dtype=dtype, device=device)
        """[numel]"""
        self._storage = self.data.untyped_storage()
        self._nbytes: int = self._storage.nbytes()
        self.meter: Meter | None = None
        self.pool: MappedPool | None = None
        """Where it takes its memory from, if not from torch's own."""
        self.resident = True
        self.stream: torch.cuda.Stream | None = None
        """That it was taken on, on CUDA."""

    @property
    def nbytes(self) -> int:
        """Bytes that it has while it is resident."""
        return self._nbytes

    def take(self) -> None:
        """Give it memory."""
        if self.resident:
            return
        if self.data.is_cuda:
            self.stream = current_stream(self.data.device)
        if self.pool is None:
            self._storage.resize_(self._nbytes)
        else:
            with self.pool.allocating():
                self._storage.resize_(self._nbytes)
        self.resident = True
        if self.meter is not None:
            self.meter.add(self._nbytes)

    def release(self) -> None:
        """Take its memory away."""
        if not self.resident or self._nbytes == 0:
            return
        self._storage.resize_(0)
        self.resident = False
        if self.meter is not None:
            self.meter.add(-self._nbytes)
