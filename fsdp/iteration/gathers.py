"""Which units' whole parameters are in memory: gathers, the waits for them, and letting go.

Gathers run on a stream of their own, which also owns the memory that they fill: before memory is used again, it waits
for those that read what was there before.
"""

from collections.abc import Collection, Sequence

import torch

from ...ddp.collectives.mapped_memory import MappedPool
from ...ddp.collectives.observer import UNOBSERVED, Observer
from ...ddp.collectives.streams import OnStream, current_stream
from ..unit.bucket import ShardedBucket
from ..unit.memory import Meter
from ..unit.unit import Unit

__all__ = ["UnitGathers"]


class UnitGathers:
    """The gathers of one model.

    units  the outermost first
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._buckets = [bucket for unit in units for bucket in unit.buckets]
        self.observer: Observer = UNOBSERVED
        self.meter = Meter()
        """Memory of whole parameters."""
        for bucket in self._buckets:
            bucket.gathered.meter = self.meter
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._freed: list[torch.cuda.Event] = []  # after which gathers may reuse memory, not waited for yet

    def gather(self, unit: Unit) -> None:
        """Issue the gather of a unit's parameters, unless they are there."""
        if unit.gathered:
            return
        if self.stream is not None:
            for event in self._freed:
                self.stream.wait_event(event)
            self._freed.clear()
        unit.gathered = True
        for bucket in unit.buckets:
            bucket.start_gather(self.stream, self.observer)

    def arrive(self, unit: Unit) -> None:
        """Have the current stream (CUDA), or this thread, wait for the gather."""
        for bucket in unit.buckets:
            if bucket.gather is not None:
                bucket.gather.arrive()

    def release(self, unit: Unit) -> None:
        """Let the whole parameters go, after what the current stream has been given so far."""
        if not (unit.gathered and unit.releasable) or unit.num_unshards:
            return
        self.arrive(unit)
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.forget_params()
        if unit.freed is not None:
            unit.freed.record(current_stream(self._device))
            self._freed.append(unit.freed)

    def release_all(self, but: Collection[Unit] = ()) -> None:
        """Let go of every other unit."""
        for unit in self._units:
            if unit not in but:
                self.arrive(unit)  # also where nobody came to use it: the optimizer changes what a gather reads
                self.release(unit)

    def expect_step(self) -> None:
        """An iteration is over. What stays gathered is gathered anew by the next forward, whether this rank has seen a
        change or not: a rank whose shards are padding alone may have nothing that an optimizer changes."""
        for bucket in self._buckets:
            if bucket.trainable:
                bucket.note_whole_changed()

    def notice_changes(self) -> None:
        """Shards that were changed since they were gathered are gathered anew, after whatever changed them."""
        if not any(bucket.changed for bucket in self._buckets):
            return
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self._device))
        for unit in self._units:
            if unit.gathered and any(bucket.changed for bucket in unit.buckets):
                self.arrive(unit)
                self.release(unit)
                unit.gathered = False
                if unit.num_unshards:
                    self.gather(unit)
                    self.arrive(unit)

    def map_memory(self, num_units: int) -> None:
        """Reserve, in memory that copy engines reach, what is gathered at once; units take turns in it.

        num_units  beside the outermost

        Memory that is freed in a pool is cut anew for what comes next, and all ranks take and free in one order.
        """
        assert self.stream is not None, "only on CUDA"
        by_group: dict[int, list[ShardedBucket]] = {}
        for bucket in self._buckets:
            if bucket.reduction.grid.inner_size > 1:
                by_group.setdefault(id(bucket.reduction.grid.gather), []).append(bucket)
        for buckets in by_group.values():
            gather = buckets[0].reduction.grid.gather
            assert gather is not None, "a group of more than one rank"
            pool = MappedPool(gather, self._device)
            sizes = [
                sum(_rounded(bucket.gathered.nbytes) for bucket in unit.buckets if bucket in buckets)
                for unit in self._units
            ]
            if not buckets[0].whole_params_at_rest:
                sizes = [sizes[0], *sorted(sizes[1:], reverse=True)[:num_units]]
            with OnStream(self.stream):
                with pool.allocating():
                    reserved = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                pool.share()
                del reserved
            for bucket in buckets:
                bucket.gathered.pool = pool


def _rounded(nbytes: int) -> int:
    """What the caching allocator makes of it."""
    return -(-nbytes // 2**21) * 2**21
