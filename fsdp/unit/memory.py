"""Flat tensors whose memory is freed and taken again, and a meter of its bytes.

Autograd saves views of a weight (``weight.t()``) for backward. Such a view must be valid again after the weight was
freed and gathered again. So the views are made once, and the one storage below them is resized.

A program may keep a view too. Without memory its pointer is null, and most of torch's functions do not check that: the
process ends. So a storage without memory refuses reads by itself where torch can (``refuse_storage_reads``). And memory
that a program was given to read (``unsharded()``) is not freed but left to the program's views (``WholeParams``).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ddp.buckets.buffer import MappedPool
from ...ddp.collectives.streams import current_stream
from ...ddp.graphs.recorded import record_call
from ...ddp.torch_internals import allow_storage_reads, refuse_storage_reads
from ..tensors.freed import allow_reads, refuse_reads

if TYPE_CHECKING:
    from .bucket import ShardedBucket

__all__ = ["GradPool", "Meter", "ReleasableBuffer", "num_to_end", "pool_limit"]


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


class WholeParams(ReleasableBuffer):
    """The memory of a bucket's whole parameters, which a program may have been given to read (``unsharded()``)."""

    params: tuple[nn.Parameter, ...] = ()
    """The whole parameters, views of the memory."""
    _refuse_reads = False

    def take(self) -> None:
        """Give the parameters memory: they may be read."""
        super().take()
        if self._refuse_reads:
            self._refuse_reads = False
            for param in self.params:
                allow_reads(param)

    def leave(self, names: Sequence[str]) -> None:
        """Leave the memory to views that the program has kept, which go on reading it.

        The parameters themselves refuse to be read until ``take``. The caller then calls ``release``.
        """
        self._refuse_reads = True
        if self.pool is None:  # ranks take and free memory of a pool in one order
            self._begin_anew()
        for param, name in zip(self.params, names, strict=True):
            refuse_reads(param, name)

    def _begin_anew(self) -> None:
        if self.data.is_cuda:
            # The last view may be dropped at any time. The memory then returns to its stream, which has not waited for
            # the program's reads.
            self.data.record_stream(current_stream(self.data.device))
        numel, nothing = self.data.numel(), self.data.new_empty(0)
        places = [(param.storage_offset(), param.shape) for param in self.params]
        for param in self.params:
            param.data = nothing
        self.data = nothing
        self._storage = self.data.untyped_storage()  # the old memory is free now, unless the program has kept a view
        self.data = nothing.new_empty(numel)
        self._storage = self.data.untyped_storage()
        for param, (place, shape) in zip(self.params, places, strict=True):
            param.data = self.data[place : place + shape.numel()].view(shape)


# ---- The bound on the bytes of whole gradients. ----


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes that are enough to write a unit's gradients while an equal unit's gradients are being reduced.

    sizes  bytes of the unit's buckets

    That is sum + max(largest bucket, sum / 2): twice the unit for one bucket, one and a half times the unit for several
    buckets of at most half the unit. The first of several buckets are reduced before the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


class GradPool:
    """Bounds the memory of whole gradients that are written or reduced, in the units that it was made for.

    units  of each unit the buckets, perhaps none
    """

    def __init__(self, units: "Sequence[Sequence[ShardedBucket]]") -> None:
        self._beside = {bucket: buckets for buckets in units for bucket in buckets}
        self._limit = max((pool_limit([bucket.grads.nbytes for bucket in buckets]) for buckets in units), default=0)
        self._launched: list[ShardedBucket] = []  # whose memory a reduction uses, in the order of launches

    def to_end_before(self, bucket: "ShardedBucket") -> "Sequence[ShardedBucket]":
        """Return the buckets whose reductions must end before this one takes memory, the oldest first."""
        if bucket not in self._beside:
            return ()
        written = bucket.grads.nbytes
        for other in self._beside[bucket]:
            if other is not bucket and other.grads.resident and other not in self._launched:
                written += other.grads.nbytes
        return self._launched[: num_to_end(written, [each.grads.nbytes for each in self._launched], self._limit)]

    def launched(self, bucket: "ShardedBucket") -> None:
        """A reduction uses the bucket's memory."""
        if bucket.is_pooled:
            self._launched.append(bucket)

    def ended(self, bucket: "ShardedBucket") -> None:
        """The reduction has ended, if one was launched."""
        if bucket in self._launched:
            self._launched.remove(bucket)


def num_to_end(written: int, launched: Sequence[int], limit: int) -> int:
    """Number of launched reductions, the oldest first, that must end before a bucket takes memory.

    written   bytes of the bucket, and of the buckets of its unit that have memory and are not launched. Other units
              that are still being written do not count: a wait for them might never end
    launched  bytes of each bucket whose memory a reduction uses, the oldest first
    limit     bytes that ``written`` and ``launched`` may have together
    """
    taken = written + sum(launched)
    for count, nbytes in enumerate(launched):
        if taken <= limit:
            return count
        taken -= nbytes
    return len(launched)
