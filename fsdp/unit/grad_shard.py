"""The gradient sums of one bucket on this rank, and ``.grad`` of its sharded parameters.

Whole gradients are reduced in one microbatch of an iteration, or in several (``iteration/rounds.py``)::

    microbatch         whole gradients --- reduce inside the instance ---> + partial
    last microbatch    whole gradients --- reduce inside the instance ---> + partial --- across instances ---> + total

With one instance there is no ``partial``: results are added to ``total``. ``.grad`` of the sharded parameters are views
of ``total``, or of a copy in the shard's dtype and on its device; after ``show_sums`` there is no copy. A program that
sets ``.grad`` to None starts a new sum. ``.grad`` decides what this rank adds to what. It never decides which
collectives run: other ranks cannot see it.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.in_flight import InFlight, finished, in_stages
from ...ddp.collectives.reduction import GradReduction
from ...ddp.torch_grads.sharded_grad import (
    PlaceholderGrad,
    ShardedGrad,
    being_reduced,
    changed_too_early,
    make_placeholder_grads,
    make_sharded_grad,
)
from ..tensors.parameter import ShardedParameter

__all__ = ["GradShard"]


class GradShard:
    """The sums of one bucket, and ``.grad`` of its sharded parameters.

    params            sharded parameters of one dtype, at least one; each is a view of the bucket's flat shard
    numel             number of elements of the shard, padding included
    dtype             of the sums
    reduction         of the bucket
    device            on which gradients are reduced
    finish_reduction  waits for the bucket's reduction; refers to the bucket weakly
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        numel: int,
        dtype: torch.dtype,
        reduction: GradReduction,
        device: torch.device,
        finish_reduction: Callable[[], None],
    ) -> None:
        self._params = tuple(params)
        self._numel = numel
        self._dtype = dtype
        self._reduction = reduction
        self._device = device
        self._finish_reduction = finish_reduction
        self.has_scaler = False
        """A loss scaler has unscaled ``.grad``: an optimizer steps, unless the scaler skips its step."""
        self._shows_sums = False
        self._total: Tensor | None = None
        self._partial: Tensor | None = None
        self._shown: Tensor | None = None  # what .grad are views of: total, or its copy
        self._views: list[ShardedGrad] = []  # of ``shown``, one for each parameter
        self._is_published = True  # no reduction has changed ``total`` since ``publish``
        self._has_partial = False  # ``partial`` contains gradients of this iteration
        # Not None while gradients of this iteration are not in .grad yet (in partial, or not reduced): what .grad was
        # set to, and the version of ``shown`` by then.
        self._expected: Sequence[ShardedGrad] | None = None
        self._version = 0

    @property
    def is_cleared(self) -> bool:
        """``.grad`` of all parameters is None."""
        return all(param.grad is None for param in self._params)

    @property
    def was_cleared(self) -> bool:
        """All ``.grad`` were set to None while gradients were not in them yet: these are to be discarded."""
        return self._expected is not None and self.is_cleared

    def free_if_cleared(self) -> None:
        """Free the memory of the sums if all ``.grad`` are None, so that activations can use it.

        A program that kept such a ``.grad`` keeps its memory. The next reduction makes new sums.
        """
        if self._expected is None and self.is_cleared:
            self._total = self._shown = self._partial = None
            self._views.clear()

    def show_sums(self) -> None:
        """Have ``.grad`` be views of the sums, in their dtype, from now on."""
        self.wait()
        self._shows_sums = True
        for param in self._params:
            param.grad_dtype = None  # torch then takes any
        total, shown, before = self._total, self._shown, self._views
        if total is None or shown is None or shown is total:
            return
        if self._is_published:
            total.copy_(torch.where(total.to(shown.dtype) == shown, total, shown))  # what the program has changed
        self._show(total)
        for param, old, new in zip(self._params, before, self._views, strict=True):
            if param.grad is old:
                param.grad = new
        if self._expected is before:
            self._expected, self._version = self._views, self._version_shown

    def defer(self) -> None:
        """A microbatch's whole gradients are reduced later. Until then ``.grad`` is zeros, or the sum of before.

        ``.grad`` may not stay None: the program discards the microbatch by setting ``.grad`` to None. If there are no
        sums yet, the zeros are placeholders, because the sums take memory only when whole gradients free theirs.
        """
        if self._expected is not None:
            return
        self.free_if_cleared()
        if self._total is None and self.is_cleared:
            self._expected = make_placeholder_grads(self._params)
            for param, zero in zip(self._params, self._expected, strict=True):
                param.grad = zero
        else:
            if not self.claim():
                assert self._shown is not None and self._total is not None, "claim() makes both"
                self._total.zero_()
                self._shown.zero_()
            self._expected = self._views
        self._version = self._version_shown

    def claim(self) -> bool:
        """Have ``.grad`` show the sums before a reduction, and allocate them on the current stream if needed.

        Returns True if the reduction is added to what ``.grad`` contains, False if it overwrites the sums. Raises
        ``RuntimeError`` if ``.grad`` was changed while gradients of the iteration were not in it.
        """
        grads = [param.grad for param in self._params]
        expected, self._expected = self._expected, None
        if expected is not None:
            self._check_untouched(grads, expected)
        else:
            self.free_if_cleared()  # no forward may have run since .grad was set to None
        if self._total is None:
            self._make_sums()
        if all(grad is None or isinstance(grad, PlaceholderGrad) for grad in grads):
            self._has_partial = False
            for param, view in zip(self._params, self._views, strict=True):
                param.grad = view
            return False
        for param, grad, view in zip(self._params, grads, self._views, strict=True):
            if grad is not view:  # the program has set this one to None, or replaced it
                view.zero_() if grad is None else view.copy_(grad)
                self._carry_over(view)
                param.grad = view
        return True

    def reduce(self, grads: Tensor, *, adds_to_total: bool, inside: bool, across: bool) -> InFlight:
        """Start the reduction of the bucket's whole gradients ``grads`` [n] into the sums.

        adds_to_total  result of ``claim``: False overwrites the total
        inside         reduce ``grads`` inside the instance. False: an earlier call did, and only ``partial`` is left
        across         reduce ``partial`` across instances, at the end of the iteration
        """
        assert self._total is not None, "claim() has made it"
        self._is_published = False
        if self._reduction.grid.outer_size == 1:
            stages = self._into_total(grads, self._total, adds_to_total)
        else:
            adds_to_partial, self._has_partial = self._has_partial, not across
            self._expected = None if across else self._views
            stages = self._over_instances(grads, self._total, adds_to_total, adds_to_partial, inside, across)
        flight = in_stages(stages, (grads,))
        being_reduced.add(self)  # until ``landed``
        return flight

    def landed(self) -> None:
        """The reduction into the sums has ended."""
        being_reduced.discard(self)

    def wait(self) -> None:
        """Wait for a reduction into the sums, because the program is about to read or change ``.grad``."""
        if self in being_reduced:
            self._finish_reduction()

    def record_scaler(self) -> None:
        """A loss scaler unscales ``.grad``."""
        self.has_scaler = True

    def publish(self) -> None:
        """Copy the sums to ``.grad``, if the shard has another dtype or device than the sums."""
        self._is_published = True
        if self._shown is not None and self._total is not None and self._shown is not self._total:
            self._shown.copy_(self._total, non_blocking=True)

    def copies(self) -> Iterator[tuple[Tensor, bool]]:
        """The sums of this rank's elements of parameters that tensor-parallel ranks have copies of, and whether these
        ranks have equal gradients."""
        for param in self._params:
            found = param.shard.model_slice
            if found is not None and param.shard.copies > 1 and self._total is not None:
                yield self._total.narrow(0, param.storage_offset(), param.numel()), found.grad == "dense"

    def show_zeros(self) -> None:
        """Set every ``.grad`` that is None to zeros: the iteration is over and has brought no gradient."""
        if any(param.grad is None for param in self._params) and not self.claim():
            assert self._total is not None, "claim() has made it"
            self._total.zero_()

    def give_up(self) -> None:
        """Discard gradients that are not in ``.grad`` yet. What was reduced stays in ``.grad``: a copy follows it."""
        self._has_partial, self._expected = False, None
        if not self._is_published:
            self.publish()

    def _into_total(self, grads: Tensor, total: Tensor, adds: bool) -> Generator[Any, None, None]:
        # A reduction that overwrites the total writes there; the result of one that adds lies in ``grads`` before.
        mine = yield from self._reduction.inside(grads, None if adds else total)
        if mine is not total:
            _accumulate(total, mine, adds)

    def _over_instances(
        self, grads: Tensor, total: Tensor, adds_to_total: bool, adds_to_partial: bool, inside: bool, across: bool
    ) -> Generator[Any, None, None]:
        if self._partial is None:
            start, end = self._reduction.range_inside(grads.numel())
            self._partial = grads.new_empty(end - start)
        if inside:
            summing = self._reduction.inside(grads)
            # Without streams a collective that follows another would begin where this rank waits for the bucket, which
            # depends on what the rank has written: the one across instances begins in the launch, as on all ranks.
            begins_now = across and self._device.type != "cuda"
            mine = finished(summing) if begins_now else (yield from summing)
            _accumulate(self._partial, mine, adds_to_partial)
        elif not adds_to_partial:
            self._partial.zero_()  # this rank has discarded its part; other ranks' parts are summed all the same
        if not adds_to_total:
            total.zero_()
        if across:
            part = yield from self._reduction.across(self._partial)
            total.add_(part)
        else:
            self._version = self._version_shown

    def _make_sums(self) -> None:
        # Not zeroed: the first reduction overwrites the sums of all parameters.
        shown = self._total = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        dtype, device = self._params[0].dtype, self._params[0].device
        if (dtype, device) != (self._dtype, self._device) and not self._shows_sums:
            pinned = device.type == "cpu" and self._device.type == "cuda"
            shown = torch.empty(self._numel, dtype=dtype, device=device, pin_memory=pinned)
        self._show(shown)

    def _show(self, shown: Tensor) -> None:
        """Make ``.grad`` of all parameters as views of ``shown``."""
        self._shown, self._views = shown, []
        for param in self._params:
            flat = shown.narrow(0, param.storage_offset(), param.numel())  # as the parameter lies in its shard
            view = make_sharded_grad(flat, param.shard)
            view.sums = weakref.ref(self)
            self._views.append(view)

    @property
    def _version_shown(self) -> int:
        return 0 if self._shown is None else self._shown._version

    def _check_untouched(self, grads: Sequence[Tensor | None], expected: Sequence[ShardedGrad]) -> None:
        """Raise if ``.grad`` was changed: the change would not apply to gradients that are not in ``.grad`` yet."""
        if all(grad is None for grad in grads):
            return
        for param, grad, shown in zip(self._params, grads, expected, strict=True):
            touched = grad._version if isinstance(grad, PlaceholderGrad) else self._version_shown - self._version
            if grad is not shown or touched:  # a write through a view is not refused, but seen
                raise RuntimeError(changed_too_early(param.shard))

    def _carry_over(self, view: ShardedGrad) -> None:
        """Copy a change of ``.grad`` to the total, if ``.grad`` is a copy of it."""
        if self._shown is not self._total:
            assert self._shown is not None and self._total is not None, "made together"
            start = view.storage_offset() - self._shown.storage_offset()
            self._total[start : start + view.numel()].copy_(view.to_local().view(-1))


def _accumulate(into: Tensor, value: Tensor, adds: bool) -> None:
    if adds:
        into.add_(value)
    else:
        into.copy_(value)
