"""A bucket at run time: its phase, its ready parameters, and the memory that is reduced as one."""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.main_grad import attach
from ..contract.record import GradRecord
from ..plan.layout import BucketLayout, ParamSlot
from ..plan.owned_params import OwnedParam

__all__ = ["Bucket", "BucketParam", "Phase"]


class Phase(enum.Enum):
    """The state of a bucket in the current iteration."""

    IDLE = "idle"
    """No gradient was written."""
    ACCUMULATING = "accumulating"
    """Some contributions are written, or, where they are delayed, queued."""
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

    into: Tensor | None = None
    """Memory of its own for the sum of the elements that this rank owns; None: the sum stays in ``grad_data``."""

    def __init__(
        self,
        layout: BucketLayout,
        grad_data: Tensor,
        records: list[GradRecord],
        owned: tuple[int, int] | None = None,
    ) -> None:
        self.layout = layout
        self.index = layout.index
        """The bucket's place in the launch order."""
        first, last = records[0].name, records[-1].name
        self.name = f"bucket {self.index} ({first})" if first == last else f"bucket {self.index} ({first} .. {last})"
        self.grad_data = grad_data
        """[layout.numel] accumulators of all parameters, and padding, which is zero when an iteration begins."""
        self.reduced = grad_data[slice(*owned)] if owned else grad_data
        """[owned] this rank's part of the sum over ranks, once the bucket is reduced."""
        self.carried: Tensor | None = None
        """[owned] what an earlier reduction of this iteration gave: the next one adds to it."""
        self.records = tuple(records)
        self.streams: set[int] = set()
        """Raw CUDA streams on which contributions of this iteration were written; empty on other devices."""
        self.idle = True
        """Whether the phase is ``IDLE``. The hook of every parameter reads this: 0.02 us, where ``phase is Phase.IDLE``
        takes 0.3 us, in a hook that takes 0.7 us as a whole (Python 3.11)."""
        self._num_ready = 0
        self._phase = Phase.IDLE

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
        used = sorted(slot.range.counted_from(self.layout.start) for slot in self.layout.slots)
        begins, ends = [0, *(end for _, end in used)], [*(start for start, _ in used), self.layout.numel]
        return [self.grad_data[begin:end] for begin, end in zip(begins, ends, strict=True) if begin < end]

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

    @property
    def is_clear(self) -> bool:
        """Whether nothing was written, not even by a failed backward before its first hook (the phase is IDLE then)."""
        return self.idle and not any(record.written for record in self.records)

    def mark_ready(self, record: GradRecord) -> None:
        """Note that the parameter's last contribution is written. With its last parameter the bucket is ready."""
        if record.ready:
            return
        record.ready = True
        self._num_ready += 1
        if self._num_ready == len(self.records):
            self.phase = Phase.READY

    def begin_reduction(self) -> None:
        """The reduction is launched, and owns the memory."""
        for record in self.records:
            record.check_all_came()
        self.phase = Phase.REDUCING
        self._close(
            "was launched: run earlier backwards under no_sync() (and zero_grad() after one whose gradients nobody "
            "wants: an attack's, a generator's through its discriminator), use non-reentrant recompute, and with "
            "find_unused_parameters return from forward all that the loss uses"
        )

    def end_reduction(self) -> None:
        """The reduction was waited for."""
        self.phase = Phase.REDUCED
        self._close(
            "was reduced: run earlier backwards of an iteration under no_sync(), and call model.zero_grad() before "
            "the next iteration's"
        )
        if self.carried is not None:
            self.reduced.add_(self.carried)
            self.carried = None

    def _close(self, reason: str) -> None:
        closed = f"{self.name} {reason}"
        for record in self.records:
            record.close(closed)

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
        self.carried = None
        self.streams.clear()
        for record in self.records:
            record.reset()


class BucketParam(NamedTuple):
    """A parameter with its record and its bucket, as the parameter was when the model was wrapped."""

    owned: OwnedParam
    record: GradRecord
    bucket: Bucket
    slot: ParamSlot
    """Where the parameter lies in its buffer."""
    dtype: torch.dtype
    device: torch.device
