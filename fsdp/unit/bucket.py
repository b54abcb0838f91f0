"""One bucket of a unit: the flat tensors of its parameters and gradients, sharded and whole.

All four have the bucket's layout, so that no tensor is copied between layouts::

    shard         [n / shards]   the module's dtype; the sharded parameters are its memory, each with its own version
    whole_params  [n]            the computing dtype; the whole parameters are views of it
    whole_grads   [n]            the whole parameters' main_grad are views of it
    grad_shard    [n / shards]   the sums of gradients; the sharded parameters' .grad are views of them

``whole_params`` and ``whole_grads`` have memory only while they are used, unless the placements keep them at rest.
``unit.py`` says when it comes and goes.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ddp.buckets.bucket import Bucket, Phase
from ...ddp.buckets.buffer import ReleasableBuffer
from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.in_flight import all_gather_shards
from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.collectives.reduction import GradReduction, Placement
from ...ddp.contract.main_grad import attach_lazily, forget_failed_backward, take_grad_of_backward
from ...ddp.contract.module import listen_to_foreign_delays
from ...ddp.contract.record import GradRecord
from ...ddp.gathers.param_gather import ParamGather
from ...ddp.plan.cut import Range
from ...ddp.plan.layout import BucketLayout
from ...ddp.plan.owned_params import OwnedParam
from ...ddp.torch_internals import current_raw_stream, weak_method
from ..tensors.parameter import ShardedPair, WholeParams, make_pair
from .grad_shard import GradShard
from .materialize import flat_shard
from .plan import UnitOptions

if TYPE_CHECKING:
    from ..iteration.root import Root
    from ..iteration.rounds import GradRound
    from .unit import Unit

__all__ = ["ShardedBucket"]


class ShardedBucket:
    """The four tensors above, the parameters that are views of them, and the gather.

    layout     of the bucket, at the start of a buffer of its own
    owned      the parameters, in the order of the layout's slots
    grid       the ranks over which the parameters are sharded
    options    those of ``fully_shard``
    device     of computation, gathers and reductions
    unit       the unit's name, for errors
    trainable  False: the parameters are frozen, and there are no gradients
    """

    def __init__(
        self,
        layout: BucketLayout,
        owned: Sequence[OwnedParam],
        grid: RankGrid,
        options: UnitOptions,
        device: torch.device,
        *,
        unit: str,
        trainable: bool,
    ) -> None:
        at_rest = options.placements.inner
        self.layout = layout
        self.reduction = reduction = GradReduction(
            grid,
            options.placements,
            factor=1.0 / grid.size,
            wire_dtype=options.policy.wire_dtype,
            device=device,
        )
        self.trainable = trainable
        self.delayed = layout.slots[0].spec.delayed
        """The modules had said, when they were sharded, that they delay these gradients."""
        self.device = device
        self.whole_params_at_rest = at_rest.parameter is Placement.WHOLE
        """Whole parameters always have memory, and are gathered only after the shards have changed."""
        self.whole_grads_at_rest = at_rest.gradient is Placement.WHOLE
        """Whole gradients keep their memory after the first backward."""
        self.reduces_once = at_rest.reduces_once(options.reduce_every_microbatch)
        """Whole gradients stay from one microbatch to the next, and are reduced once in an iteration."""

        # Parameters.
        mine = Range(*reduction.owned_range(layout.numel))
        self.shard = flat_shard(layout, owned, mine, device)
        """[n / shards], the module's dtype."""
        ends = [(slot.start, slot.end - 1) for slot in layout.slots if slot.spec.numel]
        self.cuts_parameters = any(first // mine.numel != last // mine.numel for first, last in ends)
        """A border between shards lies inside a parameter."""
        if options.offload_to_cpu:  # pinned host memory
            self.shard = self.shard.cpu().pin_memory()
        self.whole_params = WholeParams(layout.numel, layout.slots[0].spec.param_dtype, device)
        self.pairs: tuple[ShardedPair, ...] = tuple(
            [
                make_pair(entry, slot, self.shard, mine, self.whole_params.data, reduction, unit)
                for slot, entry in zip(layout.slots, owned, strict=True)
            ]
        )
        self._shards = [pair.sharded.detach() for pair in self.pairs]
        """The sharded parameters as plain tensors, whose versions are read fast."""
        self.whole_params.params = tuple(pair.whole for pair in self.pairs)
        self._part = slice(*reduction.range_inside(layout.numel))
        self._gather_input = self.whole_params.data[self._part]  # what this rank brings to the gather
        self._instance: Tensor | None = None
        if reduction.scatters_across and reduction.grid.outer_size > 1:
            # That part has shards of several instances. It is gathered across instances only after a change.
            self._instance = torch.empty_like(self._gather_input)
        self.whole_params.release()
        self._gathered_version = -1
        self.gather: ParamGather
        """Made by ``connect``."""

        # Gradients.
        self.records: tuple[GradRecord, ...] = ()
        self.grad_bucket: Bucket
        """The whole gradients as a bucket of ``ddp``, for the launcher. Made by ``connect``, unless frozen."""
        self.unit: weakref.ref[Unit]
        """Set by the unit."""
        self.round: weakref.ref[GradRound] | None = None
        """The state of the gradients in their iteration. None before ``connect``, and if frozen."""
        if trainable:
            self._make_grads(owned, layout.slots[0].spec.grad_dtype)
        for pair in self.pairs:
            pair.before.data = pair.before.data.new_empty(0)  # frees the memory even if other references exist

    @property
    def name(self) -> str:
        """Names of the first and last parameter, for errors and labels."""
        first, last = self.pairs[0].sharded.shard.name, self.pairs[-1].sharded.shard.name
        return first if len(self.pairs) == 1 else f"{first} .. {last}"

    @property
    def root(self) -> "Root | None":
        """The model's root; None before ``connect``, and when the model is gone."""
        unit = self.unit()
        return None if unit is None or unit.root_reference is None else unit.root_reference()

    @property
    def changed(self) -> bool:
        """The shard was changed after the last gather."""
        return self._version != self._gathered_version

    @property
    def _version(self) -> int:
        """A number that rises with each write to a sharded parameter."""
        return sum([shard._version for shard in self._shards])

    @property
    def gathers_across(self) -> bool:
        """The next gather begins with a gather across instances."""
        return self._instance is not None and self.changed

    def record_change(self) -> None:
        """The shard may have other values. Fused optimizers do not raise the version of what they write."""
        self._gathered_version = -1

    def connect(self, index: int, failures: FailureReporter) -> None:
        """Join the model's buckets: ``index`` is the place in backward's order among those with gradients."""
        wholes = [pair.whole for pair in self.pairs]
        self.whole_params.refusal = (
            f"the memory of the whole parameters ({self.name}) was freed after the forward of their unit, and this "
            f"tensor is one of them, or a view: keep a copy from the forward (tensor.clone()), or read them within "
            f"unsharded()"
        )
        self.gather = ParamGather(
            self.name, self.whole_params.data, wholes, self.reduction.grid, failures, in_graph=True
        )
        if not self.trainable:
            return
        self.whole_grads.refusal = (
            f"the memory of the whole gradients ({self.name}) was freed after their reduction, and this tensor is a "
            f"main_grad or a view of one: read param.grad of the sharded parameters, or copy main_grad in backward"
        )
        for pair, record in zip(self.pairs, self.records, strict=True):
            record.name = pair.sharded.shard.name
            record.bucket_index = index
            record.make_room = weak_method(self._make_room)
            record.on_delayed_wgrad = weak_method(self._delayed_wgrad_done)
        self.grad_bucket = Bucket(
            dataclasses.replace(self.layout, index=index), self.whole_grads.data, list(self.records)
        )

    # ---- Parameters. ----

    def release_params(self, *, was_read: bool) -> None:
        """Free the memory of the whole parameters, which are gathered. The caller orders streams.

        was_read  the program was given them to read: see ``WholeParams.leave``
        """
        if was_read:
            self.gather.flat = self._gather_input = self.gather.flat.new_empty(0)  # lets go of the memory
            self.whole_params.leave([pair.sharded.shard.name for pair in self.pairs])
            self.gather.flat, self._gather_input = self.whole_params.data, self.whole_params.data[self._part]
        self.whole_params.release()

    def fill(self) -> None:
        """Take memory for the whole parameters and copy this rank's shard into its place, before the gather."""
        self.whole_params.take()
        changed, self._gathered_version = self.changed, self._version
        if self._instance is None:
            self._gather_input.copy_(self.shard, non_blocking=True)
            return
        if changed:
            outer = self.reduction.grid.outer
            self._instance.view(self.reduction.grid.outer_size, -1)[self.reduction.grid.outer_rank].copy_(self.shard)
            all_gather_shards(self._instance, outer).wait()
        self._gather_input.copy_(self._instance)

    # ---- Gradients. ----

    @property
    def is_written(self) -> bool:
        """Whole gradients have memory, and no reduction uses it."""
        return self.whole_grads.resident and self.grad_bucket.phase is Phase.ACCUMULATING

    @property
    def is_launched(self) -> bool:
        """A reduction uses the memory of whole gradients."""
        return self.grad_bucket.phase in (Phase.REDUCING, Phase.REDUCED)

    @property
    def is_pooled(self) -> bool:
        """Whole gradients have memory only while they are written or reduced: ``GradRounds`` bounds it."""
        return self.trainable and not self.whole_grads_at_rest

    @property
    def has_pending(self) -> bool:
        """Delayed weight gradients are not computed yet."""
        return any(record.pending for record in self.records)

    def partial_grads(self) -> list[Tensor]:
        """The ``main_grad`` of which each tensor-parallel rank has a part."""
        slices = [
            (pair.sharded.shard.model_slice, record) for pair, record in zip(self.pairs, self.records, strict=True)
        ]
        return [record.view for found, record in slices if found is not None and found.grad == "partial"]

    def record_stream(self) -> None:
        """CUDA: work of the current stream has written a gradient."""
        if self.device.type == "cuda":
            self.grad_bucket.streams.add(current_raw_stream(self.device.index))

    def discard_grads(self) -> None:
        """Discard this rank's gradients of the iteration. The caller has waited for a reduction of them."""
        self.grad_shard.give_up()
        if not self.whole_grads_at_rest:
            self.whole_grads.release()
        self.grad_bucket.reset()
        for pair, record in zip(self.pairs, self.records, strict=True):
            forget_failed_backward(pair.whole)
            record.forget_lost()
            pair.whole.grad = None

    def _make_grads(self, owned: Sequence[OwnedParam], dtype: torch.dtype) -> None:
        self.whole_grads = ReleasableBuffer(self.layout.numel, dtype, self.device)
        self.records = tuple(
            [
                GradRecord(
                    slot.spec.name,
                    self.whole_grads.data[slot.start : slot.end].view(slot.spec.shape),
                    first_write_overwrites=True,  # whoever writes asks the record: see ``attach_lazily``
                    shared=len(pair.places) > 1,
                )
                for slot, pair in zip(self.layout.slots, self.pairs, strict=True)
            ]
        )
        self.grad_shard = GradShard(
            [pair.sharded for pair in self.pairs],
            self.shard.numel(),
            dtype,
            self.reduction,
            self.device,
            weak_method(self._finish_reduction),
        )
        self.whole_grads.release()
        for entry, pair, record in zip(owned, self.pairs, self.records, strict=True):
            self._serve(entry, pair.whole, record)

    def _serve(self, entry: OwnedParam, param: nn.Parameter, record: GradRecord) -> None:
        """Give a whole parameter its accumulator, and listen to its gradients."""
        here = weakref.ref(self)  # hooks belong to the parameters, and the parameters to this bucket
        attach_lazily(param, record)
        param.register_post_accumulate_grad_hook(partial(_on_grad, here, record))
        listen_to_foreign_delays(param, record, entry.owners)

    def _make_room(self) -> None:
        """The first write of a parameter's gradient comes: the first of all parameters takes the memory."""
        if not self.is_written and (root := self.root) is not None:
            root.grads.make_room(self)

    def _delayed_wgrad_done(self) -> None:
        self.record_stream()
        if (root := self.root) is not None:
            root.grads.delayed_wgrad_done()

    def _finish_reduction(self) -> None:
        if (root := self.root) is not None:
            root.grads.finish_reduction(self)


def _on_grad(here: weakref.ref[ShardedBucket], record: GradRecord, param: Tensor) -> None:
    """The post-accumulate-grad hook of a whole parameter: move ``.grad`` into ``main_grad`` and tell the root."""
    live = here()
    root = None if live is None else live.root
    if live is None or root is None:
        return
    take_grad_of_backward(param, record)
    live.record_stream()
    root.on_grad(live)
