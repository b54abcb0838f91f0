"""Parts of a model with backwards of their own: a rank's pipeline stages, the chunks of a schedule.

A bucket is reduced when each of its parameters has its last gradient. A model without parts gets it from the first
backward outside ``no_sync``. Each part has its own last backward, at another time than other parts; a parameter of
several parts (a tied embedding) is complete with the last of these parts. The code that runs parts calls::

    begin      for each part of this step, before the first backward
    backward   around each backward of a part; with ``final`` around the part's last
    end        after the part's last backward and its last delayed weight gradient

Each wrapper, and each model of sharded parameters, has one ``Parts``. ``parts_of`` finds those around and inside of
given modules.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..buckets.checks import check_nothing_bypassed
from ..buckets.iteration_ends import record_step
from ..contract.main_grad import record_of
from ..contract.record import GradRecord

if TYPE_CHECKING:
    from ..buckets.bucket import BucketParam
    from .data_parallel import DistributedDataParallel

__all__ = ["BucketParts", "Parts", "parts_of"]


class Parts(ABC):
    """The parts whose gradients one wrapper, or one model of sharded parameters, reduces.

    A part is any object that allows weak references. ``Parts`` keeps no part alive.
    """

    def __init__(self) -> None:
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, part: object, params: Iterable[nn.Parameter]) -> None:
        """``part``, with parameters ``params``, has backwards in this step."""
        if part in self._begun or not self._open:  # a new step, even if the one before failed
            self._begun.clear()
            self._open.clear()
        self._begun.add(part)
        self._open.add(part)

    @abstractmethod
    def backward(self, part: object, *, final: bool) -> AbstractContextManager[None]:
        """A ``with`` block around a backward of ``part``.

        final  the part's last backward. Reductions are launched in it. Only where no other part on this rank launches
               at that time, since all replicas must launch in one order
        """

    @abstractmethod
    def end(self, part: object) -> None:
        """``part`` has its last gradient: launch reductions of parameters that no other open part has."""

    def leave(self, part: object) -> None:
        """``part`` has failed: other parts' parameters no longer wait for it."""
        self._open.discard(part)

    def abandon(self, part: object) -> None:
        """``part`` gives up the iteration. When all parts of the step have, the gradients are discarded."""
        self._begun.discard(part)
        if not self._begun:
            self._open.clear()
            self._abandon()

    @property
    def num_begun(self) -> int:
        """Number of parts of the latest step."""
        return len(self._begun)

    @property
    def num_open(self) -> int:
        """Number of parts of the running step that have backwards to come."""
        return len(self._open)

    @property
    @abstractmethod
    def host(self) -> Any:
        """The wrapper or model that has the parts. The caller keeps it alive while parts run."""

    @property
    def iteration(self) -> int:
        """Number of iterations begun; 0 for a host that does not count."""
        return 0

    @property
    @abstractmethod
    def is_clear(self) -> bool:
        """Whether no gradient of this iteration is in memory that the next backward would add to."""

    @abstractmethod
    def _abandon(self) -> None:
        """Discard this iteration's gradients."""


