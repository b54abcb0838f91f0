"""What our provider knows of one parameter beyond the attributes it shares with foreign consumers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["GradRecord", "PendingWgrad"]


class PendingWgrad:
    """One weight gradient that was queued and not computed yet."""

    __slots__ = ("lost", "microbatch", "owner", "part_in_grad")

    def __init__(self, owner: str, microbatch: int = -1, *, part_in_grad: bool = False) -> None:
        self.owner = owner
        """The module, for errors and records."""
        self.microbatch = microbatch
        """Given by the queue; -1 where the queue is a foreign module's."""
        self.part_in_grad = part_in_grad
        """A foreign module's backward has left something in ``.grad``, which its ``backward_dw`` will look at."""
        self.lost = False
        """Its queue was let go, and nobody will compute it."""


class GradRecord:
    """What our provider knows of one parameter in the current iteration.

    It holds no reference to the parameter: the parameter owns it.
    """

    __slots__ = (
        "__weakref__",
        "awaits_delayed",
        "bucket_index",
        "closed",
        "consumer_wrote",
        "everyone",
        "exposed",
        "first_write_overwrites",
        "foreign_delayer",
        "make_room",
        "name",
        "num_fused_writes",
        "num_hook_writes",
        "on_delayed_wgrad",
        "parts",
        "passed",
        "pending",
        "ready",
        "shared",
        "sum_in_grad",
        "updater",
        "view",
        "written",
    )

    def __init__(
        self, name: str, view: Tensor, *, first_write_overwrites: bool, shared: bool, bucket_index: int = 0
    ) -> None:
        self.name = name
        self.bucket_index = bucket_index
        """Place of its bucket in the launch order, which is the order in which a queue drains best."""
        self.view = view
        """The accumulator: shape of the parameter, a view of its bucket."""
        self.first_write_overwrites = first_write_overwrites
        """Every owner is one of our modules, so that nobody adds behind our back: never zeroed, beta = 0 first."""
        self.shared = shared
        """More than one module owns it."""
        self.everyone: Any = None
        """The grid of all ranks, for an expert that only some of them hold."""
        self.updater: object | None = None
        """Stands for the ``DistributedOptimizer`` that updates the parameter: the last that was built."""
        self.parts: Callable[[], Any] | None = None
        """Weak reference to the ``Parts`` of the ``DistributedDataParallel`` that reduces the gradient."""
        self.make_room: Callable[[], None] | None = None
        """A lazy provider's: called before a first write, when ``view`` has no memory, or has it in a collective."""

        # Delayed weight gradients.
        self.on_delayed_wgrad: Callable[[], None] | None = None
        """Called after each; set by the provider."""
        self.foreign_delayer: str | None = None
        """A module that is not ours delays this gradient and calls back after its ``backward_dw``."""
        self.pending: list[PendingWgrad] = []
        """Weight gradients that were queued and not computed yet."""
        self.awaits_delayed = False
        """All that is missing are the pending ones; reset by the bucket."""
        self.sum_in_grad = False
        """Some of a microbatch's were added to ``.grad`` and wait there for the others; a bucket may be reset then."""

        # Per iteration; reset by the bucket.
        self.written = False
        """``view`` holds a contribution of this iteration."""
        self.closed: str | None = None
        """Why nothing may be written any more (its bucket was launched or reduced); None while it may."""
        self.ready = False
        """The last contribution of the final microbatch is in."""

        # Per backward; reset by the hook.
        self.consumer_wrote = False
        """One of our modules wrote ``view`` in this backward, and therefore returned None."""
        self.passed = False
        """The hook ran, but nested in a recompute or for a shared parameter: ready when the outermost backward ends."""

        # Observed over the record's life.
        self.num_fused_writes = 0
        self.num_hook_writes = 0
        self.exposed = False
        """``.grad`` is ``view``, handed out to a stock optimizer."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"parameter '{self.name}' is wired to gradient buckets and cannot be pickled; "
            f"save state_dict(), or copy.deepcopy(model) first, which gives a plain model"
        )

    def open_for_write(self) -> bool:
        """Check that a contribution may still come in; returns whether it overwrites (beta = 0)."""
        if self.make_room is not None and (self.closed is not None or not self.written):
            self.make_room()
        if self.closed is not None:
            raise RuntimeError(f"parameter '{self.name}' received a gradient after {self.closed}")
        overwrite = self.first_write_overwrites and not self.written
        self.written = True
        return overwrite

    def delayed_wgrad_done(self, pending: PendingWgrad) -> None:
        """One of the pending weight gradients was computed."""
        self.pending.remove(pending)
        if self.on_delayed_wgrad is not None:
            self.on_delayed_wgrad()

    def forget_lost(self) -> None:
        """The iteration is given up: nobody waits for what cannot come."""
        self.pending = [pending for pending in self.pending if not pending.lost]

    def zero_unwritten(self) -> None:
        """Give a parameter that was not used in this iteration the gradient zero."""
        if self.first_write_overwrites and not self.written:
            self.view.zero_()

    def reset(self) -> None:
        """Start a new iteration."""
        self.written = self.ready = self.passed = self.awaits_delayed = False
        self.closed = None
