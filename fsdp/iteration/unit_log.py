"""``UnitLog``: notes the order in which this rank gathers and reduces units, for ``StepCheck``.

Only collectives are noted. A rank that computes alone, or whose units are gathered already, may do as it likes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from ...ddp.collectives.step_check import GroupLog, StepCheck
from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

__all__ = ["UnitLog"]


class _Place(NamedTuple):
    """A unit on one axis of its ranks."""

    log: GroupLog
    number: int
    """The unit's number in the log."""


class UnitLog:
    """The units of one model. Each group of ranks has a log of its own: ranks of other experts run other units.

    units  the outermost first
    """

    def __init__(self, units: Sequence[Unit], steps: StepCheck) -> None:
        self._inner = {unit: _place(unit, unit.grid.inner, steps) for unit in units}
        self._outer = {unit: _place(unit, unit.grid.outer, steps) for unit in units}
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}

    def record_gather(self, unit: Unit) -> None:
        """The unit's gathers are issued next."""
        if (inner := self._inner[unit]) is not None and unit.buckets:
            inner.log.record_gather(inner.number)
        outer = self._outer[unit]
        if outer is not None and any(bucket.gathers_across for bucket in unit.buckets):
            outer.log.record_gather(outer.number)

    def record_reduction(self, bucket: ShardedBucket, *, inside: bool, across: bool) -> None:
        """A reduction of the bucket's gradients is issued: inside the instance, across instances, or both."""
        unit = self._unit_of[id(bucket)]
        if inside and (inner := self._inner[unit]) is not None:
            inner.log.record_reduction(inner.number)
        if across and (outer := self._outer[unit]) is not None:
            outer.log.record_reduction(outer.number)


def _place(unit: Unit, group: dist.ProcessGroup | None, steps: StepCheck) -> _Place | None:
    log = steps.log_of(group)
    return None if log is None else _Place(log, log.add_name(unit.label))
