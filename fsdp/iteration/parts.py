"""Sharded models whose parts take turns: stages of a pipeline or chunks of a schedule, each with units of its own."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from ...ddp.wrapper.parts import Parts

if TYPE_CHECKING:
    from .root import Root

__all__ = ["RootParts"]


class RootParts(Parts):
    """Those of one outermost unit: the module itself, or modules in it that run by themselves."""

    def __init__(self, root: "Root") -> None:
        super().__init__()
        self._root = weakref.ref(root)

    @property
    def root(self) -> "Root":
        """Of the units."""
        root = self._root()
        assert root is not None, "whoever runs parts keeps their hosts"
        return root

    @property
    def host(self) -> nn.Module:
        """The outermost unit's module."""
        module = self.root.module()
        assert module is not None, "whoever runs parts keeps their hosts"
        return module

    @contextmanager
    def backward(self, part: object, *, final: bool) -> Iterator[None]:
        """See ``Parts``. Units are reduced as a backward passes them, so that only the last part's is final."""
        root = self.root
        before = root.sync
        root.sync = before and final and list(self._open) == [part]
        try:
            yield
        finally:
            root.sync = before

    def end(self, part: object) -> None:
        """See ``Parts``: with the last part everything that is left is sent."""
        self._open.discard(part)
        if not self._open and self.root.sync:
            self.root.grads.start_grad_sync()

    @property
    def iteration(self) -> int:
        """See ``Parts``: nobody counts."""
        return 0

    @property
    def is_clear(self) -> bool:
        """See ``Parts``. ``.grad`` of iterations that are over is the user's to keep."""
        return self.root.grads.is_clear

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``Parts``."""
        root = self.root
        before, root.sync = root.sync, False
        try:
            yield
        finally:
            root.sync = before

    def _abandon(self) -> None:
        root = self.root
        root.abandon()
        for bucket in root.buckets:
            for pair in bucket.pairs:
                pair.sharded.grad = None  # what some microbatches have brought is in it
