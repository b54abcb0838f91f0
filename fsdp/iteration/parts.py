"""Sharded models whose parts run by turns: stages or chunks of a pipeline schedule, each with units of its own.

``FSDPModule.no_sync`` asks here too, so that one file says which backward is an iteration's last.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from torch import nn

from ...ddp.wrapper.parts import Parts

if TYPE_CHECKING:
    from .root import Root

__all__ = ["RootParts"]


class RootParts(Parts):
    """The parts of one outermost unit: its module, or modules in it that a schedule runs by themselves."""

    def __init__(self, root: "Root") -> None:
        super().__init__()
        self._root = weakref.ref(root)

    @property
    def root(self) -> "Root":
        """The root of the units."""
        root = self._root()
        assert root is not None, "the schedule keeps the module alive"
        return root

    @property
    def host(self) -> nn.Module:
        """The outermost unit's module."""
        module = self.root.module()
        assert module is not None, "the schedule keeps the module alive"
        return module

    def backward(self, part: object, *, final: bool) -> AbstractContextManager[None]:
        """See ``Parts``. Units are sent when a backward passes them. So only the last open part's backward is final."""
        return self._syncing(self.root.sync and final and list(self._open) == [part])

    def end(self, part: object) -> None:
        """See ``Parts``. The end of the last open part sends all remaining gradients."""
        self._open.discard(part)
        if not self._open and self.root.sync:
            self.root.grads.finish_grad_sync(wait=False)

    @property
    def is_clear(self) -> bool:
        """See ``Parts``. ``.grad`` of earlier iterations does not count: the user may keep it."""
        return self.root.grads.is_clear

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``Parts``."""
        return self._syncing(False)

    @contextmanager
    def _syncing(self, sync: bool) -> Iterator[None]:
        """Say whether backwards in this block are an iteration's last, and reduce over all ranks."""
        root = self.root
        before, root.sync = root.sync, sync
        try:
            yield
        finally:
            root.sync = before

    def _abandon(self) -> None:
        root = self.root
        root.abandon()
        for bucket in root.buckets:
            for pair in bucket.pairs:
                pair.sharded.grad = None  # it contains sums of some microbatches
