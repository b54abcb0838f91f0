"""One bucket of a unit: its parameters' shard at rest, the whole parameters of its gather, and its gradients' memory.

All of it has the bucket's own layout, so that nothing is ever copied between layouts::

    shard        [n / shards]   the module's dtype; the sharded parameters are views of it
    gathered     [n]            the computing dtype; the unsharded parameters are views of it
    grads        [n]            main_grad of the unsharded parameters are views of it
    grad shard   [n / shards]   .grad of the sharded parameters are views of it

``gathered`` and ``grads`` have memory only as long as the placements say.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ddp.buckets.bucket import Bucket, Phase
from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.in_flight import all_gather_shards
from ...ddp.collectives.observer import Observer
from ...ddp.collectives.placements import Placement, Placements
from ...ddp.collectives.reduction import GradReduction
from ...ddp.contract.main_grad import attach_lazily, forget_failed_backward, take_grad_of_backward
from ...ddp.contract.module import listen_to_foreign_delays
from ...ddp.contract.record import GradRecord
from ...ddp.gathers.param_gather import ParamGather
from ...ddp.plan.layout import BucketLayout
from ...ddp.plan.owned_params import OwnedParam
from ...ddp.torch_internals import current_raw_stream
from ..tensors.parameter import ShardedParameter, ShardInfo, make_sharded
from .grad_shard import GradShard
from .memory import ReleasableBuffer
from .round import Round

__all__ = ["BucketEvents", "ShardedBucket", "ShardedPair"]


class BucketEvents(NamedTuple):
    """Whom a bucket tells what happens to it; all of them refer to it and to their own object weakly."""

    make_room: Callable[["ShardedBucket"], None]
    """A gradient is about to be written, and there is no memory for it, or a collective has it."""
    on_grad: Callable[["ShardedBucket"], None]
    """A parameter's gradient of one backward is complete, or queued."""
    on_delayed_wgrad: Callable[["ShardedBucket"], None]
    """A delayed weight gradient was computed."""


class ShardedPair(NamedTuple):
    """One parameter in its two forms."""

    name: str
    """In its unit."""
    before: nn.Parameter
    """The one before sharding, whose memory is gone."""
    places: "tuple[tuple[weakref.ref[nn.Module], str], ...]"
    """The modules that register it, which own the unit, and its name in each."""
    sharded: ShardedParameter
    whole: nn.Parameter

    @property
    def owned(self) -> OwnedParam:
        """As it was found."""
        found = [(reference(), local) for reference, local in self.places]
        owners = tuple((module, local) for module, local in found if module is not None)
        return OwnedParam(self.name, self.before, owners)


