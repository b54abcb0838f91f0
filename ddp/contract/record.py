"""``GradRecord``: our provider's state of one parameter; and the check of accumulators that any provider gives.

A record holds what our provider knows of the parameter beyond the attributes that all providers share.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["GradRecord", "PendingWgrad", "WrittenInForward", "check_accumulator"]


class PendingWgrad:
    """One delayed weight gradient that is not computed yet."""

    def __init__(self, owner: str, *, part_in_grad: bool = False) -> None:
        self.owner = owner
        """The module that delays, for errors."""
        self.microbatch = -1
        """Number of the microbatch, set by our queue; -1 for a foreign module's queue."""
        self.part_in_grad = part_in_grad
        """A foreign module's backward left a tensor in ``.grad``, which its ``backward_dw`` will read."""
        self.lost = False
        """The queue was freed: nobody will compute this gradient."""
        self.order = (0, 0)
        """Place among all pending gradients: index of the first bucket that waits, number in order of creation."""
        self.compute: Callable[[], None] | None = None
        """Set by our queue: computes this gradient now. None for foreign modules."""


class WrittenInForward(Protocol):
    """Contributions that forwards have written: see ``te_integration/head/written_ahead.py``."""

    def before_write(self, record: "GradRecord") -> None:
        """Called before each other write. May take back what is of no use, or raise ``RuntimeError``."""

    def check_all_came(self, record: "GradRecord") -> None:
        """Raise ``RuntimeError`` where a contribution's backward has not come."""


