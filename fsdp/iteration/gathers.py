"""Gathers of units: which unit comes next; issue a gather, wait for it, free the whole parameters.

Gathers run on a stream of their own, which also owns the memory of whole parameters. Before this stream uses memory
again, it waits for the streams that have read the earlier contents.
"""

from collections.abc import Collection, Sequence

import torch

from ...ddp.buckets.buffer import Meter
from ...ddp.collectives.streams import communication_stream, current_stream
from ...ddp.collectives.timeline import UNOBSERVED, Observer
from ...ddp.gathers.gathered_models import record_gathered_model
from ..unit.unit import Unit

__all__ = ["UnitGathers"]


class UnitGathers:
    """The gathers of one model.

    units   the outermost first
    device  where the model computes
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._buckets = [bucket for unit in units for bucket in unit.buckets]
        self.observer: Observer = UNOBSERVED
        self.meter = Meter()
        """Bytes of whole parameters."""
        for bucket in self._buckets:
            bucket.whole_params.meter = self.meter
        self.stream = communication_stream(device)
        self._freed: list[torch.cuda.Event] = []  # of freed units, for which the stream has not waited yet
        # The order in which the last outermost forward, and the current one, have entered units. It predicts which unit
        # comes next. Only the time of a gather depends on the prediction: a wrong one costs a gather. All ranks predict
        # alike, because all run the same units in the same order.
        self._last_order: list[Unit] = []
        self._order: list[Unit] = []

    # ---- Which unit comes next. ----

    def forward_begins(self) -> None:
        """An outermost forward starts."""
        self._last_order, self._order = self._order, []

    def forward_enters(self, unit: Unit) -> list[Unit]:
        """A unit's forward starts. Returns the unit that followed the last time; none if the order has changed."""
        index = len(self._order)
        self._order.append(unit)
        known = index < len(self._last_order) and self._last_order[index] is unit
        return self._last_order[index + 1 : index + 2] if known else []

    def first(self, count: int) -> list[Unit]:
        """The first ``count`` units of the current or last forward, the outermost among them."""
        return self._order[:count]

    def came_last(self, unit: Unit) -> bool:
        """``unit`` is the last of both the last forward and the current one."""
        last = self._last_order
        return bool(last) and len(self._order) == len(last) and last[-1] is unit

    def begin_anew(self) -> None:
        """Ranks may differ in what is gathered and in their order: gather all units anew, and predict nothing."""
        self._last_order, self._order = [], []
        self.record_replay()

    # ---- One unit. ----

    def gather(self, unit: Unit) -> None:
        """Issue the gather of the unit's parameters, unless it was issued before and they were not freed."""
        if unit.gathered:
            return
        if self.stream is not None:
            for event in self._freed:
                self.stream.wait_event(event)
            self._freed.clear()
        unit.gathered = True
        unit.record_gather()
        # 1. and 4. Whole parameters take memory, this rank fills its part, and the all-gather brings the others.
        for bucket in unit.buckets:
            bucket.gather.start(self.stream, self.observer, fill=bucket.fill, ordered=True)

    def wait(self, unit: Unit) -> None:
        """Have the current stream (CUDA), or this thread (CPU), wait for the unit's gather."""
        for bucket in unit.buckets:
            bucket.gather.wait()

    def release(self, unit: Unit, *, was_read: bool = False) -> None:
        """Free the whole parameters, after all work of the current stream so far.

        Nothing happens for a unit that keeps whole parameters at rest, and between ``unshard()`` and ``reshard()``.
        ``was_read``: the program was given them to read (``ShardedBucket.release_params``).
        """
        if not (unit.gathered and unit.releasable) or unit.num_unshards:
            return
        self.wait(unit)
        # 3. and 6. The memory is freed for the host at once. The gathers' stream waits for ``freed`` before using it.
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.release_params(was_read=was_read)
        if unit.freed is not None:
            unit.freed.record(current_stream(self._device))
            self._freed.append(unit.freed)

    def release_all(self, but: Collection[Unit] = ()) -> None:
        """Free the whole parameters of every unit that is not in ``but``."""
        for unit in self._units:
            if unit.gathered and unit not in but:
                self.wait(unit)  # also an unused gather: it reads shards, which the optimizer changes
                self.release(unit)

    # ---- All units. ----

    def expect_step(self) -> None:
        """An iteration is over. The next forward gathers whole parameters again, even if this rank sees no change.

        On a rank whose shards are padding alone the optimizer changes nothing. That rank must gather with the others.
        """
        for bucket in self._buckets:
            if bucket.trainable:
                bucket.record_whole_changed()

    def notice_changes(self) -> None:
        """Discard gathers that are older than a change of their shards, so that the next use gathers again.

        Units between ``unshard()`` and ``reshard()`` are gathered at once.
        """
        record_gathered_model(self)
        if not any(bucket.changed for bucket in self._buckets):
            return
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self._device))
        for unit in self._units:
            if unit.gathered and any(bucket.changed for bucket in unit.buckets):
                self.wait(unit)
                self.release(unit)
                unit.gathered = False
                if unit.num_unshards:
                    self.gather(unit)
                    self.wait(unit)

    # ---- Captures: the methods of ``GatheredModel``. ----

    def finish(self) -> None:
        """Wait for the gathers under way."""
        for unit in self._units:
            self.wait(unit)

    def begin_capture(self) -> None:
        """Free all whole parameters; the captured forwards gather each anew."""
        self.release_all()
        self.record_replay()
        self._freed.clear()  # the capture begins when all work is done

    def end_capture(self) -> None:
        """Forget the events of the capture: it has not run."""
        for bucket in self._buckets:
            bucket.gather.forget_capture()
        self.begin_capture()

    def record_replay(self) -> None:
        """The shards may have new values, on all ranks alike, as after a captured iteration that was replayed."""
        for bucket in self._buckets:
            bucket.record_change()
