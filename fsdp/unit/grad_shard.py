"""What this rank's optimizer reads of one bucket's gradients: summed over microbatches, and reduced over both axes.

Whole gradients are reduced any number of times in an iteration (``grad_rounds.py``)::

    in a microbatch       whole gradients --- inside an instance ---> + partial
    in the last one       whole gradients --- inside an instance ---> + partial --- across instances ---> + total

With one instance there is no ``partial``: what was reduced inside is added to ``total`` at once. ``total`` is what
``.grad`` of the sharded parameters shows, so that whoever sets ``.grad`` to None starts a new sum. What is in ``.grad``
decides what is added to what on this rank, and never which collectives there are.
"""

import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.reduction import GradReduction
from ..tensors.gradient import (
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

    params   sharded parameters, one or more of one dtype, each a view of the bucket's flat shard
    offsets  first element of each in that shard
    numel    elements of the shard, padding included
    dtype    of the sums
    device   on which gradients are reduced
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        offsets: Sequence[int],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._params = tuple(params)
        self._offsets = tuple(offsets)
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self.settle: Callable[[], None] | None = None
        """Waits for the bucket's reduction; set by the rounds, which it knows weakly."""
        self._total: Tensor | None = None
        self._partial: Tensor | None = None
        self._shown: Tensor | None = None
        self._views: list[ShardedGrad] = []
        self._has_partial = False  # ``partial`` holds a part of this iteration
        self._incomplete = False  # a part of this iteration is not in .grad yet: partial, or in whole gradients
        self._expected: Sequence[ShardedGrad] = ()  # .grad then
        self._version = 0  # and its version

    def launched(self) -> None:
        """A reduction into the sums is under way."""
        being_reduced.add(self)

    def landed(self) -> None:
        """They have its result."""
        being_reduced.discard(self)

    def arrive(self) -> None:
        """Somebody is about to read or change ``.grad``."""
        if self in being_reduced and self.settle is not None:
            self.settle()

    @property
    def is_cleared(self) -> bool:
        """Somebody has set ``.grad`` of all to None, or nobody has set it."""
        return all(param.grad is None for param in self._params)

    @property
    def was_cleared(self) -> bool:
        """Somebody has set ``.grad`` of all to None while a part was not in it yet: that part is not wanted."""
        return self._incomplete and self.is_cleared

    def defer(self) -> None:
        """A microbatch's whole gradients are kept: have ``.grad`` show zeros, so that clearing it can be seen.

        Sums are made in the last microbatch, when whole gradients go; until then all zeros are one element.
        """
        if self._incomplete:
            return
        self.forget_cleared()
        if self._total is None and self.is_cleared:
            zeros = make_placeholder_grads(self._params)
            for param, zero in zip(self._params, zeros, strict=True):
                param.grad = zero
            self._note_incomplete(zeros)
            return
        if not self.claim():
            assert self._shown is not None and self._total is not None, "made by the claim"
            self._total.zero_()
            self._shown.zero_()
        self._note_incomplete(self._views)

    def forget_cleared(self) -> None:
        """Let the sums' memory go where nobody shows them any more: activations need it now.

        Whoever kept a gradient that was cleared keeps its memory; the next reduction begins with new sums.
        """
        if not (self._incomplete or self._has_partial) and self.is_cleared:
            self._total = self._shown = self._partial = None
            self._views.clear()

    def give_up(self) -> None:
        """What was incomplete is lost."""
        self._has_partial = self._incomplete = False

    def show_zeros(self) -> None:
        """No rank had a gradient in this iteration: ``.grad`` that nobody has set is zeros."""
        if any(param.grad is None for param in self._params) and not self.claim():
            assert self._total is not None, "made by the claim"
            self._total.zero_()

    @property
    def nbytes(self) -> int:
        """Memory on the reducing device, from an iteration's first reduction until the next one's forward."""
        tensors = [tensor for tensor in (self._total, self._partial, self._shown) if tensor is not None]
        return sum(tensor.nbytes for tensor in {id(t): t for t in tensors}.values() if tensor.device == self._device)

    def collect(
        self, reduction: GradReduction, grads: Tensor, *, adds_to_total: bool, inside: bool, across: bool
    ) -> Generator[Any, None, None]:
        """The stages of one reduction of the bucket's whole gradients ``grads`` [n].

        keeps_total  what ``claim`` has said before
        inside       ``grads`` are summed inside an instance; otherwise they were, and what is left is ``partial``
        across       and all that the iteration has brought across instances
        """
        total = self._total
        assert total is not None, "made by the claim"
        if reduction.grid.outer_size == 1:
            return self._into_total(reduction, grads, total, adds_to_total) if inside else _nothing()
        adds_to_partial, self._has_partial, self._incomplete = self._has_partial, not across, not across
        return self._over_instances(reduction, grads, total, adds_to_total, adds_to_partial, inside, across)

    def publish(self) -> None:
        """Bring ``.grad`` up to date where it is a copy of the sums: of another dtype, or on another device."""
        if self._shown is not None and self._total is not None and self._shown is not self._total:
            self._shown.copy_(self._total, non_blocking=True)

    def _into_total(
        self, reduction: GradReduction, grads: Tensor, total: Tensor, keeps: bool
    ) -> Generator[Any, None, None]:
        mine = yield from reduction.inside(grads, None if keeps else total)
        if mine is not total:
            _accumulate(total, mine, keeps)

    def _over_instances(
        self,
        reduction: GradReduction,
        grads: Tensor,
        total: Tensor,
        adds_to_total: bool,
        adds_to_partial: bool,
        inside: bool,
        across: bool,
    ) -> Generator[Any, None, None]:
        if self._partial is None:
            start, end = reduction.range_inside(grads.numel())
            self._partial = grads.new_empty(end - start)
        if inside:
            mine = yield from reduction.inside(grads)
            _accumulate(self._partial, mine, adds_to_partial)
        elif not adds_to_partial:
            self._partial.zero_()  # given up on this rank; the others' parts are summed all the same
        if not adds_to_total:
            total.zero_()
        if across:
            part = yield from reduction.across(self._partial)
            total.add_(part)
        else:
            self._note_incomplete(self._views)

    def claim(self) -> bool:
        """Make ``.grad`` show the sums, made on the current stream; returns whether what they hold is kept."""
        grads = [param.grad for param in self._params]
        incomplete, self._incomplete = self._incomplete, False
        if incomplete:
            self._check_untouched(grads)
            self._expected = ()
        else:
            self.forget_cleared()  # again, where no forward was in between
        if self._total is None:
            self._make_sums()
        if all(grad is None or isinstance(grad, PlaceholderGrad) for grad in grads):
            self._has_partial = False
            for param, view in zip(self._params, self._views, strict=True):
                param.grad = view
            return False
        for param, grad, view in zip(self._params, grads, self._views, strict=True):
            if grad is not view:  # cleared alone, or replaced
                view.zero_() if grad is None else view.copy_(grad)
                self._carry_over(view)
                param.grad = view
        return True

    def _note_incomplete(self, shown: Sequence[ShardedGrad]) -> None:
        self._incomplete, self._expected, self._version = True, shown, self._version_shown

    @property
    def _version_shown(self) -> int:
        return 0 if self._shown is None else self._shown._version

    def _check_untouched(self, grads: Sequence[Tensor | None]) -> None:
        """What was done to ``.grad`` since was not done to what is not in it yet."""
        if all(grad is None for grad in grads):
            return
        for param, grad, shown in zip(self._params, grads, self._expected, strict=True):
            touched = grad._version if isinstance(grad, PlaceholderGrad) else self._version_shown - self._version
            if grad is not shown or touched:  # a view of it may have been written to, which nobody refuses
                raise RuntimeError(changed_too_early(param.shard))

    def _carry_over(self, view: Tensor) -> None:
        """Where ``.grad`` is a copy, the sum follows what somebody did to it."""
        if self._shown is not self._total:
            assert self._shown is not None and self._total is not None, "both are made together"
            start = view.storage_offset() - self._shown.storage_offset()
            self._total[start : start + view.numel()].copy_(view.detach().view(-1))

    def _make_sums(self) -> None:
        # Unwritten: the reduction that they are made for overwrites all that parameters have of them.
        self._total = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._shown = self._total
        dtype, device = self._params[0].dtype, self._params[0].device
        if (dtype, device) != (self._dtype, self._device):
            pinned = device.type == "cpu" and self._device.type == "cuda"
            self._shown = torch.empty(self._numel, dtype=dtype, device=device, pin_memory=pinned)
        for param, offset in zip(self._params, self._offsets, strict=True):
            flat = self._shown[offset : offset + param.numel()]
            view = make_sharded_grad(flat, param.shard)
            view.sums = weakref.ref(self)
            self._views.append(view)


def _accumulate(into: Tensor, value: Tensor, keeps: bool) -> None:
    if keeps:
        into.add_(value)
    else:
        into.copy_(value)


def _nothing() -> Generator[Any, None, None]:
    yield from ()
