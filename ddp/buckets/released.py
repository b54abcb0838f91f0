"""Buckets of ``release_grads``: their memory is there from an iteration's first gradient to the reduction's end.

    phase       IDLE         ACCUMULATING, READY    REDUCING             REDUCED
    grad_data   no memory    sums [n]               sums [n]             no memory
    reduced     stale        stale                  being written        this rank's shard [n / s]

A bucket that takes memory first waits for all reductions under way but the latest two, so that a backward has about
three buckets in memory: one that is written, and two that are reduced. Under CUDA streams wait, and the host goes on.
Under a pipeline's schedule nothing waits: the reduction may need a stage of another rank that is behind this one.
Another rank that does not use a parameter launches its bucket at the end of its backward, unless unused parameters are
found. It never comes there if its backward needs a collective that this rank begins behind the wait.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives.streams import current_stream
from ..contract.main_grad import attach_lazily
from ..contract.record import GradRecord
from ..plan.layout import BucketLayout
from ..torch_internals import weak_method
from .bucket import Bucket, Phase
from .buffer import ReleasableBuffer

__all__ = ["NUM_UNDER_WAY", "GradPool", "ReleasedBucket"]

NUM_UNDER_WAY = 2
"""A reduction over several instances has two collectives, and one bucket's second runs beside the next one's first."""


class GradPool:
    """What the buckets of one wrapper share."""

    wait_for_all_but: Callable[[int], None]
    """Waits for the oldest reductions under way. Set by the wrapper; refers to the launcher weakly."""


class ReleasedBucket(Bucket):
    """A bucket that has memory from its first gradient of an iteration to the end of its reduction.

    memory   of ``grad_data``; the records' accumulators are views of it
    records  see ``Bucket``
    owned    the elements of which this rank keeps the sum
    pool     shared by the wrapper's buckets
    """

    def __init__(
        self,
        layout: BucketLayout,
        memory: ReleasableBuffer,
        records: list[GradRecord],
        owned: tuple[int, int],
        pool: GradPool,
    ) -> None:
        super().__init__(layout, memory.data, records)
        self.reduced = self.into = torch.zeros(owned[1] - owned[0], dtype=memory.data.dtype, device=memory.data.device)
        self._memory = memory
        self.pool = pool
        self._zeroed = super().zeroed_views()
        memory.refusal = (
            f"the memory of main_grad ({self.name}) was freed after its reduction (release_grads), and this tensor is "
            f"a view of it: read .grad, or keep a copy from before (tensor.clone())"
        )
        memory.release()
        for record in records:
            record.make_room = weak_method(self.make_room)

    def attach(self, param: Tensor, record: GradRecord) -> None:
        """See ``Bucket``. Without an attribute ``main_grad``, as under ``fully_shard``: modules ask for the memory."""
        attach_lazily(param, record)

    def zeroed_views(self) -> list[Tensor]:
        """Return nothing: memory is zeroed when it is taken."""
        return []

    def make_room(self) -> None:
        """Before a parameter's first write of an iteration, and before the reduction: give ``grad_data`` memory."""
        if self.phase in (Phase.REDUCING, Phase.REDUCED):
            return  # the write is refused
        if self._memory.resident:
            self._follow_taking()
            return
        parts = self.records[0].parts()
        if parts is not None and not parts.num_open:
            self.pool.wait_for_all_but(NUM_UNDER_WAY)
        self._memory.take()
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)

    def begin_reduction(self) -> None:
        """See ``Bucket``. A rank without a gradient in this bucket sends zeros."""
        self.make_room()
        super().begin_reduction()

    def end_reduction(self) -> None:
        """See ``Bucket``. The current stream has waited."""
        super().end_reduction()
        self._release()

    def held(self) -> list[Tensor]:
        """See ``Bucket``."""
        if self.phase is Phase.REDUCED:
            return [self.reduced]
        return [self.grad_data] if self._memory.resident else []

    def check_readable(self, caller: str) -> None:
        """See ``Bucket``: the shard is that of the iteration before until the reduction is launched."""
        if self.phase not in (Phase.REDUCING, Phase.REDUCED):
            raise RuntimeError(
                f"{caller} before the reduction: with release_grads=True, {self.name} has no sums of this rank's shard "
                f"between microbatches; call model.finish_grad_sync() after the last backward, or leave the option off"
            )

    def reset(self) -> None:
        """See ``Bucket``. Gradients that were given up free their memory."""
        self._release()
        super().reset()

    def _follow_taking(self) -> None:
        """CUDA: another stream is about to write memory that ``_memory.stream`` has taken, and perhaps zeroes."""
        taken_on = self._memory.stream
        if taken_on is not None and taken_on != (current := current_stream(taken_on.device)):
            current.wait_stream(taken_on)

    def _release(self) -> None:
        """Free the memory, which returns to the stream that has taken it: that stream waits for all that use it."""
        if not self._memory.resident:
            return
        home = self._memory.stream
        if home is not None:
            if home != (current := current_stream(home.device)):
                home.wait_stream(current)
            for raw in self.streams:  # of a reduced bucket the reduction has waited for them
                if raw != home.cuda_stream:
                    home.wait_stream(torch.cuda.ExternalStream(raw, device=home.device))
        self._memory.release()
