"""One weight gradient that waits for its turn."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .grad_record import GradRecord, PendingWgrad

__all__ = ["DelayedWgrad"]

_sequence = itertools.count()


class DelayedWgrad:
    """``dy`` [T, N] and ``x`` [T, K] of one weight use, and how to write their product. The weight is held weakly.

    It owns its tensors until the product is done. It may run on another CUDA stream than the backward that made it: the
    stream is looked up when it runs, and waits for the one on which the tensors were made. ``write(dy, x, backward,
    last)`` is told of which backward it is, and whether this is the weight's last one of its microbatch.
    """

    __slots__ = (
        "_done",
        "_operands",
        "_producer",
        "_record",
        "_versions",
        "_write",
        "backward",
        "bucket_index",
        "pending",
        "sequence",
        "serves",
    )

    def __init__(
        self,
        write: Callable[[Tensor, Tensor, int, bool], None],
        dy: Tensor,
        x: Tensor,
        record: GradRecord | None,
        owner: str,
        backward: int,
        serves: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self._write = write
        self._operands: tuple[Tensor, Tensor] | None = (dy, x)
        self._versions = (dy._version, x._version)
        self._record = record
        self._producer = torch.cuda.current_stream(dy.device) if dy.is_cuda else None
        self._done: torch.cuda.Event | None = None
        self.backward = backward
        """Graph task that it belongs to."""
        self.pending = PendingWgrad(owner)
        """Whose it is, and of which microbatch."""
        self.bucket_index = 0 if record is None else record.bucket_index
        """Place of the weight's bucket in the launch order."""
        self.serves = serves
        """Whether it is a gradient of this weight."""
        self.sequence = next(_sequence)
        """Later entries have larger ones, whatever their queue: uses of one weight are added in this order."""
        if record is not None:
            record.pending.append(self.pending)

    @torch.no_grad()
    def run(self) -> None:
        """Write the product, and tell the provider."""
        if self._operands is None:
            raise RuntimeError(f"{self.pending.owner}: this delayed weight gradient was computed or dropped already")
        dy, x = self._operands
        if (dy._version, x._version) != self._versions:
            raise RuntimeError(
                f"{self.pending.owner}: the input or the output gradient of a delayed weight gradient was changed in "
                f"place before it was computed (an input buffer that was filled again?); call backward_dw() or drain() "
                f"first, or clear() the queue to give it up"
            )
        last = self._record is None or not any(
            other is not self.pending and other.microbatch == self.pending.microbatch for other in self._record.pending
        )
        current = None if self._producer is None else torch.cuda.current_stream(dy.device)
        if current == self._producer:
            self._write(dy, x, self.backward, last)
            self._operands = None
        else:
            assert current is not None and self._producer is not None, "both are streams, or both are None"
            current.wait_stream(self._producer)
            self._write(dy, x, self.backward, last)
            # Freed now, this memory would go to the producer's next kernels: whoever holds the entry frees it later.
            self._done = torch.cuda.Event()
            self._done.record(current)
        if self._record is not None:
            self._record.delayed_wgrad_done(self.pending)

    def drop(self) -> None:
        """Give the gradient up, in an iteration that is abandoned."""
        self._operands = None
        if self._record is not None:
            self._record.pending.remove(self.pending)

    @property
    def in_use(self) -> bool:
        """Whether another stream still reads the tensors after ``run``."""
        return self._done is not None and not self._done.query()