class ShardedBucket:
    """See above.

    layout      of the bucket, alone in its buffer
    owned       its parameters, in the order of the layout's slots
    reduction   which ranks there are, and what is scattered
    placements  what has memory at rest
    trainable   False: there are no gradients
    offload     the shard lies in pinned host memory
    holds_grads whole gradients stay from one microbatch to the next, and are reduced once in an iteration
    """

    def __init__(
        self,
        layout: BucketLayout,
        owned: Sequence[OwnedParam],
        reduction: GradReduction,
        placements: Placements,
        device: torch.device,
        *,
        unit: str,
        trainable: bool,
        offload: bool,
        holds_grads: bool,
    ) -> None:
        self.layout = layout
        self.reduction = reduction
        self.trainable = trainable
        self.delayed = layout.slots[0].spec.delayed
        """Its modules said when they were wrapped that they delay these gradients."""
        self.device = device
        self.keeps_params = placements.inner.parameter is Placement.WHOLE
        """Whole parameters have memory for good, and are gathered when the shards have changed."""
        self.keeps_grads = placements.inner.gradient is Placement.WHOLE
        """Whole gradients have memory for good, from their first use."""
        self.holds_grads = holds_grads

        # Shards.
        first, last = reduction.owned_range(layout.numel)
        specs = [slot.spec for slot in layout.slots]
        flat = torch.zeros(layout.numel, dtype=owned[0].param.dtype, device=device)
        for slot, entry in zip(layout.slots, owned, strict=True):
            flat[slot.start : slot.end].view(slot.spec.shape).copy_(entry.param.detach())
        self.shard = flat[first:last].clone()
        """[n / shards], the module's dtype."""
        if offload:
            self.shard = self.shard.cpu().pin_memory()
        del flat

        # Whole parameters, which autograd must not take for views of what the gather writes into.
        self.gathered = ReleasableBuffer(layout.numel, specs[0].param_dtype, device)
        self.pairs: tuple[ShardedPair, ...] = tuple(
            [
                ShardedPair(
                    entry.name,
                    entry.param,
                    tuple((weakref.ref(module), local) for module, local in entry.owners),
                    _sharded(self.shard, first, last, slot.start, slot.end, entry, reduction, unit),
                    nn.Parameter(
                        self.gathered.data.data[slot.start : slot.end].view(slot.spec.shape).data,
                        requires_grad=entry.param.requires_grad,
                    ),
                )
                for slot, entry in zip(layout.slots, owned, strict=True)
            ]
        )
        for pair in self.pairs:
            pair.whole.__dict__.update(_marks(pair.before))
        inner_first, inner_last = reduction.range_inside(layout.numel)
        self._mine = self.gathered.data[inner_first:inner_last]
        self._instance: Tensor | None = None
        if reduction.scatters_across and reduction.grid.outer_size > 1:
            self._instance = torch.empty_like(self._mine)  # of all instances' shards, gathered when they change
        self.gathered.release()
        self._gathered_version = -1
        self.gather: ParamGather | None = None

        # Gradients.
        self.records: tuple[GradRecord, ...] = ()
        self.bucket: Bucket | None = None
        self.round: Round | None = None
        """Where its gradients are in their iteration; it shares that with other buckets of its unit."""
        if trainable:
            self._make_grads(specs[0].grad_dtype, first, last)
        for pair in self.pairs:
            pair.before.data = pair.before.data.new_empty(0)  # also where somebody else refers to it

    @property
    def name(self) -> str:
        """For errors and labels."""
        first, last = self.pairs[0].sharded.shard.name, self.pairs[-1].sharded.shard.name
        return first if len(self.pairs) == 1 else f"{first} .. {last}"

    @property
    def changed(self) -> bool:
        """The shards were changed since they were gathered."""
        return self.shard._version != self._gathered_version

    def note_change(self) -> None:
        """An optimizer has changed the shards, and may not have raised their version."""
        self._gathered_version = -1

    def note_whole_changed(self) -> None:
        """Somebody had whole parameters that are kept, and may have written to them."""
        if self.keeps_params:
            self._gathered_version = -1

    @property
    def cuts_parameters(self) -> bool:
        """Whether some rank has a part of a parameter."""
        size = self.shard.numel()
        return any(slot.start // size != (slot.end - 1) // size for slot in self.layout.slots if slot.end > slot.start)

    @property
    def why_unfinished(self) -> str | None:
        """Why no optimizer may step over the gradients yet; None where it may."""
        if self.round is None or self.bucket is None:
            return None
        if self.has_pending:
            return (
                "wait for delayed weight gradients: run the modules' backward_dw() or drain their WgradQueue, after "
                "the last backward and before the step"
            )
        bypassed = any(pair.whole.grad is not None for pair in self.pairs)
        if self.round.under_way or not self.bucket.idle or bypassed:
            return (
                "are not reduced yet: run the last microbatch's backward outside no_sync(), or call "
                "model.finish_grad_sync()"
            )
        return None

    def connect(self, index: int, failures: FailureReporter, events: BucketEvents) -> None:
        """Take its place among the buckets of a whole model: ``index`` in the order in which backward reaches them."""
        wholes = [pair.whole for pair in self.pairs]
        self.gather = ParamGather(self.name, self.gathered.data, wholes, self.reduction.grid, failures)
        if not self.trainable:
            return
        here = weakref.ref(self)
        for pair, record in zip(self.pairs, self.records, strict=True):
            record.name = pair.sharded.shard.name
            record.bucket_index = index
            record.make_room = partial(_first_write, here, events.make_room)
            record.on_delayed_wgrad = partial(_tell, here, events.on_delayed_wgrad)
        self.bucket = Bucket(dataclasses.replace(self.layout, index=index), self.grads.data, list(self.records))
        self._on_grad = events.on_grad

    # ---- Parameters. ----

    def start_gather(self, stream: torch.cuda.Stream | None, observer: Observer) -> None:
        """Issue the gather, on a stream that waits for what it must."""
        assert self.gather is not None, "connected"
        self.gather.start(stream, observer, fill=self._fill, ordered=True)

    def forget_params(self) -> None:
        """Give up the whole parameters' memory; the stream that took it waits for whoever read them."""
        if not self.keeps_params:
            self.gathered.release()

    def _fill(self) -> None:
        self.gathered.take()
        changed, self._gathered_version = self.changed, self.shard._version
        if self._instance is None:
            self._mine.copy_(self.shard, non_blocking=True)
            return
        if changed:
            outer = self.reduction.grid.outer
            self._instance.view(self.reduction.grid.outer_size, -1)[self.reduction.grid.outer_rank].copy_(self.shard)
            all_gather_shards(self._instance, outer).wait()
        self._mine.copy_(self._instance)

    # ---- Gradients. ----

    @property
    def has_pending(self) -> bool:
        """Whether delayed weight gradients are missing."""
        return any(record.pending for record in self.records)

    def discard_grads(self) -> None:
        """Forget what this rank has written in an iteration that was given up, after whoever reduces it."""
        assert self.bucket is not None, "trainable"
        self.grad_shard.give_up()
        self.grads.release()
        self.bucket.reset()
        for pair, record in zip(self.pairs, self.records, strict=True):
            forget_failed_backward(pair.whole)
            record.forget_lost()
            pair.whole.grad = None

    def _make_grads(self, dtype: torch.dtype, first: int, last: int) -> None:
        self.grads = ReleasableBuffer(self.layout.numel, dtype, self.device)
        self.records = tuple(
            [
                GradRecord(
                    slot.spec.name,
                    self.grads.data[slot.start : slot.end].view(slot.spec.shape),
                    first_write_overwrites=True,
                    shared=len(pair.places) > 1,
                )
                for slot, pair in zip(self.layout.slots, self.pairs, strict=True)
            ]
        )
        self.grad_shard = GradShard(
            [pair.sharded for pair in self.pairs],
            [max(slot.start - first, 0) for slot in self.layout.slots],
            last - first,
            dtype,
            self.device,
        )
        self.grads.release()
        raw_stream = None
        if self.device.type == "cuda":
            raw_stream = partial(current_raw_stream, self.device.index)
        here = weakref.ref(self)  # hooks are the parameter's, which this owns
        for pair, record in zip(self.pairs, self.records, strict=True):
            attach_lazily(pair.whole, record)
            pair.whole.register_post_accumulate_grad_hook(partial(_absorb, here, record, raw_stream))
            listen_to_foreign_delays(pair.whole, record, [module for module, _ in pair.owned.owners])


def _absorb(
    here: "weakref.ref[ShardedBucket]", record: GradRecord, raw_stream: Callable[[], int] | None, param: Tensor
) -> None:
    """The post-accumulate-grad hook."""
    live = here()
    if live is None or live.bucket is None:
        return
    take_grad_of_backward(param, record)
    if raw_stream is not None:
        live.bucket.streams.add(raw_stream())
    live._on_grad(live)


def _first_write(here: "weakref.ref[ShardedBucket]", event: Callable[[ShardedBucket], None]) -> None:
    live = here()
    if live is None or live.bucket is None:
        return
    if not (live.grads.resident and live.bucket.phase is Phase.ACCUMULATING):  # another parameter was here before
        event(live)


def _tell(here: "weakref.ref[ShardedBucket]", event: Callable[[ShardedBucket], None]) -> None:
    live = here()
    if live is not None:
        event(live)


def _sharded(
    shard: Tensor,
    first: int,
    last: int,
    start: int,
    end: int,
    owned: OwnedParam,
    reduction: GradReduction,
    unit: str,
) -> ShardedParameter:
    """The part of one parameter, elements [start, end) of the bucket, that lies in this rank's [first, last)."""
    begin, finish = min(max(start, first), end), max(min(end, last), start)
    if begin >= finish:
        begin = finish = start
    info = ShardInfo(
        owned.name,
        tuple(owned.param.shape),
        begin - start,
        finish - start,
        reduction.grid,
        reduction.num_replicas,
        unit,
        reduction.grid,
    )
    at = begin - first if finish > begin else 0
    param = make_sharded(shard[at : at + finish - begin], info, owned.param.requires_grad)
    param.__dict__.update({key: value for key, value in _marks(owned.param).items() if key != "shard"})
    return param


def _marks(param: nn.Parameter) -> dict[str, Any]:
    """Attributes that somebody gave the parameter: Megatron's marks, the user's."""
    return dict(param.__dict__)