class GradRecord:
    """Our provider's state of one parameter in the current iteration.

    The parameter owns the record; the record holds no reference to the parameter. ``reset`` ends the record's
    iteration. A unit that reduces every microbatch resets after each reduction (``GradRounds.finish_reduction``): to
    its records each microbatch is an iteration, and begins with a first write.
    """

    def __init__(
        self, name: str, view: Tensor, *, first_write_overwrites: bool, shared: bool, bucket_index: int = 0
    ) -> None:
        self.name = name
        self.bucket_index = bucket_index
        """Index of the parameter's bucket in launch order. A queue drains in this order too."""
        self.view = view
        """The accumulator ``main_grad``: the parameter's shape, a view of its bucket."""
        self.first_write_overwrites = first_write_overwrites
        """The first write of an iteration has beta = 0, and ``view`` is never zeroed before it. So every writer must
        call ``open_for_write``. Under ``DistributedDataParallel`` this is known where only our fused modules own the
        parameter. In a unit every writer does, whichever module owns it."""
        self.shared = shared
        """More than one module registers the parameter (a tied weight)."""
        self.updater: object | None = None
        """A token of the ``DistributedOptimizer`` that was built last over the parameter."""
        self.parts: Callable[[], Any] = _nothing
        """Weak reference to the ``Parts`` of the ``DistributedDataParallel`` that reduces the gradient."""
        self.make_room: Callable[[], None] | None = None
        """Set where ``view`` has memory for some time only: gives the memory before an iteration's first write."""

        self.reopen: Callable[[], None] = _nothing
        """Set by the provider: called before a write while ``view`` is closed, which it may open again."""

        # Delayed weight gradients.
        self.on_delayed_wgrad: Callable[[], None] = _nothing
        """Set by the provider: called after each delayed weight gradient."""
        self.foreign_delayer: str | None = None
        """Class name of the foreign module that delays this gradient and reports its ``backward_dw``."""
        self.pending: list[PendingWgrad] = []
        """Delayed weight gradients that are not computed yet."""
        self.awaits_delayed = False
        """Only the pending gradients are missing. ``reset`` clears this."""
        self.late_sum: Tensor | None = None
        """The sum of a microbatch's unfused delayed gradients so far. ``absorb_late_sum`` adds it to ``view``."""

        # Per iteration: ``reset`` clears them.
        self.version = view._version
        """The version of ``view`` when the iteration began: a write by the program raises it."""
        self.written = False
        """``view`` holds a contribution of this iteration."""
        self.ahead: WrittenInForward | None = None
        """Contributions that forwards of ``LinearCrossEntropy`` have written to ``view``; None: there are none."""
        self.closed: str | None = None
        """Why ``view`` is closed to writes: its bucket was launched or reduced. None while it is open."""
        self.ready = False
        """The last contribution of this iteration is in ``view``."""

        self.of_weight: Any = None
        """Cache of the quantised weight, which does not change while gradients are summed. Cleared by ``reset`` and
        ``close``."""

        # Per backward: the hook clears them.
        self.consumer_wrote = False
        """One of our modules wrote ``view`` in this backward, and so returned None to autograd."""

        # Over the record's life.
        self.num_fused_writes = 0
        self.num_hook_writes = 0
        self.exposed = False
        """``.grad`` is a plain tensor of the reduced gradient."""

    @property
    def is_of_unit(self) -> bool:
        """Whether the parameter is one of ``fully_shard``, and has memory itself for some time only."""
        return self.make_room is not None and self.parts() is None

    def __reduce__(self) -> Any:
        raise TypeError(
            f"parameter '{self.name}' is wired to gradient buckets and cannot be pickled; "
            f"save state_dict(), or copy.deepcopy(model) first, which gives a plain model"
        )

    def record_version(self) -> None:
        """Take the present content of ``view`` as not written by the program."""
        self.version = self.view._version

    def clear_touched(self) -> None:
        """Nothing was written in this iteration: zero what the program has put into ``view`` by hand."""
        if self.view._version != self.version:
            self.view.zero_()
            self.record_version()

    def open_for_write(self, *, written_already: bool = False) -> bool:
        """Call before each write to ``view``. Returns whether the write overwrites (beta = 0) or adds.

        written_already  a foreign module has written ``view``, and says so now

        Raises ``RuntimeError`` where the bucket was launched already, and before the first write of an iteration where
        the program has put values into ``view``: some modules would overwrite them, and others add to them.
        """
        if self.ahead is not None:
            self.ahead.before_write(self)
        is_empty = not (self.written or written_already or self.closed) and self.make_room is None
        # A module of others that shares the weight with ours may have written, and says so only to the hook.
        is_of_ours = self.first_write_overwrites or not self.shared
        if is_empty and is_of_ours and self.view._version != self.version:
            self._check_zero()
        if self.closed is not None and not written_already:
            self.reopen()
        if self.make_room is not None and (self.closed is not None or not self.written):
            self.make_room()
        if self.closed is not None:
            raise RuntimeError(f"parameter '{self.name}' received a gradient after {self.closed}")
        overwrite = self.first_write_overwrites and not self.written
        self.written = True
        return overwrite

    def check_all_came(self) -> None:
        """Raise ``RuntimeError`` where ``view`` holds what a forward has written, and no backward has come for."""
        if self.ahead is not None:
            self.ahead.check_all_came(self)

    def _check_zero(self) -> None:
        """Raise ``RuntimeError`` unless ``view`` holds zeros: a program may clear it by hand."""
        if self.view.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing can be read in a capture; the eager iterations before it were checked
        if self.view.any():
            raise RuntimeError(
                f"main_grad of parameter '{self.name}' was written to by hand before the iteration's first backward, "
                f"and fused layers would overwrite it: call maingrad.ddp.add_grad(param, grad) in its place"
            )

    def close(self, reason: str) -> None:
        """``view`` takes no more writes in this iteration."""
        self.closed = reason
        self.of_weight = None

    def delayed_wgrad_done(self, pending: PendingWgrad) -> None:
        """``pending`` was computed."""
        self.pending.remove(pending)
        self.on_delayed_wgrad()

    def forget_lost(self) -> None:
        """The iteration is given up: remove pending gradients that nobody can compute."""
        self.pending = [pending for pending in self.pending if not pending.lost]

    def zero(self) -> None:
        """Discard what this iteration's microbatches have summed."""
        if self.written or self.make_room is None:
            self.view.zero_()

    def zero_unwritten(self) -> None:
        """Zero ``view`` where no gradient was written in this iteration: an unused parameter."""
        if self.first_write_overwrites and not self.written:
            self.view.zero_()

    def reset(self) -> None:
        """Start a new iteration."""
        self.record_version()
        self.written = self.ready = self.awaits_delayed = False
        self.ahead = None
        self.closed = self.of_weight = None


def _nothing() -> None:
    """Do nothing: the callback of a record whose provider has set none."""


# ---- Which tensors may be an accumulator, by shape, dtype, device and strides. ----


def check_accumulator(owner: str, weight: Tensor, main_grad: Tensor, rows_apart: bool) -> None:
    """Raise ``RuntimeError`` that names shape and stride: see ``main_grad.accumulator_of``."""
    if (
        main_grad.shape != weight.shape
        or main_grad.device != weight.device
        or main_grad.dtype not in (torch.float32, weight.dtype)
        or not (_rows_fit(main_grad) if rows_apart else main_grad.is_contiguous())
    ):
        raise RuntimeError(
            f"{owner}: main_grad must {'have adjacent columns and be' if rows_apart else 'be contiguous,'} of the "
            f"weight's shape {tuple(weight.shape)} on {weight.device}, fp32 or {weight.dtype}; got shape "
            f"{tuple(main_grad.shape)}, stride {tuple(main_grad.stride())}, {main_grad.dtype} on {main_grad.device}"
        )


def _rows_fit(main_grad: Tensor) -> bool:
    """Whether columns are adjacent and no two elements share memory."""
    if main_grad.is_contiguous():
        return True
    end = 1
    for stride, size in sorted(zip(main_grad.stride(), main_grad.shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end = max(end, stride * size)
    return main_grad.stride(-1) == 1
