"""A bucket at run time: its phase, its ready parameters, and the memory that is reduced as one."""

import enum
from collections.abc import Callable, Iterable
from functools import cached_property

from torch import Tensor

from ..collectives.in_flight import InFlight
from ..collectives.reduction import GradReduction
from ..contract.main_grad import attach
from ..contract.record import GradRecord
from ..plan.layout import BucketLayout

__all__ = ["Bucket", "Phase", "check_nothing_under_way"]


class Phase(enum.Enum):
    """The state of a bucket in the current iteration."""

    IDLE = "idle"
    """No gradient was written."""
    ACCUMULATING = "accumulating"
    """Some contributions are written."""
    READY = "ready"
    """The last contribution of every parameter is written."""
    REDUCING = "reducing"
    """The reduction was launched and owns the memory."""
    REDUCED = "reduced"
    """The optimizer may read the gradients; nothing may write them before the next iteration."""

    __hash__ = object.__hash__  # the enum's own hash runs Python code, twice for each change of phase


_MOVES = {
    Phase.IDLE: {Phase.ACCUMULATING, Phase.READY, Phase.REDUCING},
    Phase.ACCUMULATING: {Phase.READY, Phase.REDUCING, Phase.IDLE},
    Phase.READY: {Phase.REDUCING, Phase.IDLE},
    Phase.REDUCING: {Phase.REDUCED},
    Phase.REDUCED: {Phase.IDLE},
}


class Bucket:
    """One bucket of gradients, and the only place where its phase changes.

    grad_data  [layout.numel]
    records    of the parameters, in the order of the layout's slots
    owned      [start, end) of the elements whose sum this rank gets from the reduction; None: all
    """

    def __init__(
        self,
        layout: BucketLayout,
        grad_data: Tensor,
        records: list[GradRecord],
        owned: tuple[int, int] | None = None,
    ) -> None:
        self.layout = layout
        self.grad_data = grad_data
        """[layout.numel] accumulators of all parameters, and padding, which is zero when an iteration begins."""
        self.reduced = grad_data[slice(*owned)] if owned else grad_data
        """[owned] this rank's part of the sum over ranks, once the bucket is reduced."""
        self.records = tuple(records)
        self.streams: set[int] = set()
        """Raw CUDA streams on which contributions of this iteration were written; empty on other devices."""
        self.idle = True
        """Whether the phase is ``IDLE``. The hook of every parameter reads this: 0.02 us, where ``phase is Phase.IDLE``
        takes 0.3 us, in a hook that takes 0.7 us as a whole (Python 3.11)."""
        self._num_ready = 0
        self._phase = Phase.IDLE

    @property
    def index(self) -> int:
        """The bucket's place in the launch order."""
        return self.layout.index

    @cached_property
    def name(self) -> str:
        """Index, first and last parameter: for errors and profiler labels."""
        first, last = self.records[0].name, self.records[-1].name
        return f"bucket {self.index} ({first})" if first == last else f"bucket {self.index} ({first} .. {last})"

    def attach(self, param: Tensor, record: GradRecord) -> None:
        """Give a parameter of the bucket its accumulator."""
        attach(param, record)

    def zeroed_views(self) -> list[Tensor]:
        """Views of the elements that are zeroed before an iteration: all but those that a first write overwrites."""
        views = [record.view for record in self.records if not record.first_write_overwrites]
        # Padding must be zeroed too: clipping multiplies whole buckets, and a NaN would stay in the padding forever.
        return views + self._padding_views()

    def _padding_views(self) -> list[Tensor]:
        """Views of the elements of ``grad_data`` that belong to no parameter."""
        views, position = [], self.layout.start
        for start, end in [*sorted(slot.range for slot in self.layout.slots), (self.layout.end, self.layout.end)]:
            if position < start:
                views.append(self.grad_data[position - self.layout.start : start - self.layout.start])
            position = end
        return views

    @property
    def phase(self) -> Phase:
        """Current phase."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase not in _MOVES[self._phase]:
            raise RuntimeError(f"{self.name} cannot go from {self._phase.value} to {phase.value}")
        self._phase = phase
        self.idle = phase is Phase.IDLE
        if phase is Phase.REDUCING:
            self._close(
                "was launched: run earlier backwards under no_sync() (and zero_grad() after one whose gradients nobody "
                "wants: an attack's, a generator's through its discriminator), use non-reentrant recompute, and with "
                "find_unused_parameters return from forward all that the loss uses"
            )
        elif phase is Phase.REDUCED:
            self._close(
                "was reduced: run earlier backwards of an iteration under no_sync(), and call model.zero_grad() before "
                "the next iteration's"
            )

    @property
    def is_clear(self) -> bool:
        """Whether nothing was written, not even by a failed backward before its first hook (the phase is IDLE then)."""
        return self.idle and not any(record.written for record in self.records)

    def mark_ready(self, record: GradRecord) -> None:
        """Note that the parameter's last contribution is written. With its last parameter the bucket is ready."""
        if record.ready:
            return
        record.ready = True
        self._num_ready += 1  # step 5 of docs/by_hand.py
        if self._num_ready == len(self.records):
            self.phase = Phase.READY

    def begin_reduction(self) -> None:
        """The reduction is launched, and owns the memory."""
        for record in self.records:
            record.check_all_came()
        self.phase = Phase.REDUCING

    def end_reduction(self) -> None:
        """The reduction was waited for."""
        self.phase = Phase.REDUCED

    def start_of(self, reduction: GradReduction) -> Callable[[Tensor], InFlight]:
        """What starts this bucket's reduction, and takes ``grad_data``."""
        return reduction.start

    def held(self) -> list[Tensor]:
        """The tensors that hold what is summed so far, or reduced."""
        return [self.grad_data]

    def check_readable(self, caller: str) -> None:
        """Raise ``RuntimeError`` while ``reduced`` holds neither this iteration's local sums nor their reduction."""

    def reset(self) -> None:
        """Start a new iteration."""
        if self._phase is not Phase.IDLE:
            self.phase = Phase.IDLE
        self._num_ready = 0
        self.streams.clear()
        for record in self.records:
            record.reset()

    def _close(self, reason: str) -> None:
        closed = f"{self.name} {reason}"
        for record in self.records:
            record.close(closed)


def check_nothing_under_way(buckets: Iterable[Bucket]) -> None:
    """Raise ``RuntimeError`` while a reduction owns a bucket's memory."""
    for bucket in buckets:
        if bucket.phase is Phase.REDUCING:
            raise RuntimeError(
                f"{bucket.name} is still being reduced: call model.finish_grad_sync() after the last backward of an "
                f"iteration, or abandon_iteration() on all ranks after one that has failed. A backward whose gradients "
                f"are not wanted (an attack's, a generator's through its discriminator) runs under no_sync() of this "
                f"model"
            )
