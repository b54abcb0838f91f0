"""Peak bytes of whole gradients where they are freed: asks ``fsdp/unit/plan.py`` with sizes only.

The contents of the pool depend only on the order in which backward reaches buckets: a finished reduction keeps its
memory until another bucket needs it. The result is therefore exact, not only a bound.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ...ddp.buckets.released import NUM_UNDER_WAY
from ...ddp.contract.module import DelayedWgradModule
from ...fsdp.unit.plan import num_to_end, pool_limit
from .rank_bytes import PlacedBucket
from .units import PlacedUnit

__all__ = ["peak_of_grads", "peak_of_released"]

MICROBATCHES = 3
"""Replayed at most: the second finds what the first has left under way, and then they repeat."""


def peak_of_grads(model: nn.Module, units: Sequence[PlacedUnit], *, num_microbatches: int, reduces_once: bool) -> int:
    """Bytes of whole gradients.

    model         with its parameters registered in the order in which a forward uses them; they may be on meta
    units         the outermost first
    reduces_once  whole gradients stay from one microbatch to the next
    """
    if units[0].buckets[0].keeps_grads or (reduces_once and num_microbatches > 1):
        return sum(unit.grad_nbytes for unit in units)
    replay = _Replay(units)
    num_replayed = min(num_microbatches, MICROBATCHES)
    for microbatch in range(num_replayed):
        replay.backward(model, final=microbatch == num_replayed - 1)
    return replay.peak


def peak_of_released(
    model: nn.Module, buckets: Sequence[PlacedBucket], *, num_microbatches: int, overlaps: bool
) -> int:
    """Bytes of gradients that are not reduced, under ``release_grads``.

    model     with its parameters registered in the order in which a forward uses them; they may be on meta
    buckets   in launch order
    overlaps  ``overlap_grad_reduce``: else no bucket is reduced before the step
    """
    if not overlaps or num_microbatches > 1:
        return sum(bucket.grad_nbytes for bucket in buckets)
    bucket_of = {slot.spec.name: bucket for bucket in buckets for slot in bucket.layout.slots}
    _, now, delayed = zip(*_written(model), strict=True)
    left = Counter(name for written in now + delayed for name in written)
    held: list[PlacedBucket] = []
    launched: list[PlacedBucket] = []
    peak = 0
    for written in now + delayed:  # a fused module writes all of its gradients before the first hook runs
        for name in written:
            if bucket_of[name] not in held:
                ended = launched[:-NUM_UNDER_WAY]
                held = [bucket for bucket in held if bucket not in ended] + [bucket_of[name]]
                peak = max(peak, sum(bucket.grad_nbytes for bucket in held))
        # A parameter of several modules is ready when the backward has ended, but no bucket opens after it.
        left.subtract(written)
        while len(launched) < len(buckets) and not any(left[s.spec.name] for s in buckets[len(launched)].layout.slots):
            launched.append(buckets[len(launched)])
    return peak


def _written(model: nn.Module) -> Iterator[tuple[str, list[str], list[str]]]:
    """Modules in the order of a backward: path, parameters with gradients of the backward, and with delayed ones."""
    names = {id(param): name for name, param in model.named_parameters()}
    for path, module in reversed(list(model.named_modules())):
        later = module.delayed_wgrad_weights() if isinstance(module, DelayedWgradModule) else ()
        own = [(key, param) for key, param in module._parameters.items() if param is not None and param.requires_grad]
        own.reverse()
        now = [names[id(param)] for key, param in own if key not in later]
        yield path, now, [names[id(param)] for key, param in own if key in later]


class _Bucket:
    """A ``ShardedBucket``, as far as it takes and returns memory of whole gradients."""

    def __init__(self, unit: str, placed: PlacedBucket) -> None:
        self.unit, self.layout, self.nbytes = unit, placed.layout, placed.grad_nbytes
        self.resident = False


class _Replay:
    """``GradRounds``, as far as it takes and returns memory.

    units  the outermost first
    """

    def __init__(self, units: Sequence[PlacedUnit]) -> None:
        self._units = {unit.name: [_Bucket(unit.name, placed) for placed in unit.buckets] for unit in units}
        self._buckets = [bucket for found in self._units.values() for bucket in found]
        self._outermost, *inside = self._units
        sizes = [[bucket.nbytes for bucket in self._units[unit]] for unit in inside]
        self._limit = max(map(pool_limit, sizes), default=0)
        self._launched: list[_Bucket] = []
        self.peak = 0

    def backward(self, model: nn.Module, *, final: bool) -> None:
        """Modules from the last to the first, then delayed weight gradients, unit by unit: these stay until the last
        microbatch, which reduces them."""
        bucket_of = {
            f"{bucket.unit}.{slot.spec.name}".removeprefix("."): bucket
            for bucket in self._buckets
            for slot in bucket.layout.slots
        }
        for path, now, _ in _written(model):
            self._write_module([bucket_of[name] for name in now])
            for bucket in self._units.get(path, ()):
                if not bucket.layout.delayed:
                    self._launch(bucket)
        for found in reversed(self._units.values()):
            delayed = [bucket for bucket in found if bucket.layout.delayed]
            for bucket in delayed:
                self._write(bucket)
            for bucket in delayed if final else ():
                self._launch(bucket, kept=True)

    def _write_module(self, buckets: Sequence[_Bucket]) -> None:
        """One module's gradients are written, into buckets of one unit."""
        fresh = {bucket for bucket in buckets if not bucket.resident or bucket in self._launched}
        if len(fresh) > 1:  # a module writes its weights in an order of its own: this is the most of any
            most, unit = _held(fresh.union(self._resident)), buckets[0].unit
            others = _held(each for each in self._resident if each.unit != unit and each not in self._launched)
            self.peak = max(self.peak, most if unit == self._outermost else min(most, others + self._limit))
        for bucket in buckets:
            self._write(bucket)

    def _write(self, bucket: _Bucket) -> None:
        self._settle(bucket)
        if not bucket.resident:
            self._make_room(bucket)
            bucket.resident = True
            self.peak = max(self.peak, _held(self._resident))

    def _launch(self, bucket: _Bucket, *, kept: bool = False) -> None:
        """It is reduced from now on; ``kept``: its memory comes into the pool with that."""
        self._write(bucket)  # where nobody has written, zeros are sent
        if kept:
            self._make_room(bucket)
        self._launched.append(bucket)

    def _make_room(self, bucket: _Bucket) -> None:
        if bucket.unit == self._outermost:
            return
        others = (each for each in self._units[bucket.unit] if each.resident and each not in self._launched)
        written = _held({bucket, *others})
        for other in self._launched[: num_to_end(written, [each.nbytes for each in self._launched], self._limit)]:
            self._settle(other)

    def _settle(self, bucket: _Bucket) -> None:
        """End the bucket's reduction, if one was launched."""
        if bucket in self._launched:
            self._launched.remove(bucket)
            bucket.resident = False

    @property
    def _resident(self) -> list[_Bucket]:
        return [bucket for bucket in self._buckets if bucket.resident]


def _held(buckets: Iterable[_Bucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)
