"""Parts of a model that take turns in one iteration: a rank's stages of a pipeline, the chunks of a schedule.

A bucket is reduced when the last gradient of each of its parameters is in. Where a model has one backward for each
microbatch, the first one outside of ``no_sync`` is the last. Parts have a last backward each, at different times, and a
parameter of several parts (a tied embedding) is complete with the last part that has it. Who runs parts says so::

    begin      each part that takes part in this step, before the first backward
    backward   around each of its backwards; ``final``: around the last
    end        its delayed weight gradients are computed too

Whoever reduces gradients has one ``Parts``; ``parts_of`` finds them, around a part and inside of it.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from ..buckets.checks import check_nothing_bypassed
from ..contract.main_grad import record_of

if TYPE_CHECKING:
    from ..buckets.wiring import WiredParam
    from .data_parallel import DistributedDataParallel

__all__ = ["BucketParts", "Parts", "parts_of"]


class Parts(ABC):
    """The parts that one wrapper, or one model of sharded parameters, reduces the gradients of.

    A part is any object that can be referred to weakly: nothing here keeps it alive.
    """

    def __init__(self) -> None:
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, part: object, params: Iterable[nn.Parameter]) -> None:
        """``part``, which has these parameters, takes part in this step."""
        if part in self._begun or not self._open:  # a new step, whatever the one before has come to
            self._begun.clear()
            self._open.clear()
        self._begun.add(part)
        self._open.add(part)

    @abstractmethod
    def backward(self, part: object, *, final: bool) -> AbstractContextManager[None]:
        """Around a backward of ``part``. Reductions are launched in it if it is ``final``: the part's last, on a rank
        on which nobody else launches, since replicas must launch in one order."""

    @abstractmethod
    def end(self, part: object) -> None:
        """The last gradient of ``part`` is in: what no other part adds to is reduced from here on."""

    def leave(self, part: object) -> None:
        """``part`` has failed: nobody waits for it."""
        self._open.discard(part)

    def abandon(self, part: object) -> None:
        """``part`` gives up the iteration; with the last of the step's parts its gradients are thrown away."""
        self._begun.discard(part)
        if not self._begun:
            self._open.clear()
            self._abandon()

    @property
    def num_begun(self) -> int:
        """Parts of the latest step."""
        return len(self._begun)

    @property
    @abstractmethod
    def host(self) -> nn.Module:
        """Whose parts they are: it must live as long as they run."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """How many have begun; 0 where nobody counts."""

    @property
    @abstractmethod
    def is_clear(self) -> bool:
        """Whether this iteration has left no gradient so far that the next backward would add to."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is reduced."""

    @abstractmethod
    def _abandon(self) -> None:
        """Throw this iteration's gradients away."""


class BucketParts(Parts):
    """Those of a ``DistributedDataParallel``, around all of them or inside one."""

    def __init__(self, wrapper: "DistributedDataParallel") -> None:
        super().__init__()
        self._wrapper = weakref.ref(wrapper)
        self._wired = {id(wired.owned.param): wired for wired in wrapper.wired}
        self._of: weakref.WeakKeyDictionary[Any, dict[int, WiredParam]] = weakref.WeakKeyDictionary()
        for record in wrapper.records:
            record.parts = weakref.ref(self)

    @property
    def host(self) -> "DistributedDataParallel":
        """The wrapper."""
        wrapper = self._wrapper()
        assert wrapper is not None, "whoever runs parts keeps their hosts"
        return wrapper

    def begin(self, part: object, params: Iterable[nn.Parameter]) -> None:
        """See ``Parts``; and what the wrapper's own forward would check, which need not be called."""
        super().begin(part, params)
        self.host.check_before_forward()
        self._of[part] = {id(param): self._wired[id(param)] for param in params if id(param) in self._wired}

    @contextmanager
    def backward(self, part: object, *, final: bool) -> Iterator[None]:
        """See ``Parts``. In the last backward what this part completes is launched as it comes."""
        readiness = self.host.readiness
        before = readiness.sync, readiness.completes
        if final:
            readiness.completes = frozenset(id(wired.record) for wired in self._completed_by(part))
        else:
            readiness.sync = False
        try:
            yield
            if final and readiness.sync:
                readiness.complete_passed()  # modules that run by themselves tell nobody when backward ends
        finally:
            readiness.sync, readiness.completes = before

    def end(self, part: object) -> None:
        """See ``Parts``: buckets are launched in the plan's order, each with the last part that has some of it."""
        complete = self._completed_by(part)
        self._open.discard(part)
        wrapper = self.host
        if not (wrapper.ddp_config.overlap_grad_reduce and wrapper.require_backward_grad_sync):
            return
        check_nothing_bypassed([(wired.owned.param, wired.record) for wired in complete], "the end of a stage's step")
        for wired in complete:
            wrapper.readiness.complete(wired)

    @property
    def iteration(self) -> int:
        """See ``Parts``."""
        return self.host.iteration

    @property
    def is_clear(self) -> bool:
        """See ``Parts``."""
        return self.host.is_clear

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``Parts``."""
        return self.host.no_sync()

    def _abandon(self) -> None:
        self.host.abandon_iteration()

    def _completed_by(self, part: object) -> "list[WiredParam]":
        """What of ``part`` no other part has that may still add to it."""
        others = {key for other in self._open if other is not part for key in self._of[other]}
        return [wired for key, wired in self._of[part].items() if key not in others]


def parts_of(modules: Iterable[nn.Module]) -> list[Parts]:
    """Of everybody who reduces gradients of these modules' parameters. Collective the first time where some are
    sharded: their outermost unit becomes the root."""
    found: dict[Parts, None] = {}
    for module in modules:
        for inner in module.modules():
            inside: Parts | None = getattr(inner, "grad_parts", None)
            if inside is not None:
                found[inside] = None
        for param in module.parameters():
            record = record_of(param)
            around = None if record is None or record.parts is None else record.parts()
            if around is not None:
                found[around] = None
    return list(found)