class BucketParts(Parts):
    """The parts of a ``DistributedDataParallel``. The wrapper may be around all parts, or inside of one."""

    def __init__(self, wrapper: "DistributedDataParallel") -> None:
        super().__init__()
        self._wrapper = weakref.ref(wrapper)
        self._bucket_params = {id(entry.owned.param): entry for entry in wrapper.bucket_params}
        self._of: weakref.WeakKeyDictionary[Any, dict[int, BucketParam]] = weakref.WeakKeyDictionary()
        for record in wrapper.records:
            record.parts = weakref.ref(self)

    @property
    def host(self) -> "DistributedDataParallel":
        """The wrapper."""
        wrapper = self._wrapper()
        assert wrapper is not None, "the caller keeps the host alive"
        return wrapper

    def begin(self, part: object, params: Iterable[nn.Parameter]) -> None:
        """See ``Parts``. Also does what the wrapper's forward begins with, which a part may bypass."""
        super().begin(part, params)
        self.host.begin_if_cleared()
        self.host.check_before_forward()
        self._of[part] = {
            id(param): self._bucket_params[id(param)] for param in params if id(param) in self._bucket_params
        }

    @contextmanager
    def backward(self, part: object, *, final: bool) -> Iterator[None]:
        """See ``Parts``. The last backward launches buckets as this part completes them."""
        readiness = self.host.readiness
        before = readiness.sync, readiness.completes
        if final:
            readiness.completes = frozenset(id(entry.record) for entry in self._completed_by(part))
        else:
            readiness.sync = False
        try:
            yield
            if final:
                readiness.complete_passed()  # a part's modules may run without the wrapper's forward and its hooks
        finally:
            readiness.sync, readiness.completes = before

    def end(self, part: object) -> None:
        """See ``Parts``. Buckets are launched in the plan's order, each after the last part with a parameter in it."""
        complete = self._completed_by(part)
        self._open.discard(part)
        wrapper = self.host
        if not wrapper.require_backward_grad_sync:
            return
        if wrapper.ddp_config.overlap_grad_reduce:
            own = [(entry.owned.param, entry.record) for entry in complete]
            check_nothing_bypassed(own, "the end of a stage's step")
            for entry in complete:
                wrapper.readiness.complete(entry)
        if not self._open:
            wrapper.shown.show()

    def begin_read(self) -> None:
        """A program reads gradients of the wrapper's parameters: they are reduced now, if nothing came before."""
        if self.host.shown.active:
            self.host.finish_for_optimizer("a read of gradients")

    def clear_hidden(self, records: Sequence[GradRecord]) -> None:
        """An optimizer over ``records`` clears gradients: discard those that ``.grad`` does not show.

        Raises ``RuntimeError`` where the optimizer has some of the wrapper's parameters alone.
        """
        wrapper = self.host
        if wrapper.shown.active or wrapper.is_clear:
            return
        missing = set(map(id, wrapper.records)).difference(map(id, records))
        left = next((record for record in wrapper.records if id(record) in missing and record.written), None)
        if left is not None:
            raise RuntimeError(
                f"zero_grad() after backwards under no_sync(), by an optimizer that has not all of the model's "
                f"parameters: what '{left.name}' has accumulated would stay; call model.zero_grad() to discard all"
            )
        wrapper.zero_grad_buffer()

    def refuse_slices(self, optimizer: str, records: Sequence[GradRecord]) -> None:
        """Raise ``RuntimeError`` where an optimizer that updates whole parameters has slices of them."""
        cut = self.host.slices.union(name for name, held in self.host.model_slices.items() if held.grad == "slice")
        name = next((record.name for record in records if record.name in cut), None)
        if name is not None:
            raise RuntimeError(
                f"{optimizer} updates whole parameters, and tensor-parallel ranks have slices of '{name}': use an "
                f"elementwise class of torch.optim for such parameters"
            )

    def begin_stock_step(self, found_inf: Tensor | None) -> None:
        """A stock optimizer is about to read ``.grad``. The device skips its step where ``found_inf`` is not 0."""
        self.host.prepare_stock_step()
        self.host.steps.record_update()
        record_step(self.host.module, found_inf)

    @property
    def iteration(self) -> int:
        """See ``Parts``."""
        return self.host.iteration

    @property
    def is_clear(self) -> bool:
        """See ``Parts``."""
        return self.host.is_clear

    def _abandon(self) -> None:
        self.host.abandon_iteration()

    def _completed_by(self, part: object) -> "list[BucketParam]":
        """The parameters of ``part`` that no other open part has."""
        others = {key for other in self._open if other is not part for key in self._of[other]}
        return [entry for key, entry in self._of[part].items() if key not in others]


def parts_of(modules: Iterable[nn.Module]) -> list[Parts]:
    """The ``Parts`` of every wrapper and sharded model that reduces gradients of these modules' parameters.

    With sharded parameters the first call is collective: the outermost unit becomes the root.
    """
    found: dict[Parts, None] = {}
    for module in modules:
        for inner in module.modules():
            inside: Parts | None = getattr(inner, "grad_parts", None)
            if inside is not None:
                found[inside] = None
        for param in module.parameters():
            record = record_of(param)
            around = None if record is None else record.parts()
            if around is not None:
                found[around] = None
    return list(found)
