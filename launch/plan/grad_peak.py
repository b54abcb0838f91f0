"""Peak bytes of whole gradients in a fully sharded run: replays ``fsdp/iteration/grad_pool.py`` with sizes only.

The contents of the pool depend only on the order in which backward reaches buckets: a finished reduction keeps its
memory until another bucket needs it. The result is therefore exact, not only a bound.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ...ddp.contract.module import DelayedWgradModule
from ...fsdp.iteration.grad_pool import pool_limit
from .unit_bytes import PlacedBucket

__all__ = ["peak_of_grads"]

MICROBATCHES = 3
"""Replayed at most: the second finds what the first has left under way, and then they repeat."""


def peak_of_grads(
    model: nn.Module, units: Mapping[str, Sequence[PlacedBucket]], *, num_microbatches: int, reduces_once: bool
) -> int:
    """Bytes of whole gradients.

    model        with its parameters registered in the order in which a forward uses them; they may be on meta
    units        buckets of each unit by the unit's name, the outermost first
    reduces_once  whole gradients stay from one microbatch to the next
    """
    buckets = {_Key(unit, index): bucket for unit, found in units.items() for index, bucket in enumerate(found)}
    keeps = any(bucket.keeps_grads for bucket in buckets.values())
    if keeps or (reduces_once and num_microbatches > 1):
        return sum(bucket.grad_nbytes for bucket in buckets.values())
    pool = _Pool({unit: [bucket.grad_nbytes for bucket in found] for unit, found in units.items()})
    num_replayed = min(num_microbatches, MICROBATCHES)
    for microbatch in range(num_replayed):
        for written, launched, kept in _backward(model, buckets, final=microbatch == num_replayed - 1):
            pool.write(written)
            pool.launch(launched, kept=kept)
    return pool.peak


class _Key(NamedTuple):
    """One bucket."""

    unit: str
    place: int
    """In the unit."""


class _Step(NamedTuple):
    """One module's part of a backward."""

    written: Sequence[_Key]
    launched: Sequence[_Key]
    """Afterwards."""
    kept: bool = False
    """Those have stayed since an earlier microbatch."""


def _backward(model: nn.Module, buckets: Mapping[_Key, PlacedBucket], *, final: bool) -> Iterator[_Step]:
    """Modules from the last to the first, then delayed weight gradients, unit by unit: these stay until the last
    microbatch, which reduces them."""
    key_of = {
        f"{key.unit}.{slot.spec.name}".removeprefix("."): key
        for key, bucket in buckets.items()
        for slot in bucket.layout.slots
    }
    names = {id(param): name for name, param in model.named_parameters()}
    delayed = [key for key, bucket in buckets.items() if bucket.layout.delayed]
    for path, module in reversed(list(model.named_modules())):
        later = module.delayed_wgrad_weights() if isinstance(module, DelayedWgradModule) else ()
        written = [
            key_of[names[id(param)]]
            for name, param in module._parameters.items()
            if param is not None and name not in later
        ]
        passed = [key for key in buckets if key.unit == path and key not in delayed]
        yield _Step(list(dict.fromkeys(reversed(written))), passed)
    for unit in reversed(list(dict.fromkeys(key.unit for key in buckets))):
        later_here = [key for key in delayed if key.unit == unit]
        yield from (_Step([key], []) for key in later_here)
        if final:
            yield _Step([], later_here, kept=True)


class _Pool:
    """``GradRounds``, as far as it takes and returns memory.

    units  bytes of each unit's buckets, the outermost first
    """

    def __init__(self, units: Mapping[str, Sequence[int]]) -> None:
        self._nbytes = {
            _Key(unit, index): nbytes for unit, found in units.items() for index, nbytes in enumerate(found)
        }
        self._outermost, *inside = units
        self._limit = max((pool_limit(units[unit]) for unit in inside), default=0)
        self._written: list[_Key] = []
        self._launched: list[_Key] = []
        self.peak = 0

    def write(self, buckets: Sequence[_Key]) -> None:
        """One module's gradients are written, into buckets of one unit."""
        fresh = [bucket for bucket in buckets if bucket not in self._written]
        if not fresh:
            return
        unit = fresh[0].unit
        limit = math.inf if unit == self._outermost else self._limit
        own = self._sum(written for written in self._written if written.unit == unit)
        others = self._sum(self._written) - own
        if len(fresh) > 1:  # a module writes its weights in an order of its own: this is the most of any
            taken = own + self._sum({*self._launched, *fresh})
            self._note(others + (taken if unit == self._outermost else min(self._limit, taken)))
        for bucket in fresh:
            if bucket in self._launched:
                self._launched.remove(bucket)
            own += self._nbytes[bucket]
            while self._launched and own + self._sum(self._launched) > limit:
                self._launched.pop(0)
            self._written.append(bucket)
            self._note(others + own + self._sum(self._launched))

    def launch(self, buckets: Sequence[_Key], *, kept: bool = False) -> None:
        """They are reduced from now on; ``kept``: their memory comes into the pool with that."""
        for bucket in buckets:
            self.write([bucket])  # where nobody has written, zeros are sent
            if kept and bucket.unit != self._outermost:
                own = self._sum(written for written in self._written if written.unit == bucket.unit)
                while self._launched and own + self._sum(self._launched) > self._limit:
                    self._launched.pop(0)
            self._written.remove(bucket)
            self._launched.append(bucket)

    def _sum(self, buckets: Iterable[_Key]) -> int:
        return sum(self._nbytes[bucket] for bucket in buckets)

    def _note(self, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes)
